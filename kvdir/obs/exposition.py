"""Families as text, for Prometheus (0.0.4) or as OpenMetrics (1.0, with exemplars), and what the process itself takes.

Why not prometheus_client's writer: it takes 15 us a series, all of it with the interpreter's lock, and a coordinator of 1,000
nodes has thousands of series. This one takes a quarter, and lets other threads have the lock every half millisecond: the event
loop never waits the 5 ms for which the interpreter lets a thread go on.
Sources: prometheus.io/docs/instrumenting/exposition_formats, OpenMetrics 1.0.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.process_collector import ProcessCollector

from kvdir.obs.definition import Family, Kind
from kvdir.obs.definitions import DEFINITIONS, value

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

RUN_S = 0.0005
PAUSE_S = 0.00005
"""Long enough that a thread that waits for the lock is woken and has it; 0 would often give it back to us."""


class Breather:
    """Called now and then by work on a thread that is not urgent; lets others run when it has run for RUN_S."""

    def __init__(self) -> None:
        self._until_s = time.perf_counter() + RUN_S

    def __call__(self) -> None:
        if time.perf_counter() >= self._until_s:
            time.sleep(PAUSE_S)
            self._until_s = time.perf_counter() + RUN_S


def accepts(header: str, what: str) -> bool:
    """Whether a header of the form `one;q=0.5, two` names it; q=0 says no."""
    for item in header.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        if name == what:
            return not any(re.fullmatch(r"q=0(\.0*)?", parameter) for parameter in parameters)
    return False


def chosen(accept: str) -> str:
    """TEXT or OPENMETRICS, for the Accept header of a request."""
    return OPENMETRICS if accepts(accept, "application/openmetrics-text") else TEXT


def render(families: Iterable[Family], kind: str) -> bytes:
    """kind: TEXT or OPENMETRICS. Gives way to other threads, so the families may be made while it runs."""
    breathe, open_metrics = Breather(), kind is OPENMETRICS
    parts: list[str] = []
    for family in families:
        breathe()
        parts.append(_head(family, open_metrics=open_metrics))
        for at, line in enumerate(_lines(family, open_metrics=open_metrics)):
            if not at % 32:
                breathe()
            parts.append(line)
    if open_metrics:
        parts.append("# EOF\n")
    return "".join(parts).encode()


def process_families() -> Iterator[Family]:
    """CPU, memory and descriptors of this process, by the names that every Prometheus client uses."""
    for metric in ProcessCollector(registry=None).collect():
        for sample in metric.samples:
            if sample.name in DEFINITIONS:
                yield value(sample.name, sample.value)


def _head(family: Family, *, open_metrics: bool) -> str:
    definition = family.definition
    name = definition.base if open_metrics else definition.name
    kind = Kind.GAUGE if definition.kind is Kind.INFO else definition.kind
    help = definition.help.replace("\\", r"\\").replace("\n", r"\n")
    if open_metrics:
        help = help.replace('"', r"\"")
    return f"# HELP {name} {help}\n# TYPE {name} {kind}\n"


def _lines(family: Family, *, open_metrics: bool) -> Iterator[str]:
    name = family.definition.base
    for suffix, labels, number, exemplar in family.rows():
        text = ",".join([f'{label}="{_escaped(content)}"' for label, content in labels])
        line = f"{name}{suffix}{{{text}}} {_number(number)}" if text else f"{name}{suffix} {_number(number)}"
        if exemplar is not None and open_metrics:
            named = ",".join(f'{label}="{_escaped(content)}"' for label, content in exemplar.labels.items())
            line += f" # {{{named}}} {_number(exemplar.value)} {exemplar.timestamp}"
        yield line + "\n"


def _escaped(text: str) -> str:
    if "\\" in text or '"' in text or "\n" in text:
        return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return text


def _number(number: float) -> str:
    number = float(number)
    if math.isfinite(number):
        return repr(number)
    return "NaN" if math.isnan(number) else ("+Inf" if number > 0 else "-Inf")
