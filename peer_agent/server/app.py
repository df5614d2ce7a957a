"""One agent, put together: the composition root. The only place that knows every part.

Rules: everything that can be refused is refused before engines see anything, with what to do; what was built is taken down in
reverse order, also when start-up fails half way. Two listeners with one service each, engines (a socket of this host) and
peers, so that nobody on the network can attach as an engine. Does not: read flags or handle signals (serve.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from kvdir.client.discovery import Discovery
from kvdir.client.engine_streams import EngineStreams
from kvdir.client.publisher import PublisherIdentity
from kvdir.client.race import RaceCounters
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sketches import SKETCH_CELLS, OwnerSketches
from kvdir.index import Sketch
from kvdir.location import PROTOCOL_VERSION
from kvdir.namespace import Namespace
from kvdir.obs.http import LoopPulse
from kvdir.rpc.tls import Dialer
from peer_agent.core.capability import KEY_BYTES, CapabilityMint
from peer_agent.core.inventory import Inventory
from peer_agent.core.orders import Limits as LoadLimits
from peer_agent.core.schedule import Schedule
from peer_agent.memory import presence
from peer_agent.memory.arena import Arena
from peer_agent.server.accepting import Accepting
from peer_agent.server.capacity import capacity_document, plan_arena
from peer_agent.server.config import AgentConfig
from peer_agent.server.device_movers import DeviceMovers
from peer_agent.server.directory import Coordinators
from peer_agent.server.engine_service import EngineService
from peer_agent.server.engines import open_engines
from peer_agent.server.events_out import open_events_out
from peer_agent.server.identity import Identity, Limits, version
from peer_agent.server.listeners import Listeners, open_tls
from peer_agent.server.load import Directory
from peer_agent.server.metrics import AgentCollector
from peer_agent.server.namespaces import read_namespaces
from peer_agent.server.nearest import NearestDirectory
from peer_agent.server.own_arena import create_arena, in_words, slot_table
from peer_agent.server.peer_service import PeerService
from peer_agent.server.peers import Peers
from peer_agent.server.plane_metrics import watch_planes
from peer_agent.server.planes import OpenPlanes, build_planes, data_address, export
from peer_agent.server.publishing import Publishing
from peer_agent.server.reader import Reader
from peer_agent.server.replica import NodeReplica
from peer_agent.server.staging import MAX_TASKS as STAGING_TASKS
from peer_agent.server.staging import Stager
from peer_agent.server.store import Store
from peer_agent.server.tasks import OwnedTasks
from peer_agent.server.ticker import run_ticker
from peer_agent.server.turns import Turns
from peer_agent.server.writers import Writers
from peer_agent.transport.base import Transport
from peer_agent.transport.registry import current_offers, open_transports

MAX_TASKS = 1024
MAX_PREFETCHES = 64
GOODBYE_S = 1.5
ALIVE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Where a started agent is reached. peer: as told to others. data, http, health, replica: "" without, and when off."""

    node: str
    epoch: int
    peer: str
    data: str
    engine: str
    http: str
    health: str
    arena: str
    replica: str


@dataclass(frozen=True, slots=True)
class _Parts:
    """What start-up hands from one step to the next."""

    arena: Arena
    outbox: OwnerOutbox
    planes: dict[str, Transport]
    tasks: OwnedTasks
    peers: Peers
    turns: Turns
    directory: Directory | None
    prefill_tokens_per_s: dict[bytes, float]
    writers: Writers
    engines: EngineStreams


class Agent:
    """A running agent. Made by `start`; `close` takes it down."""

    def __init__(self, config: AgentConfig, *, open_planes: OpenPlanes = open_transports) -> None:
        self.config = config
        self._open_planes = open_planes
        self.node = config.node_name
        self.epoch = secrets.randbits(64) or 1
        self.ready: Ready
        self.store: Store
        self.stager: Stager
        self.reader: Reader
        self.publishing: Publishing
        self.replica: NodeReplica | None = None
        self._stack = contextlib.AsyncExitStack()
        self._clock = time.monotonic
        tls = open_tls(config)
        self._dialer = Dialer(tls)
        self._listeners = Listeners(config, self._stack, tls)
        self._draining = False
        self._discovery: Discovery | None = None
        self._races: RaceCounters | None = None

    @classmethod
    async def start(cls, config: AgentConfig, *, open_planes: OpenPlanes = open_transports) -> Self:
        """Raises ConfigError (all faults at once), NoSpace, ArenaError; nothing is left behind then.

        open_planes: see transport/registry.py; tests put in planes with faults.
        """
        agent = cls(config, open_planes=open_planes)
        try:
            await agent._build()
        except BaseException:
            await agent._stack.aclose()
            raise
        return agent

    async def close(self) -> None:
        """Stops taking calls, says goodbye to coordinators, lets what runs end within grace_s, and takes everything down."""
        self._draining = True
        await self._listeners.drain()
        await self._stack.aclose()

    # putting together, bottom up

    async def _build(self) -> None:
        config = self.config
        served = read_namespaces(config.namespaces)
        plan = plan_arena(served, config.arena_bytes, config.spare)
        self.capacity = capacity_document(plan)
        arena = create_arena(config, plan.size_classes, epoch=self.epoch)
        self._stack.callback(arena.close)
        outbox = OwnerOutbox(
            max_events=config.queue_events, max_bytes=config.ring_bytes, sketches=OwnerSketches(lambda: Sketch(SKETCH_CELLS))
        )
        self.store = self._build_store(arena, {item.namespace.digest: item.namespace for item in served}, outbox)
        self.stager = self._build_stager(arena)
        planes = build_planes(config, arena, self._open_planes)
        for plane in planes.values():
            self._stack.push_async_callback(plane.close)
        await export(config, planes)
        self.store.planes = tuple(planes.values())
        tasks = OwnedTasks(limit=MAX_TASKS)
        schedule = Schedule(peer_bytes=config.max_flight_bytes, total_bytes=config.max_flight_total_bytes)
        turns = Turns(schedule, clock=self._clock)
        peers = self._build_peers(planes, turns, tasks)
        self._stack.push_async_callback(peers.close)
        if config.coordinators:
            self._discovery = discovery = Discovery(config.coordinators)
            self._stack.push_async_callback(asyncio.to_thread, discovery.close)
        directory = self._build_directory()
        self.reader = Reader(
            self.store,
            peers,
            directory,
            node=self.node,
            clock=self._clock,
            tasks=tasks,
            turns=turns,
            limits=LoadLimits(max_chunk_bytes=config.max_chunk_bytes, max_read_bytes=config.max_read_bytes),
            directory_timeout_s=config.directory_timeout_s,
        )
        self._stack.push_async_callback(tasks.close, timeout_s=config.grace_s)
        prefill_tokens_per_s = {item.namespace.digest: item.prefill_tokens_per_s for item in served}
        writers = Writers(lambda session: presence.is_held(arena.fd, session), clock=self._clock)
        events_out = open_events_out(config, outbox, self.store)
        if events_out is not None:
            self._stack.push_async_callback(events_out.close)
        engines = open_engines(config, self._discovery, self.store, events_out, self._dialer)
        self._stack.push_async_callback(engines.close)
        await self._serve(_Parts(arena, outbox, planes, tasks, peers, turns, directory, prefill_tokens_per_s, writers, engines))

    async def _serve(self, parts: _Parts) -> None:
        """Listens, top down from here: peers, engines, http; then the clock, and last the word to the coordinators."""
        await self._stack.enter_async_context(self._listeners.security.kept())
        peer_address = await self._listeners.serve_peers(self._build_peer_service(parts))
        self.publishing = self._build_publishing(peer_address, parts.outbox)
        accepting = Accepting(self.store, parts.arena, self.config.spare, announce=self._announce)
        engine_address = await self._listeners.serve_engines(self._build_engine_service(parts, accepting))
        collector = AgentCollector(
            store=self.store,
            stager=self.stager,
            reader=self.reader,
            peers=parts.peers,
            turns=parts.turns,
            publishing=self.publishing,
            outbox=parts.outbox,
            calls=self._listeners.calls,
            tally=self._listeners.tally,
            bugs=lambda: self._listeners.bugs,
            tasks=parts.tasks,
            planes=parts.planes,
            pages=parts.arena.pages,
            accepting=accepting,
            replica=self.replica,
            nearest=parts.directory if isinstance(parts.directory, NearestDirectory) else None,
            races=self._races,
            engines=parts.engines,
        )
        self._listeners.tally.say_build(version(), PROTOCOL_VERSION, self.node)
        watch_planes(self._listeners.tally, parts.planes)
        pulse = LoopPulse(limit_s=ALIVE_S)
        self._listeners.tally.watch("loop_lag_seconds", lambda: pulse.late_s)
        http_address = self._listeners.serve_http(collector, pulse, not_ready=self._not_ready)
        health_address = self._listeners.serve_health(pulse, not_ready=self._not_ready)
        ticking = run_ticker(self.store, parts.peers, is_writing=parts.writers.is_writing, beat=pulse.beat)
        self._stack.push_async_callback(_cancel, asyncio.create_task(ticking, name="ticker"))
        self.publishing.start()
        self._stack.push_async_callback(self.publishing.leave, timeout_s=GOODBYE_S)
        self.ready = Ready(
            node=self.node,
            epoch=self.epoch,
            peer=peer_address,
            data=data_address(self.config, parts.planes),
            engine=engine_address,
            http=http_address,
            health=health_address,
            arena=parts.arena.path,
            replica=self.config.replica_file,
        )

    def _build_peer_service(self, parts: _Parts) -> PeerService:
        return PeerService(
            self.store,
            parts.arena.region,
            self._identity(parts.arena),
            self._limits(),
            stager=self.stager,
            offers=partial(current_offers, parts.planes),
            owner_seq=lambda: parts.outbox.last_seq,
        )

    def _announce(self, namespaces: tuple[Namespace, ...]) -> None:
        self.publishing.announce(namespaces)
        if self.replica is not None:
            self.replica.serve([namespace.digest for namespace in namespaces])

    def _build_engine_service(self, parts: _Parts, accepting: Accepting) -> EngineService:
        prefetches = OwnedTasks(limit=MAX_PREFETCHES)
        self._stack.push_async_callback(prefetches.close, timeout_s=0.0)
        return EngineService(
            self.store,
            self.reader,
            self.stager,
            parts.directory,
            self._identity(parts.arena),
            self._limits(),
            accepting=accepting,
            prefetches=prefetches,
            writers=parts.writers,
            publishing=self.publishing.in_words,
            engines=parts.engines,
            prefill_tokens_per_s=parts.prefill_tokens_per_s,
        )

    def _build_store(self, arena: Arena, namespaces: dict[bytes, Any], outbox: OwnerOutbox) -> Store:
        return Store(
            Inventory(map(slot_table, arena.classes), new_id=lambda: secrets.randbits(64) or 1),
            arena.region,
            namespaces,
            publish=outbox.append,
            clock=self._clock,
            max_locks=self.config.max_locks,
            max_fingerprints=self.config.max_fingerprints,
            mint=CapabilityMint(secrets.token_bytes(KEY_BYTES), epoch=self.epoch),
        )

    def _build_stager(self, arena: Arena) -> Stager:
        """Its movers end first, so that what they were asked for ends, too."""
        tasks, movers = OwnedTasks(limit=STAGING_TASKS), DeviceMovers(arena, kinds=self.config.devices)
        stager = Stager(self.store, movers, table_path=arena.path, epoch=self.epoch, publish=self.store.publish, tasks=tasks)
        self._stack.callback(stager.close)
        self._stack.push_async_callback(tasks.close, timeout_s=self.config.grace_s)
        self._stack.push_async_callback(movers.close)
        return stager

    def _build_peers(self, planes: dict[str, Transport], turns: Turns, tasks: OwnedTasks) -> Peers:
        config = self.config
        return Peers(
            me=self.node,
            epoch=self.epoch,
            planes=tuple(planes.values()),
            dialer=self._dialer,
            tls_name=config.peer_name,
            connect_timeout_s=config.connect_timeout_s,
            breaker_s=config.breaker_s,
            breaker_max_s=config.breaker_max_s,
            turns=turns,
            tasks=tasks,
            clock=self._clock,
        )

    def _build_directory(self) -> Directory | None:
        config = self.config
        if self._discovery is None:
            return None
        coordinators = Coordinators(
            self._discovery,
            node=self.node,
            timeout_s=config.directory_timeout_s,
            clock=self._clock,
            dialer=self._dialer,
        )
        self._stack.push_async_callback(coordinators.close)
        self._races = coordinators.races
        if not config.replica:
            return coordinators
        self.replica = NodeReplica.open(config, self._discovery, self.store.namespaces.keys(), self._dialer)
        self._stack.push_async_callback(self.replica.close)
        self.replica.start()
        return NearestDirectory(coordinators, self.replica.reader, max_lag_s=config.replica_max_lag_s)

    def _build_publishing(self, peer_address: str, outbox: OwnerOutbox) -> Publishing:
        identity = PublisherIdentity(
            node=self.node,
            epoch=self.epoch,
            peer_address=peer_address,
            started_unix_ms=int(time.time() * 1000),
            namespaces=tuple(self.store.namespaces.values()),
            agent_version=version(),
        )
        return Publishing(
            self._discovery,
            identity,
            outbox,
            self.store,
            self.stager.pools,
            read_bytes_per_s=lambda: self.reader.counters.read_bytes_per_s,
            reads=lambda: self.reader.counters.figures(),
            loss=self.config.event_loss,
            dialer=self._dialer,
            rng=random.Random(self.epoch),
        )

    def _not_ready(self) -> str:
        """Never for a coordinator's or a certificate's sake: it gates the engine's pod."""
        return "draining" if self._draining else ""

    # values

    def _identity(self, arena: Arena) -> Identity:
        return Identity(
            node=self.node,
            epoch=self.epoch,
            version=version(),
            arena_path=arena.path,
            arena_id=arena.arena_id,
            arena_bytes=arena.arena_bytes,
            arena_memory=in_words(arena, self.config.numa_node),
            replica_path=self.config.replica_file,
            coordinators=self.config.coordinators,
        )

    def _limits(self) -> Limits:
        config = self.config
        return Limits(
            max_fingerprints=config.max_fingerprints,
            max_reply_bytes=config.max_reply_bytes,
            max_lease_s=config.max_lease_s,
            max_pin_s=config.max_pin_s,
            max_deadline_s=config.max_deadline_s,
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
