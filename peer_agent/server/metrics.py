"""All metrics of an agent, prefix peer_agent_. Hot paths count in plain integers; this collector reads them when scraped.

What there is, and what bounds its labels: kvdir/obs/definitions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvdir.client.engine_streams import EngineStreams
from kvdir.client.race import RaceCounters
from kvdir.core.outbox import OwnerOutbox
from kvdir.obs.call_figures import CallFigures
from kvdir.obs.definition import Family
from kvdir.obs.definitions import family, value
from kvdir.obs.labels import SLOT
from kvdir.obs.tally import Tally
from peer_agent.memory.pages import Pages
from peer_agent.server.accepting import Accepting
from peer_agent.server.device_metrics import device_families
from peer_agent.server.engines import engine_families
from peer_agent.server.nearest import NearestDirectory
from peer_agent.server.peers import Peers
from peer_agent.server.plane_metrics import plane_families
from peer_agent.server.publishing import Publishing
from peer_agent.server.reader import Reader
from peer_agent.server.replica import NodeReplica, replica_families
from peer_agent.server.staging import Stager
from peer_agent.server.store import Store
from peer_agent.server.tasks import OwnedTasks
from peer_agent.server.turns import Turns
from peer_agent.transport.base import Transport

Families = Iterator[Family]


class AgentCollector:
    """Reads the parts of an agent. Safe on the HTTP thread (kvdir/obs/http.py): it reads integers and copies of dicts."""

    def __init__(
        self,
        *,
        store: Store,
        stager: Stager,
        reader: Reader,
        peers: Peers,
        turns: Turns,
        publishing: Publishing,
        outbox: OwnerOutbox,
        calls: CallFigures,
        tally: Tally,
        bugs: Callable[[], int],
        tasks: OwnedTasks,
        planes: dict[str, Transport],
        pages: Pages,
        accepting: Accepting,
        replica: NodeReplica | None = None,
        nearest: NearestDirectory | None = None,
        races: RaceCounters | None = None,
        engines: EngineStreams,
    ) -> None:
        self._store = store
        self._stager = stager
        self._reader = reader
        self._peers = peers
        self._turns = turns
        self._publishing = publishing
        self._outbox = outbox
        self._calls = calls
        self.tally = tally
        self._bugs = bugs
        self._tasks = tasks
        self._planes = planes
        self._pages = pages
        self._accepting = accepting
        self._replica = replica
        self._nearest = nearest
        self._races = races
        self._engines = engines

    def collect(self) -> Families:
        yield from self._arena()
        yield from device_families(self._stager, self._store)
        yield from self._loads()
        yield from self._stream()
        yield from self._nominations()
        yield from self._service()
        yield from engine_families(self._engines)
        yield from plane_families(self._planes)
        yield from self.tally.families()

    def _arena(self) -> Families:
        slots, held = family("peer_agent_slots"), family("peer_agent_held_bytes")
        guarded, evicted = family("peer_agent_guarded_slots"), family("peer_agent_evicted_blocks_total")
        incomplete, quarantined = family("peer_agent_incomplete_blocks"), family("peer_agent_quarantined_bytes")
        for item in self._store.occupancy():
            name = self._store.namespaces[item.namespace_digest].short
            for state in SLOT.values:
                slots.add(getattr(item, state), name, state)
            guarded.add(item.locked, name, "lock").add(item.pinned, name, "pin")
            held.add(item.committed * item.block_bytes, name)
            quarantined.add(item.quarantined * item.block_bytes)
            evicted.add(item.evicted, name)
            incomplete.add(self._store.incomplete(item.namespace_digest), name)
        yield from (slots, held, guarded, evicted, incomplete, quarantined)
        yield value("peer_agent_arena_bytes", self._pages.mapped_bytes)
        yield value("peer_agent_arena_huge_bytes", self._pages.huge_bytes)
        accepted, room = self._accepting.accepted, self._accepting.room
        yield family("peer_agent_accepted_namespaces").add(accepted, "accepted").add(room, "room")
        yield value("peer_agent_locks", self._store.locks)
        yield value("peer_agent_engine_sessions", self._store.sessions)

    def _loads(self) -> Families:
        counters = self._reader.counters
        blocks = family("peer_agent_load_blocks_total")
        for status, count in list(counters.blocks.items()):
            blocks.add(count, status.name.lower())
        yield blocks
        for name, amount in (
            ("loads", counters.loads),
            ("refused_loads", counters.refused),
            ("peer_read_bytes", counters.peer_bytes),
            ("directory_failures", counters.directory_failures),
            ("peer_failures", counters.peer_failures),
            ("stale_reported_blocks", counters.stale_reported),
            ("stale_unreported_blocks", counters.stale_unreported),
            ("quarantined_blocks", counters.quarantined),
            ("no_space_blocks", counters.no_space),
            ("waited_blocks", counters.waited),
            ("hedged_reads", counters.hedges),
            ("hedged_reads_won", counters.hedges_won),
            ("hedged_bytes", counters.hedged_bytes),
            ("saved_seconds", counters.saved_s),
            ("spent_seconds", counters.spent_s),
        ):
            yield value(f"peer_agent_{name}_total", amount)
        races = self._races
        questions = races.questions + races.hedges + races.moved_on if races is not None else 0
        yield from counters.tally.families(questions=questions, hedged_bytes=counters.hedged_bytes)
        yield value("peer_agent_fallback_peers", self._peers.fallbacks)
        yield value("peer_agent_net_gain_seconds", counters.saved_s - counters.spent_s)
        yield from self._predictions()
        yield value("peer_agent_flight_bytes", self._turns.in_flight_bytes)
        queued, planes = family("peer_agent_queued_reads"), family("peer_agent_connected_peers")
        for priority, count in self._turns.waiting().items():
            queued.add(count, priority.name.lower())
        for plane, count in self._peers.planes_in_use().items():
            planes.add(count, plane)
        yield from (queued, planes)

    def _predictions(self) -> Families:
        yield family("peer_agent_load_prediction_ratio").add_buckets(self._reader.counters.predictions)
        reads = family("peer_agent_read_prediction_ratio")
        for plane, ratios in self._peers.predictions.items():
            reads.add_buckets(ratios, plane)
        yield reads

    def _nominations(self) -> Families:
        if self._replica is not None:
            yield from replica_families(self._replica)
        if self._nearest is not None:
            asked = family("peer_agent_nominations_total")
            for source, count in self._nearest.asked.items():
                asked.add(count, source)
            yield asked
        if self._races is not None:
            for name in ("questions", "hedges", "hedges_won", "moved_on"):
                yield value(f"peer_agent_directory_{name}_total", getattr(self._races, name))

    def _stream(self) -> Families:
        names = ("skipped_events", "snapshots", "sketches", "replays", "lost_events")
        connected, standby = family("peer_agent_publisher_connected"), family("peer_agent_publisher_standby")
        unacked, counts = family("peer_agent_unacked_events"), {name: family(f"peer_agent_{name}_total") for name in names}
        for item in self._publishing.stats():
            connected.add(item.connected, item.address)
            standby.add(item.standby, item.address)
            unacked.add(self._outbox.last_seq - item.acked_seq, item.address)
            for name, count in counts.items():
                count.add(getattr(item, name), item.address)
        yield from (connected, standby, unacked, *counts.values())
        yield value("peer_agent_events_total", self._outbox.last_seq)
        yield value("peer_agent_fenced", bool(self._publishing.fenced))

    def _service(self) -> Families:
        yield from self._calls.families("peer_agent")
        yield value("peer_agent_rpc_bugs_total", self._bugs())
        yield value("peer_agent_task_failures_total", self._tasks.failures)
        yield value("peer_agent_tasks", len(self._tasks))
