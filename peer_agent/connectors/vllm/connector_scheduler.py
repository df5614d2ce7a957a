"""The scheduler half of the connector: which blocks a request can have from elsewhere, and which of its own are worth saving.

Rules:
- Nothing here waits. Who has what is asked of `Directory`: an answer at once, or "not yet", for which the engine is told to ask
  again until the question's deadline; then it is a miss.
- An offer is a legal restore point of all groups (kvdir/core/restore_points.py) and never covers the last token: the engine
  computes that one to have something to sample from.
- A request whose load failed once is offered nothing more: it recomputes, and cannot go round in circles.
- Of requests with the same prefix one loads; the others wait for it and then find the blocks in the engine's own prefix cache.
  What the load did not bring, or not in time, they compute. Whoever waits for several, one after another, waits no longer.
- Blocks that are being saved are held (a reference in the engine's block pool), so neither preemption nor a sliding window nor
  the end of the request lets them be overwritten meanwhile; at most `held_most` at once, beyond that blocks go unsaved.
- Nothing grows without bound: what is known of a request ends with it, offers are remembered for two short periods.

Does not: know vLLM's classes, which are the shim's, or move bytes, which the worker half does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from kvdir.core.restore_points import Bools, restore_points
from kvdir.fingerprint import Fingerprints
from peer_agent.connectors.vllm.connector_values import (
    NULL_BLOCK,
    Blocks,
    CacheGroup,
    LoadJob,
    SaveJob,
    StepPlan,
    StepReport,
    packed,
)

VERDICT_S = 0.25
"""How long an answer is good for a request that could not be admitted and asks again."""

OFFER_AGAIN_S = 30.0
"""A block that was saved is offered to the agent again after this or twice this, in case it was evicted."""

OFFERED_MOST = 1 << 18
FREES_SOON_S = 0.05
PAUSE_S = 1.0
"""Without loads after one that nobody answered."""


class Directory(Protocol):
    """Who has what, as the scheduler half asks; implemented by connector_lookup.py."""

    def ask(self, request_id: str, wanted: Sequence[Fingerprints]) -> list[Bools] | None:
        """Per group which blocks can be had (in all parts); None: not known yet, ask again. Never waits."""

    def forget(self, request_id: str) -> None:
        """The request needs no answer any more."""


@dataclass(slots=True)
class _Offer:
    """What was found for a request: blocks from `computed` to `best` tokens. until_s: how long it holds."""

    computed: int
    best: int
    until_s: float


@dataclass(slots=True)
class _Known:
    """A request as this half knows it. saved: blocks of each group that were offered for saving or need not be. waits_for: the
    request that loads what this one lacks. waits_until_s: how long it waits for others, one after another. failed: it computes
    whatever it still lacks.
    """

    saved: list[int]
    offer: _Offer | None = None
    waits_for: str = ""
    waits_until_s: float = 0.0
    failed: bool = False


@dataclass(slots=True)
class _Held:
    """A save job under way. missing: workers that have not reported it."""

    block_ids: tuple[int, ...]
    missing: int
    since_s: float


@dataclass(slots=True)
class Figures:
    """For tests and metrics; counted since the start."""

    asked: int = 0
    hit_tokens: int = 0
    deferred: int = 0
    skipped_saves: int = 0
    recomputed: int = 0


@dataclass(slots=True)
class Options:
    """loads, saves: the engine's role. workers: how many report each job. held_most: blocks. twin_wait_s: for other
    requests' loads of the same blocks.
    """

    loads: bool = True
    saves: bool = True
    workers: int = 1
    held_most: int = 1024
    twin_wait_s: float = 1.0


class SchedulerHalf:
    """hold, release: take and give back references to blocks of the engine's pool. clock_s: monotonic."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        directory: Directory,
        *,
        block_tokens: int,
        hold: Callable[[Sequence[int]], None],
        release: Callable[[Sequence[int]], None],
        clock_s: Callable[[], float],
        options: Options | None = None,
    ) -> None:
        self.figures = Figures()
        self._groups = tuple(groups)
        self._states = [replace(group.state, block_tokens=group.block_tokens) for group in groups]
        self._directory = directory
        self._block_tokens = block_tokens
        self._hold, self._release, self._clock_s = hold, release, clock_s
        self._options = options or Options()
        self._requests: dict[str, _Known] = {}
        self._loading: dict[str, LoadJob] = {}
        self._loaders: dict[bytes, str] = {}
        self._failing: set[str] = set()
        self._starting: list[LoadJob] = []
        self._held: dict[int, _Held] = {}
        self._held_blocks = 0
        self._last_job = 0
        self._offered = Lately(OFFER_AGAIN_S, OFFERED_MOST)
        self._paused_until_s = 0.0
        self._stopped = False

    # loads

    def matched(self, request_id: str, hashes: Sequence[bytes], *, tokens: int, computed: int) -> int | None:
        """How many tokens beyond `computed` can be loaded for a request of `tokens`; None: ask again."""
        known = self._known(request_id)
        now_s = self._clock_s()
        limit = (tokens - 1) // self._block_tokens * self._block_tokens
        if self._closed_to(known, now_s) or computed % self._block_tokens or limit <= computed:
            return 0
        if self._loaders and self._waits(known, hashes, computed, now_s):
            self.figures.deferred += 1
            return None
        if known.failed:
            return 0
        offer = known.offer
        if offer is None or offer.computed != computed or offer.until_s <= now_s:
            found = self._find(request_id, hashes, computed=computed, limit=limit)
            if found is None:
                return None
            self.figures.asked += 1
            offer = known.offer = _Offer(computed, found, now_s + VERDICT_S)
        return offer.best - computed

    def allocated(
        self, request_id: str, hashes: Sequence[bytes], block_ids: Sequence[Sequence[int]], *, external_tokens: int
    ) -> None:
        """The engine took the offer: blocks for it are in block_ids (per group, from the first token of the request on)."""
        known = self._requests.get(request_id)
        if external_tokens <= 0 or known is None or known.offer is None:
            return
        start, end = known.offer.computed, known.offer.computed + external_tokens
        known.offer = None
        groups = []
        for number, group in enumerate(self._groups):
            first, last = start // group.block_tokens, end // group.block_tokens
            taken = self._blocks(number, hashes, block_ids[number], first, last)
            known.saved[number] = max(known.saved[number], last)
            if taken is not None:
                groups.append(taken)
        job = LoadJob(request_id, tuple(groups))
        self._loading[request_id] = job
        for blocks in groups:
            self._loaders.update((name, request_id) for name in blocks.fingerprints)
        self._starting.append(job)
        self.figures.hit_tokens += external_tokens

    # saves

    def save(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        block_ids: Callable[[], Sequence[Sequence[int]]],
        *,
        computed_tokens: int,
    ) -> SaveJob | None:
        """Blocks that are full once this step has run: computed_tokens of the request then are. They are held.

        block_ids: as for `allocated`, asked for only when there is a new full block, which most decoding steps lack.
        """
        if not self._options.saves or self._stopped:
            return None
        known = self._known(request_id)
        full = [min(computed_tokens // group.block_tokens, len(hashes) // group.hashes_per_block) for group in self._groups]
        if all(end <= saved for end, saved in zip(full, known.saved, strict=True)):
            return None
        groups = []
        for number, ids in enumerate(block_ids()):
            start = known.saved[number]
            end = min(full[number], len(ids), start + self._options.held_most - self._held_blocks)
            self.figures.skipped_saves += end < full[number]
            if end <= start:
                continue
            known.saved[number] = end
            taken = self._blocks(number, hashes, ids, start, end, unless=self._offered)
            if taken is not None:
                groups.append(taken)
                self._held_blocks += len(taken)
        return self._held_job(groups) if groups else None

    def plan(self, saves: Sequence[SaveJob], *, idle: bool = False) -> StepPlan:
        """What this step tells the workers. idle: it computes nothing."""
        loads, self._starting = tuple(self._starting), []
        return StepPlan(loads, tuple(saves), idle)

    # what became of it

    def ended(self, report: StepReport | None, *, loaded: Sequence[str]) -> None:
        """What the workers say: `loaded` are requests whose load has ended in all of them, well or not."""
        for request_id in report.failed if report is not None else ():
            if request_id in self._loading:
                self._failing.add(request_id)
            if request_id in self._requests:
                self._requests[request_id] = _Known([0] * len(self._groups), failed=True)
            for known in self._requests.values():
                known.failed |= known.waits_for == request_id
        for request_id in loaded:
            if (job := self._loading.pop(request_id, None)) is not None:
                self._end_load(job)
        if report is None:
            return
        if report.silent:
            self._paused_until_s = self._clock_s() + PAUSE_S
        for number, workers in report.saved.items():
            self._end_save(number, workers)

    def finished(self, request_id: str) -> None:
        """The request has ended; what is under way for it ends by itself."""
        self._requests.pop(request_id, None)
        self._directory.forget(request_id)

    def stop(self) -> None:
        """From now on nothing is offered or saved: the weights may have changed under the same namespace."""
        self._stopped = True
        self._offered = Lately(OFFER_AGAIN_S, OFFERED_MOST)

    @property
    def busy(self) -> bool:
        """Whether the engine should go on stepping, only to hear of saves and give their blocks back."""
        return bool(self._held)

    def just_held(self) -> Iterator[int]:
        """Blocks whose saves have just begun: better to wait for those that nobody else needs than to preempt a request."""
        since_s = self._clock_s() - FREES_SOON_S
        return (block_id for held in self._held.values() if held.since_s > since_s for block_id in held.block_ids)

    @property
    def held_blocks(self) -> int:
        return self._held_blocks

    # internals

    def _known(self, request_id: str) -> _Known:
        return self._requests.setdefault(request_id, _Known([0] * len(self._groups)))

    def _closed_to(self, known: _Known, now_s: float) -> bool:
        return self._stopped or not self._options.loads or known.failed or now_s < self._paused_until_s

    def _waits(self, known: _Known, hashes: Sequence[bytes], computed: int, now_s: float) -> bool:
        """Whether another request is loading what this one lacks first. If that takes too long, this one computes."""
        for group in self._groups:
            first = computed // group.block_tokens
            for name in group.names(hashes, first, first + 1):
                if (loader := self._loaders.get(name)) is None:
                    continue
                if not known.waits_for:
                    known.waits_until_s = now_s + self._options.twin_wait_s
                known.waits_for = loader
                known.failed |= now_s >= known.waits_until_s
                return not known.failed
        known.waits_for = ""
        return False

    def _find(self, request_id: str, hashes: Sequence[bytes], *, computed: int, limit: int) -> int | None:
        """The largest legal restore point above `computed`, or `computed` itself; None: not known yet."""
        wanted = [
            packed(group.names(hashes, computed // group.block_tokens, limit // group.block_tokens)) for group in self._groups
        ]
        answer = self._directory.ask(request_id, wanted)
        if answer is None:
            return None
        held = [
            np.concatenate([np.ones(computed // group.block_tokens, np.bool_), hits])
            for group, hits in zip(self._groups, answer, strict=True)
        ]
        points = restore_points(self._states, held, block_tokens=self._block_tokens)
        return max(computed, points.best_tokens // self._block_tokens * self._block_tokens)

    def _blocks(
        self,
        number: int,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        start: int,
        end: int,
        *,
        unless: Lately | None = None,
    ) -> Blocks | None:
        """Blocks [start, end) of a group that exist, and were not offered lately."""
        names = self._groups[number].names(hashes, start, end)
        chosen = [
            (name, block_id)
            for name, block_id in zip(names, block_ids[start:end], strict=True)
            if block_id != NULL_BLOCK and (unless is None or not unless.seen(_key(number, name), self._clock_s()))
        ]
        if not chosen:
            return None
        return Blocks(number, packed([name for name, _ in chosen]), tuple(block_id for _, block_id in chosen))

    def _held_job(self, groups: Sequence[Blocks]) -> SaveJob:
        self._last_job += 1
        block_ids = tuple(block_id for blocks in groups for block_id in blocks.block_ids)
        self._hold(block_ids)
        self._held[self._last_job] = _Held(block_ids, self._options.workers, self._clock_s())
        return SaveJob(self._last_job, tuple(groups))

    def _end_save(self, number: int, workers: int) -> None:
        held = self._held[number]
        held.missing -= workers
        if held.missing > 0:
            return
        del self._held[number]
        self._held_blocks -= len(held.block_ids)
        self._release(held.block_ids)

    def _end_load(self, job: LoadJob) -> None:
        now_s, failed = self._clock_s(), job.request_id in self._failing
        self._failing.discard(job.request_id)
        self.figures.recomputed += failed
        for blocks in job.groups:
            for name in blocks.fingerprints:
                if self._loaders.get(name) == job.request_id:
                    del self._loaders[name]
                if not failed:
                    self._offered.seen(_key(blocks.group, name), now_s)  # what came through the arena is in the arena


@dataclass(slots=True)
class Lately:
    """Remembers keys for one to two periods, at most 2 * most of them."""

    period_s: float
    most: int
    _new: set[bytes] = field(default_factory=set)
    _old: set[bytes] = field(default_factory=set)
    _turn_s: float = 0.0

    def seen(self, key: bytes, now_s: float) -> bool:
        """Whether it was seen lately; from now on it was."""
        if now_s - self._turn_s >= self.period_s or len(self._new) >= self.most:
            self._old = self._new if now_s - self._turn_s < 2 * self.period_s else set()
            self._new, self._turn_s = set(), now_s
        if key in self._new or key in self._old:
            return True
        self._new.add(key)
        return False


def _key(group: int, name: bytes) -> bytes:
    return group.to_bytes(2, "big") + name
