"""Structured logs of both daemons: one event a line on stderr, as logfmt or JSON.

    any thread ──▶ stamp ──▶ rate limit ──▶ bounded queue ──▶ one thread ──▶ stderr

Rules:
- An event is words without values, its values are fields; never tokens, salts, fingerprints, keys or passwords. Every line has
  the request id and the trace id of the task that wrote it, if there are any.
- Writing never stops the event loop: lines wait in a bounded queue, and when that is full they are dropped and counted (a
  reader of stderr that hangs must not hang us), errors and the audit log last. What waits is text and figures, no longer than
  MAX_VALUE: nothing that somebody may change or that would keep a request's memory.
- Equal lines (same logger, level, event and subject) are written a few times, then once an interval with `suppressed=N`
  (kvdir/core/repeats.py). Of errors every new wording is another line. Debug lines and the audit log are never held back.

See docs/observability.md.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from kvdir.config import changed
from kvdir.core.repeats import Repeats
from kvdir.obs import trace

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("logfmt", "json")
AUDIT = "kvdir.audit"
"""Logger of what administrators do: nothing of it is held back."""

SUBJECT_FIELDS = (
    "node", "peer", "stream", "engine", "namespace", "method", "identity", "backend", "device", "address", "number", "finding",
    "path", "file", "task", "setting", "collector",
)  # fmt: skip
"""Fields that say about what an event speaks: another value makes it another event."""
WORD_FIELDS = ("error", "reason", "words", "why")
"""Fields that say what is wrong."""

MAX_VALUE = 8192
"""Characters of a value; the rest is cut off, since callers choose some of them."""
_QUEUED_LINES = 4096
_QUEUED_ERRORS = 1024
_LOOK_S = 1.0
_CLOSE_S = 2.0


def say(log: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Logs an event with its fields. Cheap when the level is off."""
    if log.isEnabledFor(level):
        log.log(level, event, extra={"fields": fields})


def say_start(log: logging.Logger, config: object, *, version: str) -> None:
    """What runs from here on, and every setting that is not its default, without secrets."""
    settings = {f"setting.{name}": _listed(value) for name, value in changed(config).items()}
    say(log, logging.INFO, "starting", version=version, pid=os.getpid(), **settings)


def say_bug(log: logging.Logger, event: str, error: BaseException | None, **fields: object) -> None:
    """An exception that nobody expected: an error, with its traceback in the same line."""
    log.error(event, exc_info=error, extra={"fields": fields})


def log_faults(level: str, form: str) -> list[str]:
    """What is wrong with these settings."""
    out = []
    if level not in LOG_LEVELS:
        out.append(f"log_level: {level!r} is not one of {', '.join(LOG_LEVELS)}")
    if form not in LOG_FORMATS:
        out.append(f"log_format: {form!r} is not one of {', '.join(LOG_FORMATS)}")
    return out


class LogfmtFormatter(logging.Formatter):
    """ts=2026-01-31T12:00:00.123Z level=info logger=kvdir.events event="namespace refused" node=n1"""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{key}={_quoted(value)}" for key, value in _fields(self, record).items())


class JsonFormatter(logging.Formatter):
    """The same fields as one JSON object; figures stay figures."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(self, record), default=str)


def _fields(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, Any]:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    fields: dict[str, Any] = {
        "ts": f"{moment}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": _shown(record.getMessage()),
    }
    for key, value in getattr(record, "fields", {}).items():
        fields[key if key not in fields else f"{key}_"] = value
    for key, value in getattr(record, "stamp", {}).items():
        fields.setdefault(key, value)
    if record.exc_info:
        fields["traceback"] = formatter.formatException(record.exc_info)
    elif record.exc_text:
        fields["traceback"] = record.exc_text
    return fields


def _listed(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _quoted(value: object) -> str:
    text = str(value)
    if text and text.isprintable() and not any(sign in text for sign in ' "='):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


@dataclass(slots=True)
class LogFigures:
    """Lines since start. dropped: the queue was full; suppressed: equal to others, and counted in a later line."""

    written: int = 0
    dropped: int = 0
    suppressed: int = 0


class QueueingHandler(logging.Handler):
    """See the module docstring. `handle` holds the handler's lock, which guards the table of repeats and the figures."""

    def __init__(self, target: logging.Handler) -> None:
        super().__init__()
        self.figures = LogFigures()
        self._target = target
        self._repeats: Repeats[logging.LogRecord] = Repeats()
        self._lines: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._untold = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._take(record)
        except Exception:  # a value that cannot be written: logging's own answer, on stderr; whoever logs goes on
            self.handleError(record)

    def _take(self, record: logging.LogRecord) -> None:
        _let_go(record)
        key = _key(record)
        record.msg, record.args = _shown(record.getMessage()), None
        record.stamp = _stamp()
        if record.levelno <= logging.DEBUG or record.name == AUDIT:
            self._queue(record, 0)
            return
        for line, before in self._repeats.offer(key, record, time.monotonic()):
            self._queue(line, before)

    def close(self) -> None:
        """Writes what waits, for _CLOSE_S at most."""
        if self._thread.is_alive():
            with self._guard():
                self._queue_all(self._repeats.rest())
            self._lines.put(None)
            self._thread.join(_CLOSE_S)
        super().close()

    def _guard(self) -> Any:
        assert self.lock is not None
        return self.lock

    def _queue_all(self, lines: list[tuple[logging.LogRecord, int]]) -> None:
        for line, before in lines:
            self._queue(line, before)

    def _queue(self, record: logging.LogRecord, before: int) -> None:
        """before: equal lines that were not written."""
        self.figures.suppressed = self._repeats.suppressed
        grave = record.levelno >= logging.ERROR or record.name == AUDIT
        if self._lines.qsize() >= _QUEUED_LINES + (_QUEUED_ERRORS if grave else 0):
            self.figures.dropped += 1
            self._untold += 1
            return
        if before:
            record.fields = {**getattr(record, "fields", {}), "suppressed": before}
        if self._untold:
            lost, self._untold = self._untold, 0
            told = logging.LogRecord("kvdir.logs", logging.WARNING, "", 0, "log lines dropped", None, None)
            told.fields = {"lines": lost}
            self._lines.put(told)
        self._lines.put(record)

    def _write(self) -> None:
        """The thread: whatever is ready, and at the end of an interval what was held back in it."""
        look_s = time.monotonic() + _LOOK_S
        while True:
            try:
                record = self._lines.get(timeout=max(0.0, look_s - time.monotonic()))
            except queue.Empty:
                record = None
            else:
                if record is None:
                    return
                self._target.handle(record)
                self.figures.written += 1
            if (now_s := time.monotonic()) >= look_s:
                look_s = now_s + _LOOK_S
                with self._guard():
                    self._queue_all(self._repeats.due(now_s))


def _stamp() -> dict[str, str]:
    """Which request the line belongs to."""
    out = {}
    if name := trace.request_id():
        out["request_id"] = name
    context = trace.current()
    if context is not None:
        out["trace_id"] = context.trace_id
    return out


def _let_go(record: logging.LogRecord) -> None:
    """Of whatever the values refer to: a traceback's frames, for one, hold all that was in them, while the line waits."""
    if record.exc_info:
        text = logging.Formatter().formatException(record.exc_info)
        record.exc_text = text if len(text) <= MAX_VALUE else f"...{text[-MAX_VALUE:]}"  # its end says what went wrong
        record.exc_info = None
    fields: Mapping[str, object] = getattr(record, "fields", {})
    record.fields = {key: _shown(value) for key, value in fields.items()}


def _shown(value: object) -> str | int | float | None:
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = str(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}... ({len(text)} characters)"


def _key(record: logging.LogRecord) -> tuple[object, ...]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    # The message as it was written, with its arguments only where each wording counts.
    parts: list[object] = [record.name, record.levelno, record.msg]
    parts += [str(fields[name]) for name in SUBJECT_FIELDS if name in fields]
    if record.levelno >= logging.ERROR:
        parts += [str(record.args), *(str(fields[name]) for name in WORD_FIELDS if name in fields)]
        parts.append(record.exc_text)
    return tuple(parts)


_handler: QueueingHandler | None = None


def figures() -> LogFigures:
    """Of this process's log; zeros where `configure` was not called."""
    return _handler.figures if _handler is not None else LogFigures()


def configure(level: str, form: str = "logfmt", *, stream: TextIO | None = None) -> None:
    """Once per process, by the command that starts a daemon."""
    global _handler
    target = logging.StreamHandler(stream or sys.stderr)
    target.setFormatter(JsonFormatter() if form == "json" else LogfmtFormatter())
    _handler = QueueingHandler(target)
    root = logging.getLogger()
    root.handlers = [_handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("grpc").setLevel(logging.WARNING)
    atexit.register(_handler.close)
