"""What a metric is, and the family that a scrape makes of it. The table of all metrics is definitions.py.

Rules: a label has a bound, and the family keeps it, whatever it is given: values beyond the bound go into one series, `other`.
Not those of counters whose labels come and go: such a sum falls when one leaves it, and Prometheus takes what is left for new.
A family whose labels all have known values starts with all of them at 0, so that a rate over it is never absent.
Does not: count (plain ints elsewhere do), or write the text (exposition.py).
"""

from __future__ import annotations

import enum
import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.core import Metric
from prometheus_client.samples import Exemplar, Sample

from kvdir.obs.trace import current_exemplar

OTHER = "other"


class Kind(enum.StrEnum):
    """As Prometheus names them; INFO is a gauge that is always 1."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Exposer(enum.Enum):
    """Who has a metric."""

    COORDINATOR = "coordinator"
    STORE = "coordinator on a shared store"
    AGENT = "agent"


class Fold(enum.Enum):
    """What `other` says of the series that it stands for."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Label:
    """values: all there are, if that is known; else at most `bound`, which `why` explains.

    comes_and_goes: which of them have series of their own changes, or what has one may begin anew.
    """

    name: str
    values: tuple[str, ...] = ()
    bound: int = 0
    why: str = ""
    comes_and_goes: bool = False

    @property
    def at_most(self) -> int:
        """Values, `other` included where there can be one."""
        return len(self.values) or self.bound + 1


@dataclass(frozen=True, slots=True)
class Definition:
    """name: as exposed, with `_total`. help: one sentence. buckets: upper bounds, ascending, without +Inf.

    at_most: series beside `other`, where fewer than the product of the labels' bounds are enough.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    fold: Fold = Fold.SUM
    at_most: int = 0

    @property
    def base(self) -> str:
        """The name of the family: that of a counter or an info has no suffix."""
        return self.name.removesuffix("_total") if self.kind is Kind.COUNTER else self.name

    @property
    def has_other(self) -> bool:
        """Whether what is beyond the bounds is summed up. See the module docstring."""
        return self.kind is not Kind.COUNTER or not any(label.comes_and_goes for label in self.labels)

    @property
    def series_at_most(self) -> int:
        children = math.prod(label.at_most for label in self.labels)
        per_child = len(self.buckets) + 3 if self.kind is Kind.HISTOGRAM else 1
        return per_child * (min(children, self.at_most + 1) if self.at_most else children)


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics that answer one question. when: what has to be on for them; "": always there.

    dashboard: the one that draws them.
    """

    title: str
    question: str
    dashboard: str
    exposers: frozenset[Exposer]
    metrics: tuple[Definition, ...]
    when: str = ""


def _metric(kind: Kind, name: str, help: str, *labels: Label, fold: Fold = Fold.SUM, at_most: int = 0) -> Definition:
    return Definition(name, kind, help, labels, fold=fold, at_most=at_most)


def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: Label) -> Definition:
    return Definition(name, Kind.HISTOGRAM, help, labels, buckets)


counter, gauge, info = (partial(_metric, kind) for kind in (Kind.COUNTER, Kind.GAUGE, Kind.INFO))


def group(
    title: str, question: str, dashboard: str, exposers: frozenset[Exposer], *metrics: Definition, when: str = ""
) -> Group:
    return Group(title, question, dashboard, exposers, metrics, when)


Observed = tuple[dict[str, str], float, float]
"""An exemplar: (labels that name a trace, value, unix seconds)."""


@dataclass(slots=True)
class Buckets:
    """A histogram that is cheap enough for hot paths: not cumulated counts, one more than bounds, and the sum of what was seen.

    exemplars: by bucket, the newest that came with a trace.
    """

    counts: list[int]
    sum: float = 0.0
    exemplars: dict[int, Observed] = field(default_factory=dict)


class Histogram(Buckets):
    """Buckets with their bounds, for whoever is called some thousand times a second at most."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        super().__init__([0] * (len(bounds) + 1))
        self._bounds = bounds

    def add(self, value: float, count: int = 1) -> None:
        """`count` observations of the same value."""
        at = bisect_left(self._bounds, value)
        self.counts[at] += count
        self.sum += value * count
        if (labels := current_exemplar()) is not None:
            self.exemplars[at] = (labels, value, time.time())


class Family(Metric):
    """Samples of one metric, as of one scrape. Keeps the bounds of its labels; see the module docstring."""

    def __init__(self, definition: Definition) -> None:
        kind = Kind.GAUGE if definition.kind is Kind.INFO else definition.kind
        super().__init__(definition.base, definition.help, kind.value)
        self.definition = definition
        self.values: dict[tuple[str, ...], float] = {}
        self.histograms: dict[tuple[str, ...], Buckets] = {}
        self._seen = tuple((set(label.values), 0 if label.values else label.bound) for label in definition.labels)
        if definition.kind is not Kind.INFO and all(label.values for label in definition.labels):
            for labels in itertools.product(*(label.values for label in definition.labels)):
                self._start(labels)

    def add(self, value: float, *labels: str) -> Family:
        """One series; what is added to one that is there already is folded into it."""
        if labels not in self.values:
            bounded = self._bounded(labels)
            if bounded != labels and not self.definition.has_other:
                return self
            labels = bounded
        known = self.values.get(labels)
        self.values[labels] = value if known is None else self._folded(known, value)
        return self

    def add_buckets(self, buckets: Buckets, *labels: str) -> Family:
        """One histogram; copied, so that whoever counts may go on."""
        labels = self._bounded(labels)
        known = self.histograms.get(labels)
        counts = list(buckets.counts)
        if known is not None:
            counts = [mine + more for mine, more in zip(known.counts, counts, strict=True)]
        exemplars = dict(buckets.exemplars) if known is None else known.exemplars | buckets.exemplars
        self.histograms[labels] = Buckets(counts, buckets.sum + (known.sum if known is not None else 0.0), exemplars)
        return self

    def _start(self, labels: tuple[str, ...]) -> None:
        if self.definition.kind is Kind.HISTOGRAM:
            self.histograms[labels] = Buckets([0] * (len(self.definition.buckets) + 1))
        else:
            self.values[labels] = 0.0

    def _folded(self, known: float, value: float) -> float:
        match self.definition.fold:
            case Fold.SUM:
                return known + value
            case Fold.MAX:
                return max(known, value)
            case Fold.MIN:
                return min(known, value)

    def _bounded(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """The labels, `other` in the place of each value that is beyond the bound of its label, or of all."""
        if len(labels) != len(self._seen):
            raise ValueError(f"{self.definition.name} has {len(self._seen)} labels, {len(labels)} were given")
        kept = []
        for text, (seen, bound) in zip(labels, self._seen, strict=True):
            if text not in seen:
                if len(seen) < bound:
                    seen.add(text)
                else:
                    text = OTHER
            kept.append(text)
        labels = tuple(kept)
        full = 0 < self.definition.at_most <= len(self.values)
        return labels if not full or labels in self.values else (OTHER,) * len(labels)

    def rows(self) -> Iterator[tuple[str, Sequence[tuple[str, str]], float, Exemplar | None]]:
        """(suffix, labels, value, exemplar) of every sample, in order."""
        names = [label.name for label in self.definition.labels]
        suffix = "_total" if self.definition.kind is Kind.COUNTER else ""
        for labels, value in self.values.items():
            yield suffix, tuple(zip(names, labels, strict=True)), value, None
        for labels, buckets in self.histograms.items():
            pairs = tuple(zip(names, labels, strict=True))
            total = 0
            for at, (bound, count) in enumerate(zip(_bounds(self.definition.buckets), buckets.counts, strict=True)):
                total += count
                known = buckets.exemplars.get(at)
                exemplar = Exemplar(*known) if known is not None else None
                yield "_bucket", (*pairs, ("le", bound)), total, exemplar
            yield "_count", pairs, total, None
            yield "_sum", pairs, buckets.sum, None

    @property
    def samples(self) -> list[Sample]:
        """As prometheus_client has them."""
        return [
            Sample(self.name + suffix, dict(labels), value, None, exemplar) for suffix, labels, value, exemplar in self.rows()
        ]

    @samples.setter
    def samples(self, _: Iterable[Sample]) -> None:
        """Its base class begins with an empty list."""


def _bounds(buckets: tuple[float, ...]) -> Iterator[str]:
    yield from map(repr, map(float, buckets))
    yield "+Inf"
