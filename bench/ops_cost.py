"""What watching costs: CPU of a coordinator per lookup message, bare and with each thing added; scrapes and the event loop.

    python bench/ops_cost.py                  both, as a table; about three minutes
    python bench/ops_cost.py --only scrape

Messages: coordinators run side by side, `bare` (nothing is counted per call, no HTTP side), `metrics` (as always), `tracing`
(that, and an exporter is on that no request is sampled for), `tls` (all that, over mTLS), `context` (all that, and every
message names a trace of its caller that is not sampled). One client asks each of them in turn, round after round, so that what
else the machine does hits all; the figure is the median over rounds of the server's CPU time, all threads, by the messages, and
of its ratio to `bare` in the same round. Nobody scrapes meanwhile: what that takes is below.
Scrapes: a coordinator with many nodes put into it; a process of its own scrapes; beside them a task measures how late the
event loop turns. Does not: judge, but for --bar.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvdir.client.aio import DirectoryClient
from kvdir.fingerprint import Fingerprints
from kvdir.obs import trace
from kvdir.obs.call_figures import CallFigures
from kvdir.server.app import build_coordinator
from kvdir.server.config import CoordinatorConfig
from kvdir.server.coordinator import Coordinator
from kvdir.server.serve import running
from kvdir.testing.certificates import Certificates, make_certificates
from kvdir.testing.many_nodes import fill, many_namespaces

T = TypeVar("T")
WAYS = ("bare", "metrics", "tracing", "tls", "context")
ASKED = 64
"""Blocks of a message: few, so that what is added to a message shows."""
MESSAGES = 200
"""In one round: short rounds see the same machine more often than long ones."""
SCRAPES = 20
NAMESPACE = many_namespaces(1, tenants=1)[0]
NOWHERE = "http://127.0.0.1:9"
UNSAMPLED = trace.TraceContext("ab" * 16, "cd" * 8, sampled=False)


class NoFigures(CallFigures):
    """Counts no call."""

    def began(self, method: str) -> None: ...
    def ended(self, method: str, code: str, seconds: float) -> None: ...


def config(way: str, certificates: Certificates) -> CoordinatorConfig:
    files = certificates.files("coordinator")
    tls = {"tls_cert": files.certificate, "tls_key": files.key, "tls_ca": files.ca} if way in ("tls", "context") else {}
    return CoordinatorConfig(
        listen="127.0.0.1:0",
        http_listen="" if way == "bare" else "127.0.0.1:0",
        otlp_endpoint=NOWHERE if way in ("tracing", "tls", "context") else "",
        stale_after_s=3600.0,
        expire_after_s=7200.0,
        **tls,
    )


def coordinator_of(way: str, directory: Path, *, nodes: int) -> Coordinator:
    coordinator = build_coordinator(config(way, Certificates(directory)))
    if way == "bare":
        coordinator.metrics.calls = NoFigures()
    names = [NAMESPACE] if nodes == 1 else many_namespaces(8, tenants=4)
    fill(coordinator.directory, nodes=nodes, namespaces=names, blocks=ASKED, now_s=coordinator.now_s())
    return coordinator


async def serve(way: str, directory: Path) -> None:
    """The child's side: until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with running(coordinator_of(way, directory, nodes=1)) as bound:
        print(json.dumps({"grpc": bound.grpc, "http": bound.http}), flush=True)
        await stop.wait()


@dataclass(slots=True)
class Served:
    """A child. us: of CPU per message, by round."""

    way: str
    process: subprocess.Popen[str]
    grpc: str
    http: str
    us: list[float] = field(default_factory=list)

    def cpu_s(self) -> float:
        """All threads, to the nanosecond where the kernel tells."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextlib.contextmanager
def children(directory: Path) -> Iterator[list[Served]]:
    with contextlib.ExitStack() as stack:
        out = []
        for way in WAYS:
            command = [sys.executable, __file__, "--serve", way, "--directory", str(directory)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.send_signal, signal.SIGTERM)
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            out.append(Served(way, process, said["grpc"], said["http"]))
        yield out


async def messages(directory: Path, *, rounds: int) -> list[dict[str, Any]]:
    blocks = Fingerprints.chain((b"%d" % block for block in range(ASKED)), root=b"0")
    files = Certificates(directory).files("engine-a")
    with children(directory) as served:
        async with contextlib.AsyncExitStack() as stack:
            clients = {
                each.way: await stack.enter_async_context(
                    DirectoryClient(each.grpc, deadline_s=10.0, tls=files if each.way in ("tls", "context") else None)
                )
                for each in served
            }
            for number in range(rounds + 1):  # the first one connects
                for each in served[number % len(served) :] + served[: number % len(served)]:
                    us = await _round(each, clients[each.way], blocks)
                    each.us += [us] if number else []
    bare = served[0].us
    return [
        {
            "way": each.way,
            "server_us": median(each.us),
            "of_bare": median(mine / base for mine, base in zip(each.us, bare, strict=True)),
        }
        for each in served
    ]


async def _round(served: Served, client: DirectoryClient, blocks: Fingerprints) -> float:
    """CPU of the server by message, in microseconds."""
    before_s = served.cpu_s()
    with trace.within(UNSAMPLED if served.way == "context" else None):
        for _ in range(MESSAGES):
            result = await client.lookup(NAMESPACE.digest, blocks)
            assert result.hits == ASKED
    return (served.cpu_s() - before_s) / MESSAGES * 1e6


def _scrape(address: str) -> tuple[float, int]:
    """(seconds, bytes)"""
    began_s = time.perf_counter()
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        size = len(answer.read())
    return time.perf_counter() - began_s, size


@contextlib.asynccontextmanager
async def lag_probe(period_s: float = 0.002) -> AsyncIterator[list[float]]:
    """Fills a list with how late the loop was, seconds, as often as it could say."""
    late: list[float] = []

    async def probe() -> None:
        while True:
            due_s = time.perf_counter() + period_s
            await asyncio.sleep(period_s)
            late.append(time.perf_counter() - due_s)

    task = asyncio.create_task(probe())
    try:
        yield late
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def scrapes(directory: Path, *, nodes: int) -> dict[str, Any]:
    async with running(coordinator_of("metrics", directory, nodes=nodes)) as bound:
        async with lag_probe() as quiet:
            await asyncio.sleep(1.0)
        command = [sys.executable, __file__, "--scrape", bound.http]
        scraper = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        async with lag_probe() as busy:
            said, _ = await scraper.communicate()
    figures = json.loads(said)
    return {
        "nodes": nodes,
        "scrape_ms": median(figures["seconds"]) * 1e3,
        "slowest_ms": max(figures["seconds"]) * 1e3,
        "kib": figures["bytes"] / 1024,
        "lag_p99_ms": quantiles(busy, n=100)[98] * 1e3,
        "lag_max_ms": max(busy) * 1e3,
        "quiet_lag_p99_ms": quantiles(quiet, n=100)[98] * 1e3,
        "quiet_lag_max_ms": max(quiet) * 1e3,
    }


def scrape_often(address: str) -> None:
    """The scraper's side."""
    took = []
    for _ in range(SCRAPES):
        seconds, size = _scrape(address)
        took.append(seconds)
        time.sleep(0.15)  # longer than an answer is given again
    print(json.dumps({"seconds": took, "bytes": size}))


def _run(work: Coroutine[Any, Any, T]) -> T:
    """On the loop that the daemons use."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            "  ".join(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("messages", "scrape"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--bar", type=float, default=0.0, help="exit with 1 if `tls` takes more than this times `bare`")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--scrape", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _run(serve(options.serve, options.directory))
        return
    if options.scrape:
        scrape_often(options.scrape)
        return
    rows = []
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        make_certificates(directory)
        if options.only != "scrape":
            rows = _run(messages(directory, rounds=options.rounds))
            show(rows)
        if options.only != "messages":
            show([_run(scrapes(directory, nodes=nodes)) for nodes in (100, 1_000)])
    together = next((row["of_bare"] for row in rows if row["way"] == "tls"), 0.0)
    if options.bar and together > options.bar:
        sys.exit(f"all together take {together:.2f} of bare, the bar is {options.bar}")


if __name__ == "__main__":
    os.environ.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
    logging.disable(logging.CRITICAL)
    main()
