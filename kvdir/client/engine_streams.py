"""The event streams of engines that are followed here, by name: begun, ended, and how they go.

Rules: what cannot be followed is refused when it is added, in words; an engine whose server cannot be asked where its streams
are is asked again and again, and that is a finding; one stream that fails costs only itself. Bounded in number. Runs in an
agent (peer_agent/server/engines.py) and in a coordinator alike. Does not: read messages (engine_stream.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvdir.client.engine_findings import Finding, FindingKind, Findings
from kvdir.client.engine_judge import BlockSizes
from kvdir.client.engine_life import Publishing
from kvdir.client.engine_options import EngineOptions, conflict
from kvdir.client.engine_socket import zmq_module
from kvdir.client.engine_sources import EngineSource, discover, written
from kvdir.client.engine_stream import GONE_S, PROBE_S, EngineStream
from kvdir.core.instance import stream_name
from kvdir.errors import InvalidInput, KvdirError, Overloaded
from kvdir.obs.logs import say, say_bug

log = logging.getLogger("kvdir.engines")

MAX_ENGINES = 256
ASK_AGAIN_S = 2.0
LOOK_AGAIN_S = 10.0
"""How often the server of an engine that is not connected, or began anew, is asked whether its streams are others now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """One stream, for metrics and people. Counters are since it was added. doubt: why it is not vouched for; empty: it is."""

    stream: str
    engine: str
    rank: int | None
    dialect: str
    endpoint: str
    replay: str
    model: str
    connected: bool
    epoch: int
    doubt: str
    publishing: str
    state: str
    blocks: int
    namespaces: tuple[str, ...]
    batches: int
    events: int
    payload_bytes: int
    last_event_age_s: float | None
    restarts: int
    replays: int
    lost_batches: int
    duplicates: int
    malformed: int
    rejected: Mapping[str, int]


@dataclass(slots=True, eq=False)
class _Engine:
    """One that was added. streams: with the task that runs each. stopping: these tasks were cancelled."""

    options: EngineOptions
    findings: Findings
    task: asyncio.Task[None] | None = None
    sources: tuple[EngineSource, ...] = ()
    streams: list[tuple[EngineStream, asyncio.Task[None]]] = field(default_factory=list)
    stopping: bool = False


def _nothing_expected() -> BlockSizes:
    return {}


class EngineStreams:
    """See the module docstring. node: whose engines they are; "" in a coordinator. expected: see EngineStream.

    Raises Unsupported at the first `add` where pyzmq is missing. Use it on one event loop; `figures` and `findings` may be
    asked from the thread of the metrics.
    """

    def __init__(
        self,
        node: str,
        publishing: Publishing,
        *,
        expected: Callable[[], BlockSizes] = _nothing_expected,
        gone_s: float = GONE_S,
        probe_s: float = PROBE_S,
        look_again_s: float = LOOK_AGAIN_S,
        max_engines: int = MAX_ENGINES,
    ) -> None:
        self._node = node
        self._publishing = publishing
        self._expected = expected
        self._gone_s = gone_s
        self._probe_s = probe_s
        self._look_again_s = look_again_s
        self._max_engines = max_engines
        self._engines: dict[tuple[str, int | None], _Engine] = {}

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def engines(self) -> tuple[EngineOptions, ...]:
        """Those that were added and not removed."""
        return tuple(engine.options for engine in self._engines.values())

    def add(self, options: EngineOptions) -> None:
        """Follows it from now on. Raises InvalidInput (a conflict with another), Overloaded, Unsupported; adding again what
        is followed already changes nothing."""
        zmq_module()
        stream_name(self._node, options.name, options.rank)
        if any(options == known for known in self.engines):
            return
        for known in self.engines:
            if words := conflict(options, known):
                raise InvalidInput(words)
        if len(self._engines) >= self._max_engines:
            raise Overloaded(f"{len(self._engines)} engines are followed here, which is the limit; remove one first")
        findings = Findings(stream_name(self._node, options.name, options.rank))
        engine = self._engines[options.name, options.rank] = _Engine(options, findings)
        if not options.discovers:
            self._follow(engine, written(options))
            return
        engine.task = asyncio.create_task(self._look_for(engine), name=f"engine-{options.name}")
        engine.task.add_done_callback(partial(_ended, findings))

    async def remove(self, name: str, rank: int | None = None) -> bool:
        """Its blocks vanish at once, for everybody. False: it is not followed."""
        engine = self._engines.pop((name, rank), None)
        if engine is None:
            return False
        await _end(engine)
        return True

    async def close(self) -> None:
        """All of them."""
        engines = list(self._engines.values())
        self._engines.clear()
        await asyncio.gather(*(_end(engine) for engine in engines))

    # -- what others see -------------------------------------------------------------------------------------------------

    def figures(self) -> tuple[EngineFigures, ...]:
        """Of every stream, in the order in which engines were added."""
        now_s = time.monotonic()
        return tuple(_figures(stream, now_s) for stream in self._streams())

    def findings(self) -> tuple[Finding, ...]:
        """What people should know."""
        engines = [finding for engine in tuple(self._engines.values()) for finding in engine.findings.all]
        return (*engines, *(finding for stream in self._streams() for finding in stream.findings.all))

    def in_words(self) -> str:
        """One line for people; empty without engines."""
        parts = [f"{finding.stream}: {finding.words}" for finding in self.findings()]
        said = {finding.stream for finding in self.findings()}
        parts += [f"{item.stream}: {item.state}" for item in self.figures() if item.stream not in said]
        return "; ".join(parts)

    def _streams(self) -> Iterator[EngineStream]:
        for engine in tuple(self._engines.values()):
            yield from (stream for stream, _ in tuple(engine.streams))

    # -- one engine ------------------------------------------------------------------------------------------------------

    async def _look_for(self, engine: _Engine) -> None:
        """Asks its server where the streams are, and follows those: again while one is away, and after each new life of the
        engine, which may be at the same address with another model.
        """
        asked_of: set[int] = set()
        while True:
            lives = {stream.life.epoch for stream, _ in engine.streams}
            if not lives or lives != asked_of or not all(stream.connected for stream, _ in engine.streams):
                found = await self._ask(engine)
                if found is not None:
                    asked_of = lives
                    if found != engine.sources:
                        await _stop(engine)
                        self._follow(engine, found)
            await asyncio.sleep(self._look_again_s if engine.streams else ASK_AGAIN_S)

    async def _ask(self, engine: _Engine) -> tuple[EngineSource, ...] | None:
        try:
            found = await asyncio.to_thread(discover, engine.options)
        except KvdirError as error:
            engine.findings.found(FindingKind.DISCOVERY, str(error), now_s=time.monotonic())
            return None
        engine.findings.gone(FindingKind.DISCOVERY)
        return found

    def _follow(self, engine: _Engine, sources: Sequence[EngineSource]) -> None:
        engine.sources = tuple(sources)
        for source in sources:
            stream = EngineStream(
                stream_name(self._node, engine.options.name, source.rank),
                engine.options,
                source,
                self._publishing,
                expected=self._expected,
                gone_s=self._gone_s,
                probe_s=self._probe_s,
            )
            task = asyncio.create_task(stream.run(), name=f"engine-{stream.name}")
            task.add_done_callback(partial(_ended, stream.findings))
            engine.streams.append((stream, task))
            say(log, logging.INFO, "follows an engine", stream=stream.name, endpoint=source.endpoint, model=source.model)


async def _end(engine: _Engine) -> None:
    if engine.task is not None:
        engine.task.cancel()
        await asyncio.wait({engine.task})
    await _stop(engine)


async def _stop(engine: _Engine) -> None:
    """Cancelled while it waits, it may be called again: each task is cancelled once, so that it says goodbye undisturbed."""
    if not engine.stopping:
        engine.stopping = True
        for _, task in engine.streams:
            task.cancel()
    if engine.streams:
        await asyncio.wait({task for _, task in engine.streams})
    engine.streams, engine.stopping = [], False


def _ended(findings: Findings, task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        say_bug(log, "engine stream failed", error)
        words = (
            f"is followed no more, by a fault of ours ({type(error).__name__}: {error}): restart this process, and report it"
        )
        findings.found(FindingKind.FAILED, words, now_s=time.monotonic())


def _figures(stream: EngineStream, now_s: float) -> EngineFigures:
    life, cursor, figures, source = stream.life, stream.cursor, stream.figures, stream.source
    return EngineFigures(
        stream=stream.name,
        engine=stream.engine.name,
        rank=source.rank,
        dialect=stream.engine.dialect,
        endpoint=source.endpoint,
        replay=source.replay,
        model=source.model,
        connected=stream.connected,
        epoch=life.epoch,
        doubt=life.doubt.words if life.doubt.lasts else "",
        publishing=life.publishers.in_words(),
        state=stream.in_words(),
        blocks=life.residency.blocks,
        namespaces=tuple(namespace.short for namespace in tuple(life.residency.namespaces.values())),
        batches=figures.batches,
        events=figures.events,
        payload_bytes=figures.payload_bytes,
        last_event_age_s=now_s - figures.last_event_s if figures.last_event_s else None,
        restarts=figures.restarts,
        replays=cursor.replays,
        lost_batches=cursor.lost_batches,
        duplicates=cursor.duplicates,
        malformed=stream.malformed,
        rejected={str(reason): count for reason, count in tuple(figures.rejected.items())},
    )
