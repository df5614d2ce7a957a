"""Repair of one stream: replay first, then a snapshot; always with a deadline, never an endless loop.

    idle --tick--> replay --in order to the end--> idle
                     | deadline, or lost again     (fruitless or too many: go on with a snapshot)
                     v
                  snapshot --applied--> idle
                     | deadline, or contradicts itself: wait (interval doubles up to a limit), ask again

Invariant: at most one request is under way. Every request has a deadline that moves only with progress, and a snapshot also
has a total one. The owner is asked for ever, but ever less often, because giving up would mean staying untrusted for ever.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Ask(enum.Enum):
    """What to ask the owner for."""

    REPLAY = "replay"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True)
class RepairPolicy:
    """Limits of repair.

    idle_s: without progress for so long, a request has failed. total_s: a snapshot may take so long in all. max_replays:
    so many in a row, then a snapshot; max_fruitless: the same, of those that brought nothing. retry_*: wait after a failed
    snapshot. spacing_s: between two snapshots of one stream, so that an owner we do not understand costs little.
    """

    idle_s: float = 1.0
    total_s: float = 60.0
    max_replays: int = 32
    max_fruitless: int = 3
    retry_base_s: float = 0.25
    retry_max_s: float = 30.0
    spacing_s: float = 1.0


class Repair:
    """State of the repair of one stream; the cursor reports, `tick` decides."""

    __slots__ = (
        "_advanced",
        "_ask",
        "_deadline_s",
        "_failures",
        "_fruitless",
        "_lost_again",
        "_policy",
        "_retry_at_s",
        "_tries",
        "_until_s",
        "replays",
        "snapshots",
    )  # fmt: skip

    def __init__(self, policy: RepairPolicy) -> None:
        self._policy = policy
        self._ask: Ask | None = None
        self._advanced = self._lost_again = False
        self._deadline_s = self._until_s = 0.0
        self._tries = self._fruitless = self._failures = 0
        self._retry_at_s = 0.0
        self.replays = 0
        self.snapshots = 0

    @property
    def running(self) -> bool:
        return self._ask is not None

    @property
    def running_snapshot(self) -> bool:
        return self._ask is Ask.SNAPSHOT

    @property
    def words(self) -> str:
        return f"{self._ask.value} under way" if self._ask else ""

    def progress(self, now_s: float) -> None:
        """The next event in order, or the next chunk, has arrived."""
        self._advanced = True
        self._deadline_s = now_s + self._policy.idle_s

    def out_of_order(self) -> None:
        """A batch beyond the next one. Once the owner has gone back, that means: the replay lost something, too."""
        self._lost_again = self._ask is Ask.REPLAY and self._advanced

    def replay_failed(self) -> None:
        """The owner cannot go back that far."""
        if self._ask is Ask.REPLAY:
            self._ask = None
        self._fruitless = self._policy.max_fruitless

    def snapshot_failed(self, now_s: float) -> None:
        self._ask = None
        wait_s = min(self._policy.retry_base_s * 2**self._failures, self._policy.retry_max_s)
        self._failures = min(self._failures + 1, 30)
        self._retry_at_s = now_s + wait_s

    def snapshot_succeeded(self, now_s: float) -> None:
        self._ask = None
        self._tries = self._fruitless = self._failures = 0
        self._retry_at_s = now_s + self._policy.spacing_s

    def abort(self) -> None:
        """The call ended, or the stream is fenced."""
        self._ask = None

    def resume(self, now_s: float) -> None:
        """A call begins and the owner goes back to the next number by itself: as good as a replay asked for."""
        self._begin(Ask.REPLAY, now_s)

    def caught_up(self) -> None:
        """Nothing is missing. A snapshot that somebody wanted all the same goes on."""
        if self._ask is Ask.REPLAY:
            self._ask = None
        self._tries = self._fruitless = 0

    def tick(self, now_s: float, *, only_snapshot: bool, may_snapshot: bool) -> Ask | None:
        """What to ask for now. may_snapshot: whether the coordinator has room for one more."""
        match self._ask:
            case Ask.REPLAY if only_snapshot or self._lost_again or now_s >= self._deadline_s:
                self._ask = None
                self._fruitless = 0 if self._advanced else self._fruitless + 1
            case Ask.SNAPSHOT if now_s >= min(self._deadline_s, self._until_s):
                self.snapshot_failed(now_s)
        if self._ask is not None:
            return None
        if not only_snapshot and self._tries < self._policy.max_replays and self._fruitless < self._policy.max_fruitless:
            self._tries += 1
            self.replays += 1
            return self._begin(Ask.REPLAY, now_s)
        if not may_snapshot or now_s < self._retry_at_s:
            return None
        self.snapshots += 1
        return self._begin(Ask.SNAPSHOT, now_s)

    def _begin(self, ask: Ask, now_s: float) -> Ask:
        self._ask = ask
        self._advanced = self._lost_again = False
        self._deadline_s = now_s + self._policy.idle_s
        self._until_s = now_s + self._policy.total_s
        return ask
