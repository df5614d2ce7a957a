"""What reads and locks have taught about each peer: latency, bandwidth, and how far beyond the prediction is unusual.

    took = latency_s + (queued_bytes + size_bytes) / bytes_per_s          (queued_bytes: other reads in flight at the peer)

Rules:
- Latency and bandwidth are the weighted least squares line through what was observed (x: bytes, own and queued before it;
  y: seconds). Weights fall with x, so that a large read's noise does not drown what small reads say about latency.
- Every plane has a prior: two constant pseudo-observations. Real ones fade, by count and by time, so a peer nobody has read
  from for minutes is an unmeasured one again, and gets a try although it was slow once.
- One outlier is clipped; two in a row on the same side are a new regime and count whole.
- A read that was given up is observed too (`complete=False`: it would have taken at least so long).

Bounded: at most `max_peers` peers, the one observed longest ago is forgotten first. Pure: time comes in as `now_s`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HALF_LIFE_S = 15.0
"""Of what was observed, while nothing new is."""

MEMORY = 0.9
"""Weight that an observation keeps when the next one comes: about the last ten count."""

CLIP_RATIO = 4.0
"""A single observation this far from its prediction is clipped to it."""

PRIOR_WEIGHT = 0.1
"""Of the pseudo-observations, in units of one real one."""

OVERDUE_QUANTILE = 0.99
OVERDUE_PRIOR = 4.0
OVERDUE_LIMITS = (1.5, 8.0)
"""`overdue_ratio` while little is known, and the bounds that it never leaves."""

MIN_LATENCY_S = 1e-5
MIN_S_PER_BYTE = 1 / 400e9
ROUND_TRIP_PRIOR_S = 1e-3
ROUND_TRIP_WEIGHT = 1 / 8  # of the newest, as TCP's smoothed round trip (RFC 6298)

_KNEE_BYTES = 256 << 10
_PRIOR_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class PathFigures:
    """How long reads over one path (peer, plane) take. overdue_ratio: the 99th percentile of took / predicted.

    reads: weight of what was observed, 0 when all of it is the plane's prior.
    """

    latency_s: float
    bytes_per_s: float
    round_trip_s: float = ROUND_TRIP_PRIOR_S
    overdue_ratio: float = OVERDUE_PRIOR
    reads: float = 0.0

    def took_s(self, size_bytes: int, *, queued_bytes: int = 0) -> float:
        """Predicted duration of a read behind queued_bytes of others at the same peer."""
        return self.latency_s + (queued_bytes + size_bytes) / self.bytes_per_s


PRIORS = {
    "shm": PathFigures(latency_s=2e-4, bytes_per_s=5e9),
    "tcp": PathFigures(latency_s=5e-4, bytes_per_s=1e9),
    "ucx": PathFigures(latency_s=2e-4, bytes_per_s=8e9),
    "nixl": PathFigures(latency_s=3e-4, bytes_per_s=8e9),
}
"""By plane name. Orders of magnitude: they only have to be near enough for a first try to be made and measured."""

UNKNOWN = PRIORS["tcp"]
"""Of a peer whose plane is not known yet, or not in PRIORS."""


class Figures:
    """All peers of one agent, by name. See the module docstring."""

    def __init__(self, *, max_peers: int = 4096) -> None:
        self._peers: dict[str, _PeerHistory] = {}
        self._max_peers = max_peers

    def observe(
        self,
        peer: str,
        plane: str,
        *,
        size_bytes: int,
        took_s: float,
        queued_bytes: int,
        now_s: float,
        complete: bool = True,
    ) -> float:
        """Learns from one read; returns the prediction error took / predicted.

        took_s: from when it was let fly (`Schedule.ask`) to its end. queued_bytes: other reads in flight at the peer, the mean
        of then and now: right on average where a peer serves one after another, and where it serves all at once.
        """
        return self._history(peer).path(plane).observe(queued_bytes + size_bytes, took_s, now_s, complete=complete)

    def observe_lock(self, peer: str, *, took_s: float, now_s: float) -> None:
        """Learns from one round trip that moved no blocks."""
        self._history(peer).round_trip.observe(took_s, now_s)

    def estimate(self, peer: str, plane: str, *, now_s: float) -> PathFigures:
        """What is believed now; the plane's prior where nothing was observed. plane: "" when not known yet."""
        history = self._peers.get(peer)
        if history is None:
            return PRIORS.get(plane, UNKNOWN)
        return history.path(plane).estimate(now_s, round_trip_s=history.round_trip.estimate(now_s))

    def forget(self, peer: str) -> None:
        """The peer restarted or left: what was observed says nothing about its successor."""
        self._peers.pop(peer, None)

    def __len__(self) -> int:
        return len(self._peers)

    def _history(self, peer: str) -> _PeerHistory:
        history = self._peers.pop(peer, None) or _PeerHistory()
        self._peers[peer] = history  # the dict is ordered by the last observation
        if len(self._peers) > self._max_peers:
            del self._peers[next(iter(self._peers))]
        return history


class _PeerHistory:
    def __init__(self) -> None:
        self.round_trip = _RoundTrip()
        self._paths: dict[str, _Line] = {}

    def path(self, plane: str) -> _Line:
        line = self._paths.get(plane)
        if line is None:
            line = self._paths[plane] = _Line(PRIORS.get(plane, UNKNOWN))
        return line


class _RoundTrip:
    """Moving average that falls back to the prior while nothing is observed."""

    def __init__(self) -> None:
        self._value_s: float | None = None
        self._at_s = 0.0

    def observe(self, took_s: float, now_s: float) -> None:
        known = self._value_s
        self._value_s = took_s if known is None else known + ROUND_TRIP_WEIGHT * (took_s - known)
        self._at_s = now_s

    def estimate(self, now_s: float) -> float:
        if self._value_s is None:
            return ROUND_TRIP_PRIOR_S
        return ROUND_TRIP_PRIOR_S + (self._value_s - ROUND_TRIP_PRIOR_S) * _faded(now_s - self._at_s)


class _Line:
    """Moments of the weighted observations of one path, and the spread of took / predicted."""

    __slots__ = ("_at_s", "_outlier", "_prior", "_spread", "_sums")

    def __init__(self, prior: PathFigures) -> None:
        self._prior = prior
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # of w, w x, w y, w x x, w x y, and of 1 (the plain count)
        self._at_s = 0.0
        self._outlier = 0  # side of the last observation: -1 far below, 1 far above its prediction
        self._spread = _Spread()

    def observe(self, x_bytes: int, took_s: float, now_s: float, *, complete: bool) -> float:
        predicted_s = self.estimate(now_s, round_trip_s=0.0).took_s(x_bytes)
        ratio = took_s / predicted_s
        if not complete and ratio <= 1:
            return ratio  # given up before it was due: says nothing
        side = (ratio > CLIP_RATIO) - (ratio < 1 / CLIP_RATIO)
        if side and side != self._outlier and self._sums[5] >= 1:
            took_s = predicted_s * CLIP_RATIO**side
        self._outlier = side
        self._spread.add(ratio)
        keep = MEMORY * _faded(now_s - self._at_s)
        new = _moments(x_bytes, took_s, 1.0)
        self._sums = tuple(keep * old + item for old, item in zip(self._sums, new, strict=True))  # type: ignore[assignment]
        self._at_s = now_s
        return ratio

    def estimate(self, now_s: float, *, round_trip_s: float) -> PathFigures:
        keep, prior = _faded(now_s - self._at_s), self._prior
        near = _moments(0, prior.latency_s, PRIOR_WEIGHT)
        far = _moments(_PRIOR_BYTES, prior.took_s(_PRIOR_BYTES), PRIOR_WEIGHT)
        w, wx, wy, wxx, wxy, count = (keep * s + a + b for s, a, b in zip(self._sums, near, far, strict=True))
        slope = (w * wxy - wx * wy) / (w * wxx - wx * wx)  # the two prior points keep the determinant above zero
        latency_s = (wy - slope * wx) / w
        if latency_s < MIN_LATENCY_S:
            latency_s = MIN_LATENCY_S
            slope = (wxy - latency_s * wx) / wxx
        elif slope < MIN_S_PER_BYTE:
            slope = MIN_S_PER_BYTE
            latency_s = max(MIN_LATENCY_S, (wy - slope * wx) / w)
        return PathFigures(
            latency_s=latency_s,
            bytes_per_s=1 / max(slope, MIN_S_PER_BYTE),
            round_trip_s=round_trip_s,
            overdue_ratio=self._spread.overdue_ratio,
            reads=count - 2 * PRIOR_WEIGHT,
        )


class _Spread:
    """Fading histogram of took / predicted in quarter octaves, from 1/16 to 256."""

    __slots__ = ("_counts", "overdue_ratio")

    def __init__(self) -> None:
        self._counts = [0.0] * 49
        self.overdue_ratio = OVERDUE_PRIOR

    def add(self, ratio: float) -> None:
        at = min(max(round(4 * math.log2(max(ratio, 1e-9))) + 16, 0), 48)
        self._counts = [0.99 * count for count in self._counts]  # about the last hundred count
        self._counts[at] += 1
        tail = (1 - OVERDUE_QUANTILE) * (sum(self._counts) + 0.5)
        counts = list(self._counts)
        counts[24] += 0.5  # half an observation at OVERDUE_PRIOR: rules while fewer than fifty others are known
        at = 48
        while counts[at] <= tail:
            tail -= counts[at]
            at -= 1
        self.overdue_ratio = min(max(2 ** ((at - 16) / 4), OVERDUE_LIMITS[0]), OVERDUE_LIMITS[1])


def _moments(x: float, y: float, weight: float) -> tuple[float, float, float, float, float, float]:
    w = weight * (_KNEE_BYTES / (x + _KNEE_BYTES)) ** 2
    return w, w * x, w * y, w * x * x, w * x * y, weight


def _faded(age_s: float) -> float:
    return float(0.5 ** (max(0.0, age_s) / HALF_LIFE_S))
