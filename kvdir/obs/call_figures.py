"""What is counted of every RPC method: calls by code, their time, how many run. Plain ints; a collector reads them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvdir.obs.definition import Buckets, Family, Observed
from kvdir.obs.definitions import family
from kvdir.obs.labels import CALL_BUCKETS_S
from kvdir.obs.trace import current_exemplar


@dataclass(slots=True)
class MethodFigures:
    """One RPC method: calls that ended by code, their time, and how many run now. exemplars: as those of Buckets."""

    running: int = 0
    by_code: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(CALL_BUCKETS_S) + 1))
    exemplars: dict[int, Observed] = field(default_factory=dict)


class CallFigures:
    """rpc.interceptors.CallObserver that counts. Methods are those a server has, so labels are bounded."""

    def __init__(self) -> None:
        self.methods: dict[str, MethodFigures] = {}
        self._exposed: dict[tuple[str, str], None] = {}

    def began(self, method: str) -> None:
        figures = self.methods.get(method)
        if figures is None:
            figures = self.methods[method] = MethodFigures()
        figures.running += 1

    def ended(self, method: str, code: str, seconds: float) -> None:
        figures = self.methods[method]
        figures.running -= 1
        figures.by_code[code] = figures.by_code.get(code, 0) + 1
        figures.seconds += seconds
        at = bisect_left(CALL_BUCKETS_S, seconds)
        figures.buckets[at] += 1
        if (trace := current_exemplar()) is not None:
            figures.exemplars[at] = (trace, seconds, time.time())

    def families(self, prefix: str, beside: Iterable[Mapping[str, MethodFigures]] = ()) -> Iterator[Family]:
        """The metric families of all methods; beside: of other processes, added."""
        running, calls = family(f"{prefix}_rpc_running"), family(f"{prefix}_rpc_calls_total")
        time_s = family(f"{prefix}_rpc_duration_seconds")
        counts: dict[tuple[str, str], int] = {}
        for method, figures in summed((self.methods, *beside)).items():
            running.add(figures.running, method)
            counts |= {(method, code): count for code, count in figures.by_code.items()}
            time_s.add_buckets(Buckets(figures.buckets, figures.seconds, figures.exemplars), method)
        self._exposed |= dict.fromkeys(counts)  # in the order of their first scrape: what has a series keeps it
        for pair in self._exposed:
            calls.add(counts.get(pair, 0), *pair)
        yield from (running, calls, time_s)


def summed(all_figures: Iterable[Mapping[str, MethodFigures]]) -> dict[str, MethodFigures]:
    """By method. Copies, so that whoever counts may go on."""
    out: dict[str, MethodFigures] = {}
    for methods in all_figures:
        for name, figures in tuple(methods.items()):
            sums = out.setdefault(name, MethodFigures())
            sums.running += figures.running
            sums.seconds += figures.seconds
            sums.buckets = [a + b for a, b in zip(sums.buckets, figures.buckets, strict=True)]
            sums.exemplars |= dict(figures.exemplars)
            for code, count in tuple(figures.by_code.items()):
                sums.by_code[code] = sums.by_code.get(code, 0) + count
    return out
