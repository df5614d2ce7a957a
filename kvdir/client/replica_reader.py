"""Lookups in the region of this host: opened when it is there, opened again when it was replaced, and left when it is dead.

Rules:
- whatever is wrong with the region (none, another version, its writer dead, too far behind, a namespace that is not
  in it) is an answer with source "none" and the reason; nothing raises, nothing waits;
- what could not be read because the writer was at it is a miss, and the answer says that it is not whole;
- while there is none, it is looked for at most every OPEN_EVERY_S, so that a missing agent costs a lookup next to nothing;
- a region is let go when the last lookup that uses it has ended, never under one: nobody closes it.
Thread-safe: what is kept changes in single steps. After a fork the child goes on with the same mapping, which is read-only.
"""

from __future__ import annotations

import glob
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvdir.core.answer import Lookup, LookupMode
from kvdir.core.region_directory import RegionDirectory
from kvdir.core.roster import Beat
from kvdir.errors import KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.index import BlockReader, RegionReader
from kvdir.location import MinTrust

OPEN_EVERY_S = 0.25
DEAD_AFTER_S = 2.0
"""Without a beat for so long, the writer is taken for dead; one that lives beats many times a second."""

TORN = "its writer was changing some of these entries all the while, so they are misses here"
DEFAULT_PLACE = "/dev/shm/kvdir-*.replica"
"""Where agents put the region of their node unless they are told otherwise."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """reason: why lookups are not answered from it; empty when they are (if lag_s is not too much for whoever asks).

    beat: what its writer said last; without one, lag_s and silent_s are infinite.
    """

    path: str
    usable: bool
    reason: str
    beat: Beat | None
    lag_s: float
    silent_s: float


class ReplicaReader:
    """path: of the region; None: the only one in the default place, whenever there is exactly one; "": none is known yet.

    max_lag_s: answers that may be further behind are not given. dead_after_s: see DEAD_AFTER_S.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        max_lag_s: float = math.inf,
        dead_after_s: float = DEAD_AFTER_S,
        open_region: Callable[[str], BlockReader] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.path = path
        self._max_lag_s = max_lag_s
        self._dead_after_ns = round(dead_after_s * 1e9)
        self._open_region = open_region or _open_region
        self._clock_ns = clock_ns
        self._opened: tuple[str | None, RegionDirectory] | None = None
        """Under which path; of another one than `path` it is of no use."""
        self._reason = "it was not opened yet"
        self._next_open_ns = 0

    def lookup(
        self,
        namespace_digest: bytes,
        fingerprints: Fingerprints,
        *,
        mode: LookupMode = LookupMode.SPARSE,
        min_trust: MinTrust = MinTrust.ANY,
        max_lag_s: float | None = None,
    ) -> Lookup:
        """Who is said to hold which of the blocks; source "replica", or "none" with the reason. Microseconds.

        With source "replica" and a reason the answer is true and not whole: see TORN. max_lag_s: another one, for this lookup.
        """
        now_ns = self._clock_ns()
        region, beat = self._current(now_ns)
        if region is None or beat is None or self._dead(beat, now_ns):
            return self._nobody(fingerprints, self._why_not(region, beat, now_ns))
        scope = region.scope(namespace_digest, now_ns)
        if scope is None:
            return self._nobody(fingerprints, f"namespace {namespace_digest.hex()[:16] or '(empty)'} is not in it")
        prefix = mode is LookupMode.PREFIX
        answer, torn = region.lookup(scope, fingerprints, beat=beat, now_ns=now_ns, prefix=prefix, min_trust=min_trust)
        if answer.lag_s > (self._max_lag_s if max_lag_s is None else max_lag_s):
            return self._nobody(fingerprints, f"it may be {answer.lag_s:.1f} s behind, more than was allowed")
        return replace(answer, incomplete=True, reason=self._named(TORN)) if torn else answer

    def move(self, path: str) -> None:
        """From now on the region is looked for here; "": nowhere."""
        if path != self.path:
            self.path, self._next_open_ns = path, 0

    def status(self) -> ReplicaStatus:
        """As a lookup would find it now."""
        now_ns = self._clock_ns()
        region, beat = self._current(now_ns)
        reason = self._why_not(region, beat, now_ns)
        lag_s, silent_s = (beat.lag_s(now_ns), beat.silent_s(now_ns)) if beat is not None else (math.inf, math.inf)
        return ReplicaStatus(self.path or DEFAULT_PLACE, not reason, reason, beat, lag_s, silent_s)

    def region(self) -> RegionDirectory | None:
        """What is open now, alive or not; for tools."""
        return self._current(self._clock_ns())[0]

    def _current(self, now_ns: int) -> tuple[RegionDirectory | None, Beat | None]:
        """What is open, and what its writer said last; looked for anew when it is of no use any more."""
        opened = self._opened
        region = opened[1] if opened is not None and opened[0] == self.path else None
        beat = None if region is None else region.beat()
        if region is None or beat is None or region.stale or self._dead(beat, now_ns):
            return self._look_again(region, beat, now_ns)
        return region, beat

    def _look_again(
        self, region: RegionDirectory | None, beat: Beat | None, now_ns: int
    ) -> tuple[RegionDirectory | None, Beat | None]:
        if now_ns < self._next_open_ns:
            return region, beat
        path, self._next_open_ns = self.path, now_ns + round(OPEN_EVERY_S * 1e9)
        try:
            region = RegionDirectory(self._open(path))
        except (KvdirError, OSError, ValueError) as error:
            self._opened, self._reason = None, str(error)
            return None, None
        self._opened = path, region
        return region, region.beat()

    def _open(self, path: str | None) -> BlockReader:
        if path == "":
            raise FileNotFoundError("no agent has said where one is")
        return self._open_region(find_region() if path is None else path)

    def _dead(self, beat: Beat, now_ns: int) -> bool:
        return now_ns - beat.beat_ns > self._dead_after_ns

    def _why_not(self, region: RegionDirectory | None, beat: Beat | None, now_ns: int) -> str:
        if region is None:
            return self._reason
        if beat is None:
            return "its writer has not said yet how current it is: it has no whole copy, and its log says why"
        if self._dead(beat, now_ns):
            return f"its writer (process {beat.pid}) has not been heard for {beat.silent_s(now_ns):.1f} s: does the agent run?"
        return ""

    def _nobody(self, fingerprints: Fingerprints, why: str) -> Lookup:
        return nobody(len(fingerprints), self._named(why))

    def _named(self, why: str) -> str:
        return f"replica{' ' if self.path else ''}{self.path or ''}: {why}"


def nobody(asked: int, reason: str) -> Lookup:
    """The answer when there is none: no hits."""
    return Lookup(b"", (), (), 0, asked, source="none", reason=reason)


def find_region() -> str:
    """The only region in the default place. FileNotFoundError when there is none or more than one, naming them."""
    found = sorted(glob.glob(DEFAULT_PLACE))
    if len(found) == 1:
        return found[0]
    if not found:
        raise FileNotFoundError(
            f"no region matches {DEFAULT_PLACE}: does an agent that keeps a replica run here, and is its /dev/shm ours?"
        )
    raise FileNotFoundError(f"{len(found)} regions here, name one (`kvdir replica PATH` says which lives): {', '.join(found)}")


def _open_region(path: str) -> BlockReader:
    return RegionReader(path)
