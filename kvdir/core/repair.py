"""Repair of one stream: replay, then a sketch, then a snapshot; always with a deadline, never an endless loop.

    idle --tick--> replay --in order to the end--> idle
                     | deadline, or lost again     (fruitless or too many: go on)
                     v
                  sketch --difference applied--> idle
                     | deadline, does not decode, contradicts itself: once more with all its cells, then go on
                     v
                  snapshot --applied--> idle
                     | deadline, or contradicts itself: wait (interval doubles up to a limit), ask again

Invariant: at most one request is under way. Every request has a deadline that moves only with progress, and a snapshot also
has a total one. The owner is asked for ever, but ever less often, because giving up would mean staying untrusted for ever.
An owner whose figures disagree with what it has just restated waits twice as long every time.

How long to wait without progress is twice what the last answer took, between idle_s and idle_max_s, or an owner farther away
than idle_s would be given up on for ever. An answer that names its request counts also when it comes too late; one to a
replay names none, so it counts only if the replay before it was answered (Karn, Partridge, SIGCOMM 1987).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Ask(enum.Enum):
    """What to ask the owner for."""

    REPLAY = "replay"
    SKETCH = "sketch"
    SNAPSHOT = "snapshot"


class Chance(enum.Enum):
    """Whether a sketch is worth asking for: it cannot help; it might, but not now; it can."""

    USELESS = "useless"
    LATER = "later"
    NOW = "now"


@dataclass(slots=True)
class RepairTally:
    """Repairs of one kind, over all streams. bytes: of the content that came. seconds: of those that succeeded."""

    asked: int = 0
    done: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Tallies(dict[Ask, RepairTally]):
    """Of all streams of a directory. holes: seen in them, repaired or not."""

    holes = 0


def new_tallies() -> Tallies:
    return Tallies((ask, RepairTally()) for ask in Ask)


REMEMBERED_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class RepairPolicy:
    """Limits of repair.

    idle_s: without progress for so long, a request has failed; idle_max_s: the same, for owners that answer slowly.
    total_s: a snapshot may take so long in all. max_replays: so many in a row, then a sketch; max_fruitless: the same, of
    those that brought nothing. max_sketches: failed ones in a row, then a snapshot. retry_*: wait after a failed snapshot.
    spacing_s: between two absolute statements of one stream, so that an owner we do not understand costs little.
    """

    idle_s: float = 1.0
    idle_max_s: float = 10.0
    total_s: float = 60.0
    max_replays: int = 32
    max_fruitless: int = 3
    max_sketches: int = 2
    retry_base_s: float = 0.25
    retry_max_s: float = 30.0
    spacing_s: float = 1.0


class Repair:
    """State of the repair of one stream; the cursor reports, `tick` decides."""

    __slots__ = (
        "_advanced",
        "_ambiguous",
        "_ask",
        "_asked_s",
        "_began_s",
        "_deadline_s",
        "_disproved",
        "_failures",
        "_fruitless",
        "_lost_again",
        "_patience_s",
        "_policy",
        "_restated",
        "_retry_at_s",
        "_tries",
        "_until_s",
        "replays",
        "sketch_failures",
        "sketches",
        "snapshots",
        "tallies",
    )  # fmt: skip

    def __init__(self, policy: RepairPolicy, tallies: Tallies | None = None) -> None:
        self._policy = policy
        self.tallies = tallies if tallies is not None else new_tallies()
        self.sketch_failures = 0
        self._disproved = 0
        self._restated = False
        self._began_s = 0.0
        self._patience_s = policy.idle_s
        self._ambiguous = False  # what arrives now may answer a request before this one
        self._asked_s: dict[tuple[Ask, int], float] = {}
        self._ask: Ask | None = None
        self._advanced = self._lost_again = False
        self._deadline_s = self._until_s = 0.0
        self._tries = self._fruitless = self._failures = 0
        self._retry_at_s = 0.0
        self.replays = 0
        self.sketches = 0
        self.snapshots = 0

    @property
    def running(self) -> Ask | None:
        return self._ask

    @property
    def words(self) -> str:
        return f"{self._ask.value} under way" if self._ask else ""

    def progress(self, now_s: float) -> None:
        """The next event in order, or the next chunk, has arrived."""
        if self._ask is Ask.REPLAY and not self._advanced and not self._ambiguous:
            self._took(now_s - self._began_s)
        self._advanced = True
        self._deadline_s = now_s + self._patience_s

    def asked(self, ask: Ask, number: int, now_s: float) -> None:
        """The request that has just begun goes out under this number."""
        self._asked_s[ask, number] = now_s
        if len(self._asked_s) > REMEMBERED_REQUESTS:
            del self._asked_s[next(iter(self._asked_s))]

    def answered(self, ask: Ask, number: int, now_s: float) -> None:
        """The answer to that request begins to arrive, in time or too late."""
        asked_s = self._asked_s.pop((ask, number), None)
        if asked_s is not None:
            self._took(now_s - asked_s)

    def _took(self, seconds: float) -> None:
        self._patience_s = max(self._policy.idle_s, min(2 * seconds, self._policy.idle_max_s))

    def out_of_order(self) -> None:
        """A batch beyond the next one. Once the owner has gone back, that means: the replay lost something, too."""
        self._lost_again = self._ask is Ask.REPLAY and self._advanced

    def replay_failed(self) -> None:
        """The owner cannot go back that far."""
        if self._ask is Ask.REPLAY:
            self._failed()
        self._fruitless = self._policy.max_fruitless

    def sketch_failed(self) -> None:
        self.sketch_failures += 1
        self._failed()

    def snapshot_failed(self, now_s: float) -> None:
        self._failed()
        wait_s = min(self._policy.retry_base_s * 2**self._failures, self._policy.retry_max_s)
        self._failures = min(self._failures + 1, 30)
        self._retry_at_s = now_s + wait_s

    def restated(self, now_s: float) -> None:
        """The sketch or snapshot under way was applied."""
        self._done(now_s)
        self._tries = self._fruitless = self._failures = self.sketch_failures = 0
        self._restated = True
        self._retry_at_s = now_s + min(self._policy.spacing_s * 2**self._disproved, self._policy.retry_max_s)

    def contradicted(self) -> None:
        """The owner's figures differ from what we hold although nothing is missing."""
        if self._restated:  # and so from what it has just said itself
            self._disproved = min(self._disproved + 1, 30)
            self._restated = False

    def proved(self, now_s: float) -> None:
        """The owner's figures prove that we hold what it holds."""
        self._disproved = self.sketch_failures = 0
        self._restated = False
        if self._ask is Ask.SKETCH:
            self._done(now_s)

    def abort(self) -> None:
        """The call ended, or the stream is fenced. How long its answers took says nothing about the next one."""
        self._ask = None
        self._patience_s = self._policy.idle_s

    def resume(self, now_s: float) -> None:
        """A call begins and the owner goes back to the next number by itself: as good as a replay asked for."""
        self._begin(Ask.REPLAY, now_s)

    def caught_up(self, now_s: float) -> None:
        """Nothing is missing. A snapshot that somebody wanted all the same goes on."""
        if self._ask in (Ask.REPLAY, Ask.SKETCH):
            self._done(now_s)
        self._tries = self._fruitless = self.sketch_failures = 0

    def tick(self, now_s: float, *, absolute: bool, sketch: Chance, may_snapshot: bool) -> Ask | None:
        """What to ask for now. absolute: events sent again cannot help. may_snapshot: the coordinator has room for one more."""
        match self._ask:
            case Ask.REPLAY if absolute or self._lost_again or now_s >= self._deadline_s:
                self._failed()
                self._fruitless = 0 if self._advanced else self._fruitless + 1
            case Ask.SKETCH if now_s >= self._deadline_s:
                self.sketch_failed()
            case Ask.SNAPSHOT if now_s >= min(self._deadline_s, self._until_s):
                self.snapshot_failed(now_s)
        if self._ask is not None:
            return None
        if not absolute and self._tries < self._policy.max_replays and self._fruitless < self._policy.max_fruitless:
            self._tries += 1
            self.replays += 1
            return self._begin(Ask.REPLAY, now_s)
        if now_s < self._retry_at_s:
            return None
        if sketch is not Chance.USELESS and self.sketch_failures < self._policy.max_sketches:
            if sketch is Chance.LATER:
                return None
            self.sketches += 1
            return self._begin(Ask.SKETCH, now_s)
        if not may_snapshot:
            return None
        self.snapshots += 1
        return self._begin(Ask.SNAPSHOT, now_s)

    def _failed(self) -> None:
        if self._ask is not None:
            self.tallies[self._ask].failed += 1
            self._ambiguous = True
        self._ask = None

    def _done(self, now_s: float) -> None:
        if self._ask is not None:
            tally = self.tallies[self._ask]
            tally.done += 1
            self._ambiguous = False
            tally.seconds += now_s - self._began_s
        self._ask = None

    def _begin(self, ask: Ask, now_s: float) -> Ask:
        self._ask = ask
        self._began_s = now_s
        self.tallies[ask].asked += 1
        self._advanced = self._lost_again = False
        self._deadline_s = now_s + self._patience_s
        self._until_s = now_s + self._policy.total_s
        return ask
