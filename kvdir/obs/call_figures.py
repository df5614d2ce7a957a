"""What is counted of every RPC method: calls by code, their time, how many run. Plain ints; a collector reads them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 10.0)


@dataclass(slots=True)
class MethodFigures:
    """One RPC method: calls that ended by code, their time, and how many run now."""

    running: int = 0
    by_code: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))


class CallFigures:
    """rpc.interceptors.CallObserver that counts. Methods are those a server has, so labels are bounded."""

    def __init__(self) -> None:
        self.methods: dict[str, MethodFigures] = {}

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
        figures.buckets[bisect.bisect_left(BUCKETS_S, seconds)] += 1

    def families(self, prefix: str, beside: Iterable[Mapping[str, MethodFigures]] = ()) -> Iterator[Metric]:
        """The metric families of all methods; beside: of other processes, added."""
        running = GaugeMetricFamily(f"{prefix}_rpc_running", "Calls under way, by method.", labels=["method"])
        calls = CounterMetricFamily(f"{prefix}_rpc_calls", "Calls ended, by method and gRPC code.", labels=["method", "code"])
        time_s = HistogramMetricFamily(
            f"{prefix}_rpc_duration_seconds", "From the call's arrival in Python to its end.", labels=["method"]
        )
        for method, figures in summed((self.methods, *beside)).items():
            running.add_metric([method], figures.running)
            for code, count in figures.by_code.items():
                calls.add_metric([method, code], count)
            total, buckets = 0, []
            for bound, count in zip([*map(str, BUCKETS_S), "+Inf"], figures.buckets, strict=True):
                total += count
                buckets.append((bound, total))
            time_s.add_metric([method], buckets, figures.seconds)
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
            for code, count in tuple(figures.by_code.items()):
                sums.by_code[code] = sums.by_code.get(code, 0) + count
    return out
