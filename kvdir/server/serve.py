"""Runs a coordinator: start, serve, drain, stop.

Drain order: health says NOT_SERVING and /readyz 503 (so that nobody new comes), streams are ended after their last
acknowledgement (agents reconnect elsewhere or later), calls under way finish within grace_s, then the ports close. The grace is
one, counted from the request to stop, for whatever has to end; a second request skips what is left of it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc.aio
import uvloop
from grpc_health.v1 import health_pb2

import kvdir
from kvdir.errors import ConfigError
from kvdir.location import PROTOCOL_VERSION
from kvdir.obs.http import HttpSide, LoopPulse
from kvdir.obs.logs import say, say_start
from kvdir.obs.tracing import SPANS_S, open_tracing
from kvdir.rpc.health_port import HealthPort
from kvdir.rpc.open_files import raise_open_files
from kvdir.rpc.tls import Dialer, ServerTls, bind
from kvdir.server.app import AnyCoordinator, build_coordinator, build_server, build_shared
from kvdir.server.config import MEMORY, CoordinatorConfig, split_address
from kvdir.server.coordinator import Coordinator
from kvdir.server.indexer_serve import Itself, indexing
from kvdir.server.lookup_workers import LookupWorkers
from kvdir.server.page.serve import page_beside_metrics, paging
from kvdir.server.services import HEALTH_NAMES
from kvdir.server.shared.coordinator import SharedCoordinator
from kvdir.server.shared_port import SharedPort
from kvdir.server.ticker import run_ticker

log = logging.getLogger("kvdir.serve")

_ALIVE_S = 10.0
_REFRESH_S = 1.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all of this machine, and one of them."""
_SLICE_S = 0.0005
"""Of the event loop, for metrics, before others get a turn."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Where it really listens; http, indexer and page are empty when they are off. ticker: ends only with an error, which ends
    the process.
    """

    grpc: str
    http: str
    version: str
    ticker: asyncio.Task[None]
    indexer: str = ""
    page: str = ""
    health: str = ""


class Stop:
    """A request to stop: the first drains, the second abandons."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.abandon = asyncio.Event()
        self._since_s: float | None = None

    def request(self) -> None:
        self.left_s(0.0)
        (self.abandon if self.drain.is_set() else self.drain).set()

    def left_s(self, grace_s: float) -> float:
        """Of the grace, which begins now at the latest."""
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        return max(0.0, self._since_s + grace_s - now_s)


def run(config: CoordinatorConfig, *, on_ready: Callable[[Bound], None]) -> None:
    """Serves on uvloop until SIGTERM or SIGINT. Raises ConfigError if a port cannot be had."""
    raise_open_files()

    async def main() -> None:
        stop = Stop()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.request)
        await serve(config, stop=stop, on_ready=on_ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def serve(config: CoordinatorConfig, *, stop: Stop, on_ready: Callable[[Bound], None]) -> None:
    """Serves until `stop`; on_ready is called once everything listens."""
    say_start(log, config, version=kvdir.__version__)
    async with _built(config) as coordinator, running(coordinator, stop) as bound:
        beside = {"http": bound.http or "off", "indexer": bound.indexer or "off", "page": bound.page or "off"}
        say(log, logging.INFO, "serving", grpc=bound.grpc, **beside, version=bound.version)
        on_ready(bound)
        await _first(stop.drain.wait(), asyncio.shield(bound.ticker))  # without repair and staleness the answers would lie
        say(log, logging.INFO, "draining", grace_s=config.grace_s)
        coordinator.drain()
        await _first(_wait_streams(coordinator, config.grace_s), stop.abandon.wait())
    say(log, logging.INFO, "stopped")


@contextlib.asynccontextmanager
async def _built(config: CoordinatorConfig) -> AsyncIterator[AnyCoordinator]:
    if config.store == MEMORY:
        yield build_coordinator(config)
        return
    shared = build_shared(config)
    await shared.open()
    try:
        yield shared
    finally:
        await shared.close()


async def _first(*waits: Awaitable[object]) -> None:
    """Until one of them is over; the others are given up. Raises what it raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


@contextlib.asynccontextmanager
async def running(coordinator: AnyCoordinator, stop: Stop | None = None) -> AsyncIterator[Bound]:
    """The coordinator, listening; leaving the block stops it within its grace. Tests use this with port 0."""
    config, stop = coordinator.config, stop or Stop()
    host, port = split_address(config.listen)
    pulse = LoopPulse(limit_s=_ALIVE_S)
    coordinator.metrics.tally.say_build(coordinator.version, PROTOCOL_VERSION)
    async with contextlib.AsyncExitStack() as stack:
        coordinator.tls = tls = _open_tls(coordinator, host)
        workers = _workers(coordinator, host, port, stack)
        tracing = open_tracing(
            config.otlp_endpoint,
            config.trace_ratio,
            service="kvdir-coordinator",
            instance=coordinator.name,
            version=coordinator.version,
        )
        stack.push_async_callback(asyncio.to_thread, tracing.close, grace_s=min(config.grace_s, SPANS_S))
        tracing.watched_by(coordinator.metrics.tally)
        server, healthy = build_server(coordinator, tracer=tracing.tracer)
        port = _bind(server, host, workers.port if workers is not None else port, tls)
        itself = _itself(coordinator, server, _reachable(host, port), stack)
        page = await stack.enter_async_context(paging(coordinator))
        http, page_at = "", ""
        new_side = functools.partial(
            HttpSide,
            metrics=coordinator.metrics,
            refresh=_refresher(coordinator),
            alive=pulse.fault,
            ready=lambda: _not_ready(coordinator, workers),
            remark=lambda: _remark(coordinator, workers),
        )
        if config.http_listen:
            beside = page if page_beside_metrics(config.http_listen) else None
            http = _open(new_side(split_address(config.http_listen), further=beside), stack)
            page_at = http if beside is not None else ""
        if config.page_listen:
            page_at = _open(new_side(split_address(config.page_listen), further=page, setting="page_listen"), stack)
        health = ""
        if config.health_listen:
            probes = HealthPort(
                config.health_listen,
                started=lambda: "" if workers is None or workers.started else "lookup workers are starting",
                alive=pulse.fault,
                ready=lambda: _not_ready(coordinator, workers),
            )
            stack.push_async_callback(asyncio.to_thread, probes.close)
            health = _join(split_address(config.health_listen)[0], probes.port)
        await server.start()
        for service in HEALTH_NAMES:
            await healthy.set(service, health_pb2.HealthCheckResponse.SERVING)
        ticker = asyncio.create_task(run_ticker(coordinator, pulse.beat))
        if isinstance(coordinator, Coordinator):
            stack.push_async_callback(_keep_checkpoint(coordinator))
        await stack.enter_async_context(coordinator.security.kept())
        try:
            if workers is not None:
                await workers.start()
            async with indexing(coordinator, itself=itself) as indexer:
                yield Bound(f"{host}:{port}", http, coordinator.version, ticker, indexer, page_at, health)
        finally:
            stop.left_s(config.grace_s)
            await healthy.enter_graceful_shutdown()
            coordinator.drain()
            if workers is not None:  # before the calls that they pass on lose their other end
                await _first(workers.close(), stop.abandon.wait())
                await workers.kill()
            await _first(server.stop(stop.left_s(config.grace_s)), stop.abandon.wait())
            await server.stop(None)
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)


def _open(side: HttpSide, stack: contextlib.AsyncExitStack) -> str:
    """Its address; it is closed with the stack."""
    stack.push_async_callback(asyncio.to_thread, side.close)  # a scrape under way may wait for this loop
    host, port = side.address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _workers(coordinator: AnyCoordinator, host: str, port: int, stack: contextlib.AsyncExitStack) -> LookupWorkers | None:
    """Lookup workers, if there are to be any, not started yet; their place and port are given up with the stack."""
    place = coordinator.place
    if place is None or isinstance(coordinator, SharedCoordinator):
        return None
    stack.callback(place.close)
    shared = SharedPort(host, port)
    stack.callback(shared.close)
    workers = LookupWorkers(coordinator.config, place, shared)
    coordinator.metrics.workers = workers
    coordinator.on_drain.append(workers.drain)
    return workers


def _keep_checkpoint(coordinator: Coordinator) -> Callable[[], Awaitable[None]]:
    """Begins to write checkpoints, if there are to be any. Returns how to end that, with a last one within the grace."""
    checkpointer, config = coordinator.checkpointer, coordinator.config
    if checkpointer is None:
        return _nothing
    running = asyncio.create_task(checkpointer.run(config.checkpoint_every_s), name="checkpoint")

    async def end() -> None:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(config.grace_s):
                await checkpointer.write()

    return end


async def _nothing() -> None:
    pass


def _reachable(host: str, port: int) -> str:
    """Where this process itself finds its services, wherever they listen."""
    return _join(_ANYWHERE.get(host, host), port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _open_tls(coordinator: AnyCoordinator, host: str) -> ServerTls | None:
    """None: plaintext. Raises ConfigError. That clients dial `host` is likely, not known: only remarked on."""
    files = coordinator.config.tls
    if files is None:
        return None
    if files.server_name:
        tls = ServerTls(files, names=(files.server_name,))
    else:
        tls = ServerTls(files, perhaps=() if host in _ANYWHERE else (host,))
    tls.watched_by(coordinator.metrics.tally)
    if tls.remark():
        say(log, logging.WARNING, "certificate", remark=tls.remark())
    return tls


def _itself(coordinator: AnyCoordinator, server: grpc.aio.Server, address: str, stack: contextlib.AsyncExitStack) -> Itself:
    """How this process calls its own services. Where others need a certificate, by a private socket: it is nobody else."""
    if coordinator.tls is None or not coordinator.config.indexer_listen:
        return Itself(address)
    if coordinator.place is not None:
        return Itself(address, Dialer(via=coordinator.place.socket))
    try:
        socket = f"unix:{stack.enter_context(tempfile.TemporaryDirectory(prefix='kvdir-itself-'))}/grpc"
    except OSError as error:
        raise ConfigError(
            [f"indexer_listen: with TLS it needs a socket in a directory of its own: {error}; set TMPDIR"]
        ) from error
    if not bind(server, socket, None):
        raise ConfigError([f"indexer_listen: cannot listen on {socket}: set TMPDIR to a directory with a short name"])
    return Itself(address, Dialer(via=socket))


def _bind(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None) -> int:
    address = _join(host, port)
    bound = bind(server, address, tls)
    if not bound:
        raise ConfigError(
            [
                f"listen: {address} cannot be used: stop the process that has it (`ss -ltnp | grep {port}` names it), "
                "or give another port with --listen (port 0 takes a free one)"
            ]
        )
    return bound


def _refresher(coordinator: AnyCoordinator) -> Callable[[], None]:
    """Puts figures aside on the event loop, called from the HTTP thread. A loop that is stuck, or ends, leaves the older ones.

    In slices, with a turn for everybody else after each: a fleet of a thousand nodes takes tens of ms in all.
    """
    loop = asyncio.get_running_loop()

    async def refresh() -> None:
        until_s = time.perf_counter() + _SLICE_S
        for _ in coordinator.gather_metrics():
            if time.perf_counter() >= until_s:
                await asyncio.sleep(0)
                until_s = time.perf_counter() + _SLICE_S

    def ask() -> None:
        if loop.is_closed():
            return
        asked = asyncio.run_coroutine_threadsafe(refresh(), loop)
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            asked.result(_REFRESH_S)
        asked.cancel()

    return ask


def _not_ready(coordinator: AnyCoordinator, workers: LookupWorkers | None) -> str:
    if workers is not None and not workers.started:
        return "lookup workers are starting"
    return coordinator.not_ready() or (coordinator.tls.fault() if coordinator.tls is not None else "")


def _remark(coordinator: AnyCoordinator, workers: LookupWorkers | None) -> str:
    tls = coordinator.tls.remark() if coordinator.tls is not None else ""
    return " ".join(filter(None, (coordinator.remark(), workers.fault() if workers is not None else "", tls)))


async def _wait_streams(coordinator: AnyCoordinator, grace_s: float) -> None:
    """Until every stream has ended, at most grace_s."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while len(coordinator.connections):
                await coordinator.connections.wait_removed()
