"""What a Prometheus answers to the queries of a dashboard, as Grafana would ask them: variables put in, legends made.

Reads the JSON that Grafana reads, so that what is tested and drawn is what people see. Blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deploy.monitoring.grafana import Json
from kvdir.testing.prometheus_servers import Prometheus, Sample

ALL = ".*"
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What is looked at: unix seconds, the step of lines, and the window of rates."""

    start_s: float
    end_s: float
    step_s: float
    rate_s: float


@dataclass(frozen=True, slots=True)
class Series:
    """letter: of the query. legend: what Grafana writes beside the line."""

    letter: str
    legend: str
    sample: Sample


@dataclass(frozen=True, slots=True)
class Answered:
    """A panel and all it shows."""

    panel: Json
    series: tuple[Series, ...]


def answers(prometheus: Prometheus, dashboard: Json, span: Span, choices: Mapping[str, str]) -> Iterator[Answered]:
    """All panels but headlines. choices: of variables; the others are All. Raises QueryRefused."""
    values = _values(prometheus, dashboard, choices)
    values |= {"__rate_interval": f"{span.rate_s:g}s", "__range": f"{span.end_s - span.start_s:.0f}s"}
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            yield Answered(panel, tuple(_asked(prometheus, panel, values, span)))


def put_in(expression: str, values: Mapping[str, str]) -> str:
    """An expression without variables. KeyError names one that the dashboard has not."""
    return _VARIABLE.sub(lambda match: values[match[1]], expression)


def _values(prometheus: Prometheus, dashboard: Json, choices: Mapping[str, str]) -> dict[str, str]:
    """Of all variables. A hidden one follows from those before it: what its query finds, as a regular expression."""
    values: dict[str, str] = {}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] != "query":
            continue
        name = variable["name"]
        values[name] = choices.get(name, ALL)
        if variable.get("hide") == 2:
            found = _VALUES.fullmatch(put_in(variable["query"]["query"], values))
            assert found is not None, variable["query"]["query"]
            labels = sorted({sample.labels[found["label"]] for sample in prometheus.query(found["selector"])})
            values[name] = "|".join(re.escape(label).replace("\\", "\\\\") for label in labels)
    return values


def _asked(prometheus: Prometheus, panel: Json, values: Mapping[str, str], span: Span) -> Iterator[Series]:
    for target in panel["targets"]:
        expression = put_in(target["expr"], values)
        if target["instant"]:
            samples = prometheus.query(expression)
        else:
            samples = prometheus.query_range(expression, start_s=span.start_s, end_s=span.end_s, step_s=span.step_s)
        for sample in samples:
            yield Series(target["refId"], _legend(target.get("legendFormat", ""), sample.labels), sample)


def _legend(template: str, labels: Mapping[str, str]) -> str:
    if template in ("", "__auto"):
        return ", ".join(labels.values())
    return _LABEL.sub(lambda match: labels.get(match[1], ""), template)
