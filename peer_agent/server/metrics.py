"""All metrics of an agent, prefix peer_agent_. Hot paths count in plain integers; this collector reads them when scraped.

Labels are bounded: namespace (configured ones), state, status, plane, priority, coordinator, method; never a fingerprint or a
peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvdir.client.engine_streams import EngineStreams
from kvdir.client.race import RaceCounters
from kvdir.core.outbox import OwnerOutbox
from kvdir.obs.call_figures import CallFigures
from peer_agent.memory.pages import Pages
from peer_agent.server.accepting import Accepting
from peer_agent.server.device_metrics import device_families
from peer_agent.server.engines import engine_families
from peer_agent.server.nearest import NearestDirectory
from peer_agent.server.peers import Peers
from peer_agent.server.publishing import Publishing
from peer_agent.server.reader import Reader
from peer_agent.server.replica import NodeReplica, replica_families
from peer_agent.server.staging import Stager
from peer_agent.server.store import Store
from peer_agent.server.tasks import OwnedTasks
from peer_agent.server.turns import Turns
from peer_agent.transport.base import Transport

Families = Iterator[Metric]


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

    def _arena(self) -> Families:
        slots = GaugeMetricFamily("peer_agent_slots", "Slots by state.", labels=["namespace", "state"])
        held = GaugeMetricFamily("peer_agent_held_bytes", "Payload bytes of visible blocks.", labels=["namespace"])
        guarded = GaugeMetricFamily("peer_agent_guarded_slots", "Slots that eviction may not take.", labels=["namespace", "by"])
        evicted = CounterMetricFamily("peer_agent_evicted_blocks", "Blocks evicted since start.", labels=["namespace"])
        help = "Visible blocks that are not published, because another rank of the split lacks its part."
        incomplete = GaugeMetricFamily("peer_agent_incomplete_blocks", help, labels=["namespace"])
        for item in self._store.occupancy():
            name = self._store.namespaces[item.namespace_digest].short
            for state in ("free", "reserved", "committed", "retired", "quarantined"):
                slots.add_metric([name, state], getattr(item, state))
            guarded.add_metric([name, "lock"], item.locked)
            guarded.add_metric([name, "pin"], item.pinned)
            held.add_metric([name], item.committed * item.block_bytes)
            evicted.add_metric([name], item.evicted)
            incomplete.add_metric([name], self._store.incomplete(item.namespace_digest))
        yield from (slots, held, guarded, evicted, incomplete)
        yield GaugeMetricFamily("peer_agent_arena_bytes", "Size of the arena.", value=self._pages.mapped_bytes)
        help = "Of the arena, when the agent started: mapped by huge pages."
        yield GaugeMetricFamily("peer_agent_arena_huge_bytes", help, value=self._pages.huge_bytes)
        accepted = "Namespaces that engines brought along (accept_bytes); room: how many more there can be."
        family = GaugeMetricFamily("peer_agent_accepted_namespaces", accepted, labels=["state"])
        family.add_metric(["accepted"], self._accepting.accepted)
        family.add_metric(["room"], self._accepting.room)
        yield family
        yield GaugeMetricFamily("peer_agent_locks", "Locks held by peers and engines.", value=self._store.locks)
        yield GaugeMetricFamily("peer_agent_engine_sessions", "Engines attached.", value=self._store.sessions)

    def _loads(self) -> Families:
        counters = self._reader.counters
        blocks = CounterMetricFamily("peer_agent_load_blocks", "Blocks asked by engines, by result.", labels=["status"])
        for status, count in list(counters.blocks.items()):
            blocks.add_metric([status.name.lower()], count)
        yield blocks
        for name, help, value in (
            ("loads", "Loads answered.", counters.loads),
            ("refused_loads", "Loads answered from here only, because too much was under way.", counters.refused),
            ("peer_read_bytes", "Bytes read from peers and verified.", counters.peer_bytes),
            ("directory_failures", "Loads that reached no directory in time.", counters.directory_failures),
            ("peer_failures", "Peers that did not answer a lock.", counters.peer_failures),
            ("stale_reported_blocks", "Blocks reported stale to the directory.", counters.stale_reported),
            ("stale_unreported_blocks", "Stale blocks that could not be reported.", counters.stale_unreported),
            ("quarantined_blocks", "Blocks whose late transfer took their slots out of use.", counters.quarantined),
            ("no_space_blocks", "Blocks not read for want of a free slot.", counters.no_space),
            ("waited_blocks", "Blocks that somebody else was writing already.", counters.waited),
            ("hedged_reads", "Reads begun a second time at another peer, because the first was overdue.", counters.hedges),
            ("hedged_reads_won", "Of those, the ones that brought a block first.", counters.hedges_won),
            ("hedged_bytes", "Bytes that arrived although another peer had brought them.", counters.hedged_bytes),
            (
                "saved_seconds",
                "Recompute time that blocks from peers saved, where the prefill rate is known.",
                counters.saved_s,
            ),
            ("spent_seconds", "Time of loads that went to peers, where the prefill rate is known.", counters.spent_s),
        ):
            yield CounterMetricFamily(f"peer_agent_{name}", help, value=value)
        gain = "Seconds saved less seconds spent; falls when hits cost more than they save."
        yield GaugeMetricFamily("peer_agent_net_gain_seconds", gain, value=counters.saved_s - counters.spent_s)
        yield from self._predictions()
        yield GaugeMetricFamily("peer_agent_flight_bytes", "Bytes under way from peers.", value=self._turns.in_flight_bytes)
        queued = GaugeMetricFamily("peer_agent_queued_reads", "Reads that wait for their turn.", labels=["priority"])
        for priority, count in self._turns.waiting().items():
            queued.add_metric([priority.name.lower()], count)
        yield queued
        planes = GaugeMetricFamily("peer_agent_connected_peers", "Peers connected, by plane in use.", labels=["plane"])
        for plane, count in self._peers.planes_in_use().items():
            planes.add_metric([plane], count)
        yield planes

    def _predictions(self) -> Families:
        loads = self._reader.counters.predictions
        help = "Duration of loads from peers, in parts of the predicted one."
        yield HistogramMetricFamily("peer_agent_load_prediction_ratio", help, buckets=loads.buckets(), sum_value=loads.sum)
        help = "Duration of reads from peers, in parts of the predicted one."
        reads = HistogramMetricFamily("peer_agent_read_prediction_ratio", help, labels=["plane"])
        for plane, ratios in self._peers.predictions.items():
            reads.add_metric([plane], ratios.buckets(), ratios.sum)
        yield reads

    def _nominations(self) -> Families:
        if self._replica is not None:
            yield from replica_families(self._replica)
        if self._nearest is not None:
            asked = CounterMetricFamily("peer_agent_nominations", "Loads by who said whom to ask.", labels=["source"])
            for source, count in self._nearest.asked.items():
                asked.add_metric([source], count)
            yield asked

        if self._races is not None:
            for name, help, value in (
                ("questions", "Questions to the coordinators.", self._races.questions),
                ("hedges", "Second questions beside one that was slow.", self._races.hedges),
                ("hedges_won", "Of those, the ones that were answered first.", self._races.hedges_won),
                ("moved_on", "Questions to the next coordinator because one failed.", self._races.moved_on),
            ):
                yield CounterMetricFamily(f"peer_agent_directory_{name}", help, value=value)

    def _stream(self) -> Families:
        connected = GaugeMetricFamily("peer_agent_publisher_connected", "1 if connected.", labels=["coordinator"])
        standby = GaugeMetricFamily(
            "peer_agent_publisher_standby", "1 if another coordinator of the same store is spoken to.", labels=["coordinator"]
        )
        unacked = GaugeMetricFamily("peer_agent_unacked_events", "Events not acknowledged yet.", labels=["coordinator"])
        skipped = CounterMetricFamily("peer_agent_skipped_events", "Events too old to be sent.", labels=["coordinator"])
        snapshots = CounterMetricFamily("peer_agent_snapshots", "Snapshots sent.", labels=["coordinator"])
        sketches = CounterMetricFamily("peer_agent_sketches", "Sketches sent.", labels=["coordinator"])
        replays = CounterMetricFamily("peer_agent_replays", "Replays asked for.", labels=["coordinator"])
        lost = CounterMetricFamily("peer_agent_lost_events", "Events dropped on purpose (event_loss).", labels=["coordinator"])
        for item in self._publishing.stats():
            connected.add_metric([item.address], float(item.connected))
            standby.add_metric([item.address], float(item.standby))
            unacked.add_metric([item.address], self._outbox.last_seq - item.acked_seq)
            skipped.add_metric([item.address], item.skipped_events)
            snapshots.add_metric([item.address], item.snapshots)
            sketches.add_metric([item.address], item.sketches)
            replays.add_metric([item.address], item.replays)
            lost.add_metric([item.address], item.lost_events)
        yield from (connected, standby, unacked, skipped, snapshots, sketches, replays, lost)
        yield CounterMetricFamily("peer_agent_events", "Sequence numbers consumed.", value=self._outbox.last_seq)
        fenced = float(bool(self._publishing.fenced))
        yield GaugeMetricFamily("peer_agent_fenced", "1 if a newer agent of this name publishes.", value=fenced)

    def _service(self) -> Families:
        yield from self._calls.families("peer_agent")
        yield CounterMetricFamily("peer_agent_rpc_bugs", "Calls that ended in an unexpected error.", value=self._bugs())
        yield CounterMetricFamily("peer_agent_task_failures", "Background tasks that failed.", value=self._tasks.failures)
        yield GaugeMetricFamily("peer_agent_tasks", "Background tasks running.", value=len(self._tasks))
        served = CounterMetricFamily("peer_agent_plane_served", "What our planes served to peers.", labels=["plane", "what"])
        for name, plane in self._planes.items():
            stats: Callable[[], dict[str, int]] = getattr(plane, "stats", dict)
            for what, count in stats().items():
                served.add_metric([name, what], count)
        yield served
        ends_s: int = getattr(self._planes.get("tcp"), "tls_expires_unix_s", 0)
        if ends_s:
            help = "When our certificate of the tcp plane ends."
            yield GaugeMetricFamily("peer_agent_tls_expires_unix_s", help, value=ends_s)
        lanes = GaugeMetricFamily("peer_agent_plane_lanes", "Connections by the lane really in use.", labels=["plane", "lane"])
        for name, plane in self._planes.items():
            in_use: dict[str, int] = getattr(plane, "lanes", {})
            for lane, count in in_use.items():
                lanes.add_metric([name, lane], count)
        yield lanes
