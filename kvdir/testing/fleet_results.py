"""Conditions and results of a simulated fleet (fleet.py). Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvdir.testing.sim_results import Outcome, RepairCost

STATES = ("synced", "gap", "repairing", "stale", "unknown")
"""Of a live node's stream at one coordinator; unknown: not registered there, or the coordinator is away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetup:
    """Conditions. Shares are of the nodes; moments of faults are shares of duration_s, after a ramp in which all nodes join.

    restarts, kills, leaves, joins: spread evenly; a restarted node is away for restart_s and comes back empty, a killed one
    never. cut_share: nodes cut off from the first coordinator for cut_s; half of all are cut off from the last one, for half
    of it. loss: of messages, for a tenth of the time. coordinator_down_s: how long one is away that restarts with nothing.
    max_index_bytes: of each coordinator, 0 for no bound. explain: say why blocks missed, which takes a look at every node.
    """

    nodes: int = 1000
    coordinators: int = 3
    blocks_per_node: int = 1000
    duration_s: float = 300.0
    ramp_s: float = 10.0
    delay_s: float = 0.002
    heartbeat_s: float = 1.0
    tick_s: float = 0.05
    sample_s: float = 1.0
    restarts: float = 0.10
    kills: float = 0.03
    leaves: float = 0.02
    joins: float = 0.05
    restart_s: float = 3.0
    cut_share: float = 0.05
    cut_s: float = 20.0
    loss: float = 0.05
    coordinator_down_s: float = 3.0
    blocks_per_s: float = 20.0
    max_index_bytes: int = 0
    explain: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FleetSample:
    """One point of the time line. states: of live nodes times coordinators, by STATES. blocks and hits: since the point before.

    repair_bytes: so far, by kind. index_blocks: of the largest coordinator.
    """

    at_s: float
    nodes: int
    states: dict[str, int]
    blocks: int
    hit_local: int
    hit_peer: int
    repair_bytes: dict[str, int]
    index_blocks: int


@dataclass(slots=True)
class FleetOutcome:
    """reads: what the nodes asked for and got. events: applied, over all coordinators, heartbeats not counted.

    messages_cut: not delivered because of a partition or an absence. failed_lookups: no coordinator was there. evicted_blocks:
    for the bound. faults: what happened, as (at_s, words). settle_s: from the end, when every fault was healed, until each live
    node was synced and equal to its truth at every coordinator; None: not within the limit. differences: streams whose digests
    differed between coordinators after that. violations: figures that were trusted and wrong, and broken invariants, in words
    (the first few).
    """

    reads: Outcome = field(default_factory=Outcome)
    events: int = 0
    heartbeats: int = 0
    messages_cut: int = 0
    lookups: int = 0
    failed_lookups: int = 0
    evicted_blocks: int = 0
    repairs: dict[str, RepairCost] = field(default_factory=dict)
    faults: list[tuple[float, str]] = field(default_factory=list)
    trust_checks: int = 0
    trust_violations: int = 0
    violations: list[str] = field(default_factory=list)
    settle_s: float | None = None
    differences: int = 0
    timeline: list[FleetSample] = field(default_factory=list)
