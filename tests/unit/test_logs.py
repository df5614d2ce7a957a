"""Lines of the log: their form, what is held back, and a reader of stderr that does not read."""

from __future__ import annotations

import io
import json
import logging
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdir.core.repeats import FIRST
from kvdir.obs import trace
from kvdir.obs.logs import AUDIT, MAX_VALUE, JsonFormatter, LogfmtFormatter, QueueingHandler, log_faults, say
from kvdir.obs.trace import parse

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Log:
    """A logger of its own whose lines are kept."""

    def __init__(self, name: str, formatter: logging.Formatter, target: io.TextIOBase) -> None:
        self.stream = target
        stream = logging.StreamHandler(target)  # type: ignore[type-var]
        stream.setFormatter(formatter)
        self.handler = QueueingHandler(stream)
        self.logger = logging.getLogger(name)
        self.logger.propagate = False
        self.logger.handlers = [self.handler]
        self.logger.setLevel(logging.DEBUG)

    def say(self, level: int, event: str, **fields: object) -> None:
        say(self.logger, level, event, **fields)

    def lines(self) -> list[str]:
        self.handler.close()
        assert isinstance(self.stream, io.StringIO)
        return self.stream.getvalue().splitlines()


@contextmanager
def logging_to(
    *, name: str = "test.logs", form: type[logging.Formatter] = JsonFormatter, target: io.TextIOBase | None = None
) -> Iterator[Log]:
    log = Log(name, form(), target or io.StringIO())
    try:
        yield log
    finally:
        log.handler.close()
        log.logger.handlers = []


def test_line_has_time_level_logger_event_and_fields_when_something_is_said() -> None:
    with logging_to(form=LogfmtFormatter) as log:
        log.say(logging.WARNING, "node forgotten", node="n1", blocks=7, words='say "hi"')
        (line,) = log.lines()
    fields = dict(part.split("=", 1) for part in shlex.split(line))
    assert fields.pop("ts").endswith("Z")
    assert fields == {
        "level": "warning", "logger": "test.logs", "event": "node forgotten", "node": "n1", "blocks": "7", "words": 'say "hi"',
    }  # fmt: skip


@pytest.mark.parametrize("form", [LogfmtFormatter, JsonFormatter])
@given(text=st.text(max_size=60))
def test_event_is_one_line_whatever_a_value_holds(form: type[logging.Formatter], text: str) -> None:
    record = logging.LogRecord("n", logging.INFO, "", 0, "event", None, None)
    record.fields = {"value": text}
    line = form().format(record)
    assert len(line.splitlines()) == 1
    assert line.isprintable()


def test_exception_is_in_its_line_when_there_is_one() -> None:
    with logging_to() as log:
        try:
            raise ValueError("broken\nin two")
        except ValueError as error:
            log.logger.exception("call failed")
            log.say(logging.ERROR, "other", error=error)
        first, second = map(json.loads, log.lines())
    assert first["event"] == "call failed"
    assert "ValueError: broken\nin two" in first["traceback"]
    assert second["error"] == "broken\nin two"


def test_figures_stay_figures_when_the_form_is_json() -> None:
    with logging_to() as log:
        log.say(logging.INFO, "e", blocks=7, ratio=0.5, path=None, ts="x")
        (line,) = map(json.loads, log.lines())
    assert (line["blocks"], line["ratio"], line["path"], line["ts_"]) == (7, 0.5, None, "x")
    assert line["ts"] != "x"


def test_line_names_request_and_trace_when_it_is_said_for_one() -> None:
    with logging_to() as log:
        with trace.within(parse(f"00-{TRACE}-00f067aa0ba902b7-00"), request_id="cmpl-7"):
            log.say(logging.INFO, "inside")
        log.say(logging.INFO, "outside")
        inside, outside = map(json.loads, log.lines())
    assert (inside["request_id"], inside["trace_id"]) == ("cmpl-7", TRACE)
    assert not {"request_id", "trace_id"} & outside.keys()


def test_name_of_a_request_is_in_a_line_once_when_it_is_said_too() -> None:
    with logging_to(form=LogfmtFormatter) as log:
        with trace.within(None, request_id="cmpl-7"):
            log.say(logging.ERROR, "call failed", request_id="cmpl-7")
        (line,) = log.lines()
    assert line.count("cmpl-7") == 1


def test_whoever_logs_goes_on_when_a_value_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __str__(self) -> str:
            raise ValueError("no words")

    failed: list[object] = []
    with logging_to() as log:
        monkeypatch.setattr(log.handler, "handleError", failed.append)
        log.say(logging.INFO, "broken", node=Broken())
        log.say(logging.INFO, "well")
        assert len(log.lines()) == 1
    assert len(failed) == 1


def test_repeats_are_counted_when_one_event_floods_the_log() -> None:
    with logging_to() as log:
        for number in range(1000):
            log.say(logging.WARNING, "peer not connected", peer="n1", error=f"refused {number}")
        log.say(logging.WARNING, "peer not connected", peer="n2", error="refused")
        lines = [json.loads(line) for line in log.lines()]
    of_n1 = [line for line in lines if line["peer"] == "n1"]
    assert len(of_n1) == FIRST + 1
    assert of_n1[-1]["error"] == "refused 999"
    assert sum(1 + line.get("suppressed", 0) for line in of_n1) == 1000
    assert len(lines) - len(of_n1) == 1
    assert log.handler.figures.suppressed == 1000 - len(of_n1)


def test_no_error_is_held_back_when_its_words_are_new() -> None:
    with logging_to() as log:
        for number in range(50):
            log.say(logging.ERROR, "call failed", error=f"words {number}")
            log.logger.error("failed: %s", number)
        assert len(log.lines()) == 100


@pytest.mark.parametrize(("name", "level"), [("test.debug", logging.DEBUG), (AUDIT, logging.INFO)])
def test_nothing_is_held_back_when_it_is_for_debugging_or_the_audit(name: str, level: int) -> None:
    with logging_to(name=name) as log:
        for _ in range(50):
            log.say(level, "same")
        assert len(log.lines()) == 50


class Stuck(io.StringIO):
    """stderr whose reader does not read until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        assert self.released.wait(30)
        return super().write(text)


def test_nobody_waits_and_errors_are_dropped_last_when_stderr_is_stuck() -> None:
    stuck = Stuck()
    with logging_to(target=stuck) as log:
        for number in range(6000):
            log.say(logging.DEBUG, "debug", number=number)
        for number in range(500):
            log.say(logging.ERROR, "error", error=number)
        assert log.handler.figures.dropped >= 1900
        stuck.released.set()
        lines = [json.loads(line) for line in log.lines()]
    assert sum(line["event"] == "error" for line in lines) == 500
    told = [line for line in lines if line["event"] == "log lines dropped"]
    assert sum(line["lines"] for line in told) == log.handler.figures.dropped


def test_tracebacks_are_let_go_when_their_line_waits() -> None:
    stuck = Stuck()
    with logging_to(target=stuck) as log:
        try:
            raise ValueError("x")
        except ValueError as error:
            record = logging.LogRecord("n", logging.ERROR, "", 0, "e", None, (ValueError, error, error.__traceback__))
            record.fields = {"error": error}
        log.handler.handle(record)
        assert record.exc_info is None
        assert record.fields == {"error": "x"}
        stuck.released.set()


def test_line_is_short_and_json_when_values_are_not() -> None:
    names = ["n1"]
    with logging_to() as log:
        log.say(logging.ERROR, "odd", node="n" * 100_000, age_s=float("inf"), table={b"key": 1}, names=names)
        log.logger.error("from elsewhere: %s", "x" * 100_000)
        names.append("later")
        first, second = log.lines()
    fields = json.loads(first, parse_constant=pytest.fail)
    assert fields["node"].endswith("n... (100000 characters)")
    assert (fields["age_s"], fields["table"], fields["names"]) == ("inf", "{b'key': 1}", "['n1']")
    assert len(first) < MAX_VALUE + 1000 > len(second)


def test_settings_are_refused_in_words_when_they_are_wrong() -> None:
    assert log_faults("info", "json") == []
    assert len(log_faults("loud", "xml")) == 2
