"""One question to several coordinators: whom to ask when, within one deadline. Pure; the aio and the sync client run it.

    ask the first ──answer──▶ done
        │ no answer within the patience, and a hedge is affordable (or the first has failed others meanwhile)
        ├─▶ ask the second, too; the answer that comes first is taken, and a first that was far slower is asked later now
        │ refused, or its share of the deadline is over, or it does not know the namespace
        └─▶ ask the next that was not asked

Rules: at most one extra question is under way, and only where asking twice does no harm (Call.hedged); an answer is taken
once. A coordinator that hangs is left by the end of its share, so the others get theirs. That a namespace is unknown is the
answer only if all say so: whoever gave none might know it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdir.client.addresses import Addresses
from kvdir.errors import DeadlineExceeded, KvdirError

PATIENCE_S = 0.05
PATIENCE_SHARE = 0.25
"""Of the deadline, if that is less: how long the first may take before a second is asked, too."""
FAR_SLOWER = 3.0


@dataclass(slots=True)
class RaceCounters:
    """Of one client. hedges: second questions beside one that was still under way. hedges_won: those that answered first.

    moved_on: questions to the next coordinator because one failed.
    """

    questions: int = 0
    hedges: int = 0
    hedges_won: int = 0
    moved_on: int = 0


class Race:
    """See the module docstring. `now_s` and `end_s`: monotonic seconds."""

    def __init__(
        self, addresses: Addresses, counters: RaceCounters, *, now_s: float, end_s: float, hedged: bool = False
    ) -> None:
        self._addresses = addresses
        self._counters = counters
        self._end_s = end_s
        self._left = addresses.order(now_s=now_s)
        self._began_s: dict[str, float] = {}
        self._under_way: list[str] = []
        self._hedge = ""
        self._failure: KvdirError | None = None
        self._unknown: KvdirError | None = None
        self._patience_s = min(PATIENCE_S, max(0.0, end_s - now_s) * PATIENCE_SHARE)
        self.hedged = hedged and len(self._left) > 1
        """Whether a second question may become due while the first is under way."""
        self._look_s = now_s
        counters.questions += 1
        if hedged:
            addresses.save()

    def begin(self, now_s: float) -> tuple[str, float] | None:
        """The next to ask, and until when it may take; None when nobody is left, or no time."""
        if not self._left or (self._began_s and now_s >= self._end_s):
            return None
        if self._under_way:
            self._hedge = self._left[0]
            self._counters.hedges += 1
        elif self._began_s:
            self._counters.moved_on += 1
        until_s = now_s + (self._end_s - now_s) / len(self._left)
        address = self._left.pop(0)
        self._began_s[address] = now_s
        self._look_s = now_s + self._patience_s
        self._under_way.append(address)
        return address, until_s

    def hedge_due(self, now_s: float) -> bool:
        """Whether to ask a second one although the first is still under way; if so, `begin` follows."""
        if not self._may_hedge or now_s < self._look_s:
            return False
        self._look_s = now_s + self._patience_s
        put_off = self._addresses.put_off
        if put_off(self._under_way[0], now_s=now_s) and not put_off(self._left[0], now_s=now_s):
            return True  # others have found out meanwhile: that is no hedge any more
        return self._addresses.spend()

    def wait_s(self, now_s: float) -> float | None:
        """How long to wait for an answer before `hedge_due` is worth asking; None: until there is one."""
        return max(0.0, self._look_s - now_s) if self._may_hedge else None

    def lost(self, address: str, now_s: float, error: KvdirError) -> None:
        """It gave no answer."""
        self._failure = error
        self._under_way.remove(address)
        self._addresses.failed(address, now_s=now_s)

    def knew_nothing(self, address: str, error: KvdirError) -> None:
        """It does not know what was asked about, which the next one may: it may have started a moment ago."""
        self._unknown = error
        self._under_way.remove(address)

    def won(self, address: str, now_s: float, *, warming: bool = False) -> None:
        """Its answer is taken. Who was asked far longer ago is asked later from now on, and so is one that still warms."""
        if warming:
            self._addresses.failed(address, now_s=now_s)
        else:
            self._addresses.answered(address)
        self._counters.hedges_won += address == self._hedge
        took_s = now_s - self._began_s[address]
        for other in self._under_way:
            waited_s = now_s - self._began_s[other]
            if waited_s > took_s:
                self._addresses.outpaced(other, far=waited_s >= FAR_SLOWER * took_s, now_s=now_s)

    @property
    def failure(self) -> KvdirError:
        """Of a race that nobody won."""
        return self._failure or self._unknown or DeadlineExceeded("no coordinator was asked: the deadline had passed")

    @property
    def _may_hedge(self) -> bool:
        return self.hedged and len(self._under_way) == 1 and not self._hedge and bool(self._left)
