"""Keeps tenants within their quotas: watches totals, decides evictions, follows them up. One per coordinator; pure.

    within --over--> settling --heartbeat of every stream, still over--> sampling --ages known--> evicting (or dry-run)
       ^                |                                                                             |
       '----------------+------ total not trusted: "untrusted", start again -------------------------'

Rules:
- every step asks for the trusted total anew; whatever is not trusted at the moment of the decision is not acted upon;
- *settling*: a total counts only when every contributing stream sent a heartbeat after it was first seen to be over, since
  a heartbeat is what shows that the last event was lost;
- what was asked for and not answered counts as gone already; so a silent agent costs us patience, never blocks twice;
- one request per connection at a time, and it is over when our count includes it (owner_seq) or the connection ended;
- dry run unless enforcing: everything is decided and said, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdir.core.access import AccessSample
from kvdir.core.directory import Directory
from kvdir.core.effects import AskEvict
from kvdir.core.event import EvictRequest, EvictResult
from kvdir.core.node import Stream
from kvdir.core.quota import EvictionPlan, Quota, Share, Usage, plan_eviction, usage
from kvdir.core.trust import Cumulative
from kvdir.errors import UntrustedView

_SAMPLE_WANT = 4096
_SAMPLE_STEP = 4096
_LEAST_PATIENCE = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaPolicy:
    """interval_s: between two looks at a total. max_blocks: evicted for one subject in one interval, over all nodes."""

    quotas: tuple[Quota, ...] = ()
    enforce: bool = False
    interval_s: float = 5.0
    max_blocks: int = 4096


@dataclass(slots=True)
class Asked:
    """A request under way. owner_seq: from the answer; None before it. evicted: as answered."""

    share: Share
    request_id: int
    connection: int
    owner_seq: int | None = None
    evicted: int = 0

    @property
    def over(self) -> bool:
        stream = self.share.holding.stream
        if stream.fenced or stream.connection != self.connection or not stream.cursor.connected:
            return True
        return self.owner_seq is not None and stream.cursor.applied_seq >= self.owner_seq


@dataclass(slots=True)
class Watched:
    """One quota and how it stands. over_since_s: while settling."""

    quota: Quota
    figure: Cumulative = field(default_factory=lambda: Cumulative(0, False, 0.0, None, "not looked at yet"))
    verdict: str = "untrusted"
    words: str = "not looked at yet"
    plan: EvictionPlan = field(default_factory=lambda: EvictionPlan(0, ()))
    over_since_s: float | None = None
    sample: AccessSample | None = None
    asked: list[Asked] = field(default_factory=list)
    due_s: float = 0.0
    patience: float = 1.0
    evicted_blocks: int = 0
    refused: int = 0


class QuotaKeeper:
    """See the module docstring. `tick` as often as the directory's."""

    def __init__(self, policy: QuotaPolicy) -> None:
        self.policy = policy
        self.watched = tuple(Watched(quota) for quota in policy.quotas)
        self._cursor = 0
        self._requests = 0

    def tick(self, directory: Directory, *, now_s: float) -> list[AskEvict]:
        """What to ask of owners now; empty in a dry run."""
        out: list[AskEvict] = []
        for watched in self.watched:
            self._follow_up(watched)
            if watched.sample is not None:
                self._sample(watched, watched.sample, directory, now_s)
                if watched.sample.done:
                    out += self._decide(watched, watched.sample, directory, now_s)
            elif now_s >= watched.due_s:
                watched.due_s = now_s + self.policy.interval_s
                self._look(watched, directory, now_s)
        return out

    def answered(self, stream: Stream, result: EvictResult) -> None:
        """An owner has evicted. Answers to what we did not ask, or no longer wait for, change nothing."""
        for watched in self.watched:
            for asked in watched.asked:
                mine = asked.request_id == result.request_id and asked.share.holding.stream is stream
                if mine and asked.owner_seq is None and asked.connection == stream.connection:
                    asked.owner_seq = result.owner_seq
                    asked.evicted = min(result.evicted_blocks, asked.share.max_blocks)
                    watched.evicted_blocks += asked.evicted

    # -- one step each -------------------------------------------------------------------------------------------------------

    def _follow_up(self, watched: Watched) -> None:
        ended = [asked for asked in watched.asked if asked.over]
        if not ended:
            return
        watched.asked = [asked for asked in watched.asked if not asked.over]
        answers = [asked for asked in ended if asked.owner_seq is not None]
        if not answers:
            return
        if 2 * sum(asked.evicted for asked in answers) < sum(asked.share.max_blocks for asked in answers):
            watched.patience = watched.patience / 2 if watched.patience > _LEAST_PATIENCE else 0.0
        else:
            watched.patience = 1.0

    def _look(self, watched: Watched, directory: Directory, now_s: float) -> None:
        """Is it over, can that be believed, and have all streams proved it since? Then a sample is begun."""
        used = self._over(watched, directory, now_s)
        if used is None:
            watched.over_since_s = None
            return
        if watched.over_since_s is None:
            watched.over_since_s = now_s
        waiting = [stream.node for stream in used.streams if stream.heartbeat_s <= watched.over_since_s]
        if waiting and watched.verdict == "dry-run":
            return  # what was said then still holds
        if waiting:
            excess = used.figure.value - watched.quota.limit_bytes
            watched.verdict = "settling"
            watched.words = f"over by {excess:,} bytes; waiting for a heartbeat of {', '.join(sorted(waiting)[:4])}"
            return
        numbers = [held.holder.number for held in used.holdings]
        watched.sample = AccessSample(numbers, self._cursor, want=_SAMPLE_WANT)

    def _sample(self, watched: Watched, sample: AccessSample, directory: Directory, now_s: float) -> None:
        sample.step(directory.index, _SAMPLE_STEP, now_s=now_s)
        self._cursor = sample.cursor

    def _decide(self, watched: Watched, sample: AccessSample, directory: Directory, now_s: float) -> list[AskEvict]:
        watched.sample = None
        used = self._over(watched, directory, now_s)
        if used is None:
            watched.over_since_s = None
            return []
        busy = {id(asked.share.holding.stream) for other in self.watched for asked in other.asked}
        plan = plan_eviction(
            used.figure.require_trusted(),
            watched.quota.limit_bytes,
            [held for held in used.holdings if held.stream.cursor.connected and id(held.stream) not in busy],
            sample.ages,
            max_blocks=self.policy.max_blocks,
            leaving_bytes=self._leaving(watched),
            patience=watched.patience,
        )
        watched.plan, watched.over_since_s = plan, None
        nodes = len({share.holding.stream.node for share in plan.shares})
        what = f"{plan.blocks:,} blocks ({plan.bytes:,} bytes) on {nodes} nodes, unused for {plan.older_than_s} s or longer"
        if not self.policy.enforce:
            watched.verdict, watched.words = "dry-run", f"would evict {what}; start with --quota-enforce to do so"
            return []
        watched.verdict, watched.words = "evicting", f"asked to evict {what}"
        return self._ask(watched, plan.shares)

    def _ask(self, watched: Watched, shares: Sequence[Share]) -> list[AskEvict]:
        """One request a connection: a second namespace of a node waits for its next turn."""
        out, seen = [], set()
        for share in shares:
            stream, holder = share.holding.stream, share.holding.holder
            if id(stream) in seen:
                continue
            seen.add(id(stream))
            self._requests += 1
            watched.asked.append(Asked(share, self._requests, stream.connection))
            request = EvictRequest(
                request_id=self._requests,
                namespace_digest=holder.namespace.digest,
                tier=holder.tier,
                max_blocks=share.max_blocks,
                keep_blocks=share.keep_blocks,
                older_than_s=watched.plan.older_than_s,
            )
            out.append(AskEvict(stream.node, stream.epoch, request))
        return out

    def _over(self, watched: Watched, directory: Directory, now_s: float) -> Usage | None:
        """The usage if it is trusted and over the limit; else None, and the verdict says why."""
        streams = [node.stream for node in directory.nodes.values() if node.stream is not None]
        used = usage(watched.quota, streams, directory.namespaces, now_s=now_s)
        watched.figure = used.figure
        try:
            if directory.warming:
                raise UntrustedView("not every node has restated what it holds since the coordinator started")
            known = used.figure.require_trusted()
        except UntrustedView as refusal:
            watched.refused += 1
            watched.verdict, watched.words = "untrusted", f"nothing is evicted: {refusal}"
            return None
        excess = known - watched.quota.limit_bytes - self._leaving(watched)
        if excess < min((held.block_bytes for held in used.holdings), default=1):
            watched.verdict = "evicting" if watched.asked else "within"
            watched.words = f"waiting for {len(watched.asked)} nodes" if watched.asked else ""
            return None
        return used

    def _leaving(self, watched: Watched) -> int:
        """Bytes that were asked for, by whatever quota, and are still in this one's count."""
        asked = [each for other in self.watched for each in other.asked]
        return sum(each.share.bytes for each in asked if watched.quota.covers(each.share.holding.holder.namespace))
