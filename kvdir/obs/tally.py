"""Figures of a daemon's parts that have no collector of their own: TLS, policy, limits, capabilities, logs, spans, the process.

Rules: only metrics that definitions.py declares for it, each exposed from the start; cheap enough for whatever happens at most
some thousand times a second (a lookup of a dict and an addition; hot paths count in plain ints of their own). Any thread may
add: a count that two threads make at the same instant may be lost, none is ever invented.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

from kvdir.obs.definition import Family, Histogram, Kind
from kvdir.obs.definitions import DEFINITIONS, family, tallied


class Tally:
    """prefix: "kvdir" or "peer_agent"; names are given without it."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._counts: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in tallied(prefix)}
        self._reads: list[tuple[str, tuple[str, ...], Callable[[], float]]] = []
        self._buckets = {
            name: Histogram(DEFINITIONS[name].buckets) for name in self._counts if DEFINITIONS[name].kind is Kind.HISTOGRAM
        }

    def add(self, name: str, *labels: str, amount: float = 1) -> None:
        """One more. Raises KeyError for a metric that is not declared."""
        counts = self._counts[f"{self._prefix}_{name}"]
        counts[labels] = counts.get(labels, 0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """A gauge, or an info (1)."""
        self._counts[f"{self._prefix}_{name}"][labels] = value

    def watch(self, name: str, read: Callable[[], float], *labels: str) -> None:
        """Asked at every scrape, on the scraper's thread: it reads plain values only. Several for one series add up."""
        full = f"{self._prefix}_{name}"
        if full not in self._counts:
            raise KeyError(full)
        self._reads.append((full, labels, read))

    def say_build(self, version: str, protocol: int, *who: str) -> None:
        """What runs, as build_info. who: an agent's node."""
        self.set("build_info", 1, version, platform.python_version(), str(protocol), *who)

    def observe(self, name: str, value: float) -> None:
        """Into a histogram without labels."""
        self._buckets[f"{self._prefix}_{name}"].add(value)

    def families(self) -> Iterator[Family]:
        """One for every metric that it may have."""
        for name, counts in self._counts.items():
            out = family(name)
            if name in self._buckets:
                out.add_buckets(self._buckets[name])
            for labels, count in tuple(counts.items()):
                out.add(count, *labels)
            for watched, labels, read in tuple(self._reads):
                if watched == name:
                    out.add(read(), *labels)
            yield out
