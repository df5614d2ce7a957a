"""Real Prometheus and Alertmanager servers for tests and for the pictures of the docs.

Each lives in a directory of its own, takes a free port of 127.0.0.1, and is ended by its process id when the `with` block ends.
Everything here blocks for as long as a condition takes, up to a deadline.

    with prometheus_server({"kvdir": ["127.0.0.1:7401"]}) as prometheus:
        prometheus.until("up == 1", lambda samples: len(samples) == 1)

Does not: alter a server of the machine, or leave anything behind.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdir.testing.wait import POLL_S

_READY_S = 30.0
_CALL_S = 10.0
_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')


class NotInstalled(RuntimeError):
    """There is no such server program here; the message says how to get one."""


class QueryRefused(ValueError):
    """Prometheus could not read or evaluate an expression; the message is its own, with the position."""


def program(*names: str) -> str:
    """Path of the first of these programs that is on PATH. Raises NotInstalled."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        how = "apt-get install prometheus prometheus-alertmanager (Debian, Ubuntu)"
        raise NotInstalled(f"there is no {names[0]} on PATH: {how}")
    return found


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of an answer. points: (unix seconds, value), one of them for an instant query."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def value(self) -> float:
        """The last one."""
        return self.points[-1][1]


@dataclass(frozen=True, slots=True)
class Server:
    """A server process that listens."""

    process: subprocess.Popen[bytes]
    address: str
    log_path: Path

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def log(self) -> str:
        """The end of what it wrote."""
        return self.log_path.read_text(errors="replace")[-2000:]

    def get(self, path: str, **parameters: str | float) -> Any:
        """JSON of a GET. QueryRefused with the server's words for a status of 400 or 422, OSError for another."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        try:
            with urllib.request.urlopen(f"{self.url}{path}{query}", timeout=_CALL_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                if error.code not in (400, 422):
                    raise
                raise QueryRefused(f"{json.load(error)['error']}: {parameters.get('query', path)}") from None


@dataclass(frozen=True, slots=True)
class Prometheus(Server):
    """A Prometheus server."""

    def query(self, expression: str) -> tuple[Sample, ...]:
        """The expression now; a scalar is one sample without labels. Raises QueryRefused."""
        data = self.get("/api/v1/query", query=expression)["data"]
        if data["resultType"] == "scalar":
            return (Sample({}, (_point(data["result"]),)),)
        return tuple(Sample(item["metric"], (_point(item["value"]),)) for item in data["result"])

    def query_range(self, expression: str, *, start_s: float, end_s: float, step_s: float) -> tuple[Sample, ...]:
        """The expression at every step of a span of unix time. Raises QueryRefused."""
        data = self.get("/api/v1/query_range", query=expression, start=start_s, end=end_s, step=step_s)["data"]
        return tuple(Sample(item["metric"], tuple(map(_point, item["values"]))) for item in data["result"])

    def alerts(self) -> tuple[Mapping[str, Any], ...]:
        """Alerts that are pending or firing, as /api/v1/alerts gives them."""
        return tuple(self.get("/api/v1/alerts")["data"]["alerts"])

    def until(
        self, expression: str, condition: Callable[[tuple[Sample, ...]], object] = bool, *, within_s: float = 30.0
    ) -> tuple[Sample, ...]:
        """The first answer that satisfies the condition; by default: any. AssertionError with the last one if none did."""
        until_s = time.monotonic() + within_s
        while not condition(samples := self.query(expression)):
            assert time.monotonic() < until_s, f"not within {within_s:g} s: {expression} is {samples}"
            time.sleep(0.1)
        return samples


@contextlib.contextmanager
def prometheus_server(
    jobs: Mapping[str, Sequence[str]],
    *,
    rules: Sequence[Path] = (),
    alertmanagers: Sequence[str] = (),
    scrape_interval_s: int = 1,
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the addresses of each job, and evaluates the rules as often. Raises NotInstalled."""
    interval = f"{scrape_interval_s}s"
    config: dict[str, Any] = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": list(targets)}]} for job, targets in jobs.items()],
        "rule_files": [str(path.resolve()) for path in rules],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": list(alertmanagers)}]}]},
    }
    flags = ("--storage.tsdb.path=data", "--enable-feature=exemplar-storage", "--query.lookback-delta=10s")
    with _server(program("prometheus"), config, flags) as (process, address, log):
        server = Prometheus(process, address, log)
        _until_ready(server)
        yield server


@contextlib.contextmanager
def alertmanager_server(webhook: str) -> Iterator[Server]:
    """An Alertmanager that sends every alert to the webhook URL, at once and without grouping. Raises NotInstalled."""
    at_once = {"group_by": ["..."], "group_wait": "0s", "group_interval": "1s", "repeat_interval": "1h"}
    config = {
        "route": {"receiver": "webhook", **at_once},
        "receivers": [{"name": "webhook", "webhook_configs": [{"url": webhook, "send_resolved": True}]}],
    }
    flags = ("--storage.path=data", "--cluster.listen-address=")
    with _server(program("prometheus-alertmanager", "alertmanager"), config, flags) as (process, address, log):
        server = Server(process, address, log)
        _until_ready(server)
        yield server


@contextlib.contextmanager
def _server(path: str, config: Mapping[str, Any], flags: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """The process, where it listens, and its log. JSON is YAML, so the configuration is written as such."""
    with tempfile.TemporaryDirectory(prefix="kvdir-monitoring-") as name:
        directory, log_path = Path(name), Path(name) / "log"
        (directory / "config.yml").write_text(json.dumps(config))
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [path, "--config.file=config.yml", "--web.listen-address=127.0.0.1:0", *flags],
                cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield process, _listening(process, log_path), log_path
        finally:
            process.kill()
            process.wait()


def _listening(process: subprocess.Popen[bytes], log_path: Path) -> str:
    """The address it says it listens on, which it chose itself."""
    until_s = time.monotonic() + _READY_S
    while (found := _LISTENING.search(log_path.read_text(errors="replace"))) is None:
        if process.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"it does not listen; it wrote:\n{log_path.read_text(errors='replace')[-2000:]}")
        time.sleep(POLL_S)
    return found[1]


def _until_ready(server: Server) -> None:
    until_s = time.monotonic() + _READY_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/-/ready", timeout=_CALL_S):
            return
        if server.process.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"the server at {server.address} is not ready; it wrote:\n{server.log()}")
        time.sleep(POLL_S)


def _point(pair: Sequence[Any]) -> tuple[float, float]:
    """Prometheus writes values as strings, among them NaN and +Inf."""
    return float(pair[0]), float(pair[1])
