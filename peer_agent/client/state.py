"""The engine library for models whose state is kept in groups: one engine a group, one answer in legal restore points.

    engine = peer_agent.connect_state("unix:/dev/shm/kvdir-node1.sock", namespace=namespace)
    engine.store(fingerprints, blocks)
    loaded = engine.load(fingerprints, into=room, prompt_tokens=len(tokens))
    loaded.restored_tokens        # resume there: every group has arrived, verified; everything behind it is recomputed

Rules: as peer_agent/client/engine.py: whatever goes wrong is a miss, every call ends by its deadline. Blocks, fingerprints and
memory come in a list for each state group of the namespace, in its order. What arrived decides: the restored point is worked
out from verified blocks, not from what anybody said to hold (peer_agent/core/state_load.py). Memory of blocks beyond it, or
before a window, is unspecified. A call that has returned, or raised, touches nothing of the caller's any more.
Thread-safe; blocking: groups are loaded side by side in threads of its own, CALLS for each group. With more calls at once a
group whose turn has not come by the deadline is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from kvdir.core.restore_points import RestorePoints
from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState
from kvdir.namespace import Namespace
from peer_agent.client.attachment import bounded_s
from peer_agent.client.engine import Engine, connect
from peer_agent.client.patience import DEADLINE_S
from peer_agent.client.results import LoadResult, LookupResult, StoreResult, missed, not_stored
from peer_agent.core.effects import LoadStatus
from peer_agent.core.state_load import Positions, StateLoad, hoped

T = TypeVar("T")

LOOKUP_SHARE = 0.25
"""Of a load's deadline, at most, for asking what there is."""
CALLS = 4
"""Of one engine, that work at the same time without waiting for one another."""
SOON_S = 0.001
"""Of a lookup without a deadline left: an engine takes 0 for none at all."""
LATE = "other calls of this engine took all the time"
CLOSED = "this engine was closed"
MAX_ROUNDS = 8
"""Of a load: how often a goal that could not be reached is replaced by a lesser one."""

_HITS = (LoadStatus.HIT_LOCAL, LoadStatus.HIT_PEER)
Groups = Sequence[Fingerprints]


@dataclass(frozen=True, slots=True, eq=False)
class StateLoadResult:
    """restored_tokens: the point that can be resumed from, 0: recompute everything. points: of what arrived, per group as well.

    Ranks of a split agree on the largest of `points` that all of them have, not on the smallest restored_tokens.
    hoped_tokens: the point that the load set out for. peer_bytes: read from peers. reason: why nothing could be asked.
    """

    points: RestorePoints
    hoped_tokens: int
    rounds: int
    peer_bytes: int
    reason: str = ""

    @property
    def restored_tokens(self) -> int:
        return self.points.best_tokens


class StateEngine:
    """See the module docstring. engines: one for each part of the namespace, for what concerns a single group."""

    def __init__(
        self, namespace: Namespace, engines: Sequence[Engine], *, deadline_s: float = DEADLINE_S, can_trim: bool = True
    ) -> None:
        self.namespace = namespace
        self.engines = tuple(engines)
        self._groups = tuple(part.group for part in namespace.parts())
        self._deadline_s = deadline_s
        self._can_trim = can_trim
        self._no_turn = LATE
        self._threads = ThreadPoolExecutor(CALLS * len(engines), thread_name_prefix="kvdir-state")

    def close(self) -> None:
        """Ends the sessions. Idempotent."""
        self._no_turn = CLOSED
        for engine in self.engines:
            engine.close()
        self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def store(self, fingerprints: Groups, blocks: Sequence[Any], *, deadline_s: float | None = None) -> tuple[StoreResult, ...]:
        """Per group: its blocks into the agent's memory, each published on its own; an empty list stores nothing of a group."""
        self._check(fingerprints, blocks)
        until_s = self._until_s(deadline_s)
        return self._each(
            lambda group: self.engines[group].store(fingerprints[group], blocks[group], deadline_s=_left_s(until_s)),
            lambda group: not_stored(len(fingerprints[group]), self._no_turn),
            until_s,
        )

    def lookup(
        self, fingerprints: Groups, *, prompt_tokens: int | None = None, deadline_s: float = 0.0
    ) -> tuple[RestorePoints, tuple[LookupResult, ...]]:
        """Where the prompt could be resumed, with what is here and, with a deadline, what peers are said to hold."""
        self._check(fingerprints)
        found = self._looked_up(fingerprints, deadline_s, self._until_s(deadline_s or None))
        return self._plan(found, prompt_tokens, in_doubt=False).goal, found

    def load(
        self, fingerprints: Groups, *, into: Sequence[Any], prompt_tokens: int | None = None, deadline_s: float | None = None
    ) -> StateLoadResult:
        """Brings what the best restore point reads of every group into the caller's memory, verified.

        into: per group, memory for each of its blocks, as a sequence of blocks: an array (n, block_bytes), or a list.
        """
        self._check(fingerprints, into)
        until_s = self._until_s(deadline_s)
        found = self._looked_up(fingerprints, max(SOON_S, LOOKUP_SHARE * _left_s(until_s)), until_s)
        plan = self._plan(found, prompt_tokens, in_doubt=True)
        goal, rounds, peer_bytes = plan.goal.best_tokens, 0, 0
        while rounds < MAX_ROUNDS and _left_s(until_s) > 0 and any(map(len, wanted := plan.wanted())):
            rounds += 1
            for group, result in enumerate(self._load(fingerprints, into, wanted, until_s)):
                peer_bytes += result.peer_bytes
                plan.took(group, wanted[group], np.isin(np.frombuffer(result.statuses, np.uint8), _HITS))
        reason = next((answer.reason for answer in found if answer.reason), "")
        return StateLoadResult(plan.restored, goal, rounds, peer_bytes, reason)

    # internals

    def _until_s(self, deadline_s: float | None) -> float:
        return time.monotonic() + bounded_s(deadline_s, self._deadline_s)

    def _looked_up(self, fingerprints: Groups, deadline_s: float, until_s: float) -> tuple[LookupResult, ...]:
        def late(group: int) -> LookupResult:
            nothing = bytes(len(fingerprints[group]))
            return LookupResult(local=nothing, nominated=nothing, reason=self._no_turn)

        def lookup(group: int) -> LookupResult:
            left_s = deadline_s and min(deadline_s, max(SOON_S, _left_s(until_s)))
            return self.engines[group].lookup(fingerprints[group], deadline_s=left_s)

        return self._each(lookup, late, until_s)

    def _load(
        self, fingerprints: Groups, into: Sequence[Any], wanted: Sequence[Positions], until_s: float
    ) -> tuple[LoadResult, ...]:
        def load(group: int) -> LoadResult:
            positions = wanted[group]
            if not len(positions):
                return LoadResult(statuses=b"")
            chosen, memory = fingerprints[group].select(positions.tolist()), _rows(into[group], positions)
            return self.engines[group].load(chosen, into=memory, deadline_s=_left_s(until_s))

        return self._each(load, lambda group: missed(len(wanted[group]), self._no_turn), until_s)

    def _each(self, work: Callable[[int], T], late: Callable[[int], T], until_s: float) -> tuple[T, ...]:
        """work, side by side; late: the answer for a group whose turn has not come by until_s. Ends, also by raising what a
        group raised, only when none of them works any more: each sees to its own deadline.
        """
        futures = [self._submitted(work, group) for group in range(len(self.engines))]
        wait(futures, timeout=_left_s(until_s))
        wait([future for future in futures if not future.cancel()])
        return tuple(late(group) if future.cancelled() else future.result() for group, future in enumerate(futures))

    def _submitted(self, work: Callable[[int], T], group: int) -> Future[T]:
        try:
            return self._threads.submit(copy_context().run, work, group)  # which request it is for
        except RuntimeError:  # closed meanwhile: a miss, as with a single engine
            never = Future[T]()
            never.cancel()
            never.set_running_or_notify_cancel()
            return never

    def _plan(self, found: Sequence[LookupResult], prompt_tokens: int | None, *, in_doubt: bool) -> StateLoad:
        """in_doubt: hope for what nodes may have whose claims may have holes."""
        return StateLoad(
            self._groups,
            [
                hoped(group, answer.local, answer.nominated, doubtful=in_doubt and _doubtful(answer))
                for group, answer in zip(self._groups, found, strict=True)
            ],
            block_tokens=self.namespace.block_tokens,
            prompt_tokens=prompt_tokens,
            can_trim=self._can_trim,
        )

    def _check(self, *lists: Sequence[Any]) -> None:
        for given in lists:
            if len(given) != len(self.engines):
                raise InvalidInput(f"{len(given)} lists for {len(self.engines)} state groups: pass one a group, in its order")


def connect_state(
    address: str,
    *,
    namespace: Namespace,
    engine: str = "",
    deadline_s: float = DEADLINE_S,
    timeout_s: float = 5.0,
    can_trim: bool = True,
    **options: Any,
) -> StateEngine:
    """Engines for every part of `namespace`, attached to the agent at `address`. Raises and waits as peer_agent.connect.

    can_trim: whether the engine can resume inside a block (restore_points). options: of peer_agent.connect, for each of them;
    a `probe` only where all groups have blocks of one size, since it is of one.
    """
    until_s, engines = time.monotonic() + timeout_s, list[Engine]()
    try:
        for part in namespace.parts():
            left_s = max(0.001, until_s - time.monotonic()) if timeout_s else 0.0
            engines.append(connect(address, namespace=part, engine=engine, deadline_s=deadline_s, timeout_s=left_s, **options))
    except BaseException:
        for made in engines:
            made.close()
        raise
    return StateEngine(namespace, engines, deadline_s=deadline_s, can_trim=can_trim)


def _doubtful(answer: LookupResult) -> bool:
    return any(trust.state is not StreamState.SYNCED for trust in answer.trust)


def _left_s(until_s: float) -> float:
    return max(0.0, until_s - time.monotonic())


def _rows(memory: Any, positions: Positions) -> Any:
    """The blocks at these positions: one view where they lie side by side, else one each."""
    first, last = int(positions[0]), int(positions[-1])
    if last - first + 1 == len(positions):
        return memory[first : last + 1]
    return [memory[position] for position in positions.tolist()]
