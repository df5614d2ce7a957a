"""Conditions and results of a replay (simulate.py). Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvdir.testing.routing import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Conditions of a replay.

    owner_answers: the nominee is asked for the whole remaining list; otherwise only for what the directory claims it holds.
    repair: whether requests for replay, sketch and snapshot reach the nodes. sample_s: distance of two points of the time line.
    message_blocks: so many blocks at most in one message, which is what gets lost; 0: every change in one.
    """

    nodes: int = 16
    blocks_per_node: int = 2000
    policy: Policy = Policy.P2C
    loss: float = 0.0
    delay_s: float = 0.0
    heartbeat_s: float = 1.0
    owner_answers: bool = True
    repair: bool = True
    message_blocks: int = 0
    blocks_per_s: float = 20.0
    sample_s: float = 10.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One point of the time line. blocks and hits: since the previous point. error_blocks: sum over the nodes of the difference
    between what the directory counts and what the node holds at this moment (loss and delay together).
    """

    at_s: float
    blocks: int
    hit_local: int
    hit_peer: int
    streams_synced: int
    views_trusted: int
    missing_events: int
    error_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrustedTime:
    """How long the figures of a node's stream were not trusted, in how many intervals. share: of the whole time."""

    node: str
    intervals: int
    total_s: float
    longest_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairCost:
    """Repairs of one kind. bytes: of the content that came. seconds: from asking until it was done, in sum."""

    asked: int
    done: int
    failed: int
    bytes: int
    seconds: float


@dataclass(slots=True)
class Outcome:
    """Counts of blocks unless the name says otherwise.

    probes: owners asked. empty_probes: of them, those that held nothing that was wanted. stale_blocks: claimed by the
    directory for the owner asked, and absent there. missed_*: recomputed although some node held them, see sim_reads.py.
    untrusted_share: of the time of all streams; untrusted: by stream. repairs: by kind. settle_s: from the last
    request, with no further loss, until every stream was synced and equal to the truth; None if not within the limit.
    """

    requests: int = 0
    blocks: int = 0
    hit_local: int = 0
    hit_peer: int = 0
    recomputed: int = 0
    probes: int = 0
    empty_probes: int = 0
    claimed_blocks: int = 0
    stale_blocks: int = 0
    stale_reports_taken: int = 0
    missed_unknown: int = 0
    missed_stale: int = 0
    missed_unasked: int = 0
    messages: int = 0
    messages_lost: int = 0
    gaps: int = 0
    repairs: dict[str, RepairCost] = field(default_factory=dict)
    trust_violations: int = 0
    untrusted_share: float = 0.0
    untrusted: list[UntrustedTime] = field(default_factory=list)
    imbalance: float = 0.0
    settle_s: float | None = None
    timeline: list[Sample] = field(default_factory=list)
