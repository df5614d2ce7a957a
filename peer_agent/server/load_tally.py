"""What is counted of loads for the metrics alone: how long they and their reads took, how old the word was that led to them,
what they cost in calls, what came for nothing. The event loop counts, the scraper's thread reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvdir.obs.definition import Family, Histogram
from kvdir.obs.definitions import family, value
from kvdir.obs.labels import AGE_BUCKETS_S, TRANSFER_BUCKETS_S
from peer_agent.core.effects import LoadStatus
from peer_agent.core.plan import ReadPlan
from peer_agent.core.prefetched import Prefetched
from peer_agent.core.schedule import Priority


class LoadTally:
    """Since start. ages: of the word of their node, of blocks that owners then held. locks, unlocks, reports: calls."""

    def __init__(self) -> None:
        self.loads = {priority: Histogram(TRANSFER_BUCKETS_S) for priority in Priority}
        self.reads: dict[str, Histogram] = {}
        self.read_bytes: dict[str, int] = {}
        self.ages = Histogram(AGE_BUCKETS_S)
        self.locks = self.unlocks = self.reports = 0
        self.held_blocks = self.stale_blocks = 0
        self.local_tokens = self.peer_tokens = 0
        self.late_bytes = 0
        self.unwanted_bytes = 0
        self.prefetched = Prefetched()

    def load(
        self, plan: ReadPlan, priority: Priority, *, asked: bool, spent_s: float, block_tokens: int, block_bytes: int
    ) -> None:
        """One load has been answered. asked: it went to owners."""
        results = plan.results
        if asked:
            self.loads[priority].add(spent_s)
        self.late_bytes += results.count(LoadStatus.LATE) * block_bytes
        if priority is Priority.LOAD:
            self.local_tokens += results.count(LoadStatus.HIT_LOCAL) * block_tokens
            self.peer_tokens += results.count(LoadStatus.HIT_PEER) * block_tokens

    def answered(self, age_s: float, *, held: int, stale: int) -> None:
        """An owner has said what it holds. age_s: since it had been heard, when the directory named it."""
        self.held_blocks += held
        self.stale_blocks += stale
        if held:
            self.ages.add(age_s, held)

    def read(self, plane: str, *, took_s: float, size_bytes: int) -> None:
        """One read from one owner has ended. size_bytes: that arrived."""
        if plane not in self.reads:
            self.read_bytes[plane] = 0
            self.reads[plane] = Histogram(TRANSFER_BUCKETS_S)
        self.reads[plane].add(took_s)
        self.read_bytes[plane] += size_bytes

    def families(self, *, questions: int, hedged_bytes: int) -> Iterator[Family]:
        """questions: to coordinators, which others count. hedged_bytes: that arrived a second time."""
        loads, reads = family("peer_agent_load_duration_seconds"), family("peer_agent_read_duration_seconds")
        sizes = family("peer_agent_read_bytes_total")
        for priority, took in self.loads.items():
            loads.add_buckets(took, priority.name.lower())
        for plane, took in tuple(self.reads.items()):
            reads.add_buckets(took, plane)
            sizes.add(self.read_bytes[plane], plane)
        yield from (loads, reads, sizes, family("peer_agent_used_entry_age_seconds").add_buckets(self.ages))
        tokens = family("peer_agent_loaded_tokens_total")
        yield tokens.add(self.local_tokens, "local").add(self.peer_tokens, "peer")
        calls = family("peer_agent_metadata_calls_total").add(questions, "lookup").add(self.locks, "lock")
        yield calls.add(self.unlocks, "unlock").add(self.reports, "report")
        yield family("peer_agent_owner_blocks_total").add(self.held_blocks, "held").add(self.stale_blocks, "stale")
        yield value("peer_agent_late_bytes_total", self.late_bytes)
        ahead = self.prefetched
        outcomes = family("peer_agent_prefetched_blocks_total").add(ahead.brought, "brought")
        yield outcomes.add(ahead.used, "used").add(ahead.unused, "unused")
        unused = family("peer_agent_unused_bytes_total").add(hedged_bytes, "hedged")
        yield unused.add(self.unwanted_bytes, "late").add(ahead.unused_bytes, "prefetched")
