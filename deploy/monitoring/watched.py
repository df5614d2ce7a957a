"""A running demo that a Prometheus watches: what dashboards are tried on and drawn from.

    with watched_demo("--loss", "0.05") as watched:
        watched.prometheus.until("kvdir_streams", ...)

Both are gone when the block ends; the demo is ended by its process id and cleans up after itself.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdir.testing.prometheus_servers import Prometheus, prometheus_server

ROOT = Path(__file__).parents[2]
_READY_S, _END_S = 90.0, 30.0


@dataclass(frozen=True, slots=True)
class Watched:
    """said: what `kvdir demo --hold --output json` says when it is ready."""

    said: dict[str, Any]
    prometheus: Prometheus

    @property
    def agents(self) -> list[dict[str, Any]]:
        """node, http, pid, ... of each."""
        return list(self.said["agents"])


@contextlib.contextmanager
def watched_demo(*flags: str, rules: Path | None = None) -> Iterator[Watched]:
    """flags: of `kvdir demo`, beside --hold. RuntimeError with what it wrote if it does not start."""
    with held_demo(flags) as said:
        jobs = {
            "kvdir": [process["http"] for process in said["coordinators"]],
            "peer-agent": [process["http"] for process in said["agents"]],
        }
        with prometheus_server(jobs, rules=[rules] if rules is not None else []) as prometheus:
            yield Watched(said, prometheus)


@contextlib.contextmanager
def held_demo(flags: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """What `kvdir demo --hold` says when it is ready. RuntimeError with what it wrote if it does not start."""
    command = [sys.executable, "-m", "kvdir", "demo", "--hold", "--output", "json", "--no-progress", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    until_s = time.monotonic() + _READY_S
    try:
        line = process.stdout.readline()  # ends when the process does, which has a bound of its own for every start
        if not line or time.monotonic() > until_s:
            raise RuntimeError(f"the demo did not start:\n{process.stderr.read()}")
        yield json.loads(line)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
