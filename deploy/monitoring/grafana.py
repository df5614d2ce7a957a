"""Dashboards as values, and the JSON that Grafana (10 or newer) imports.

A dashboard is rows of panels; a panel is a title, what good looks like, and queries. Where panels lie follows from their
widths, so that moving one moves no numbers by hand. Equal values give equal bytes.
Rules: the data source is a variable, never a uid; a panel says in its description what good looks like, and, if it can be
empty, when (`empty`).
Plain values and not a dashboard SDK: the five kinds of panel here need 200 lines, an SDK has 200 classes and is one more thing
to follow. Its models read what comes out, in the tests, and find nothing that they do not know (tests/ops/test_dashboards.py).
"""

from __future__ import annotations

import enum
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

COLUMNS = 24
"""Of Grafana's grid."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, ORANGE, RED, BLUE, GREY = "green", "orange", "red", "blue", "text"
Json = dict[str, Any]


class Kind(enum.StrEnum):
    """Grafana's panel types that are used."""

    TIME = "timeseries"
    STAT = "stat"
    TABLE = "table"
    BARS = "bargauge"
    STATES = "state-timeline"


class Empty(enum.StrEnum):
    """When a panel shows nothing; the words end its description."""

    NEVER = ""
    WHEN_WELL = "Empty when all is well."
    WITHOUT_CALLS = "Empty while nobody asks coordinators: agents with replicas do not."
    WITH_STORE = "Empty where coordinators share a store: they keep no blocks themselves."
    WITHOUT_VLLM = "Empty unless this Prometheus scrapes vLLM too."
    WITHOUT_STORE = "Empty unless the directory lies in Redis or Valkey (--store)."
    WITHOUT_REPLICA = "Empty unless agents keep replicas (--replica)."
    WITHOUT_ENGINE_STREAMS = "Empty unless agents follow the event streams of engines (--engine)."
    WITHOUT_LOOKUP_WORKERS = "Empty unless there are lookup workers (--lookup-workers)."
    WITHOUT_RDMA_PLANES = "Empty unless peers are read by ucx or nixl."
    WITHOUT_TLS = "Empty unless TLS is set up."
    WITHOUT_QUOTAS = "Empty unless quotas are set."


@dataclass(frozen=True, slots=True)
class Query:
    """expr: PromQL with Grafana's variables. legend: with {{label}}; of a table: the column's title. unit: of that column."""

    expr: str
    legend: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """thresholds: (from this value on, colour), ascending, after `base`. words: what a value is called, and its colour.

    columns: of a table, label -> title; other labels are hidden. drill: a table's column that leads to the Node dashboard.
    """

    title: str
    good: str
    queries: Sequence[Query]
    kind: Kind = Kind.TIME
    unit: str = "short"
    width: int = 8
    height: int = 8
    base: str = GREEN
    thresholds: Sequence[tuple[float, str]] = ()
    stacked: bool = False
    most: float | None = None
    decimals: int | None = None
    words: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    drill: str = ""
    colours: Mapping[str, str] = field(default_factory=dict)
    empty: Empty = Empty.NEVER

    @property
    def description(self) -> str:
        return f"{self.good} {self.empty}".strip()


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one headline."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top: values of a label, more than one at a time, and All. hidden: follows from the others.

    All is any value, or none at all; of a hidden one, all values there are.
    """

    name: str
    label: str
    query: str
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """name: of its file and, with kvdir-, of its address."""

    name: str
    title: str
    about: str
    variables: Sequence[Variable]
    rows: Sequence[Row]

    @property
    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels


def to_json(dashboard: Dashboard) -> Json:
    """What Grafana imports."""
    return {
        "uid": f"kvdir-{dashboard.name}",
        "title": f"kvdir / {dashboard.title}",
        "description": dashboard.about,
        "tags": ["kvdir"],
        "style": "dark",
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 36,
        "time": {"from": "now-1h", "to": "now"},
        "links": [_link_to_the_others()],
        "annotations": {"list": [_alerts_that_fire()]},
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "panels": list(_placed(dashboard.rows)),
    }


def _placed(rows: Sequence[Row]) -> Iterator[Json]:
    """Panels from left to right and down; a row is as high as its highest panel."""
    number, y = 0, 0
    for row in rows:
        number += 1
        yield _row(row.title, number, y)
        y, x, high = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, high = 0, y + high, 0
            number += 1
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": panel.height})
            x, high = x + panel.width, max(high, panel.height)
        y += high


def _row(title: str, number: int, y: int) -> Json:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, place: Json) -> Json:
    out: Json = {
        "id": number,
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": [
            _target(query, letter, panel.kind) for query, letter in zip(panel.queries, string.ascii_uppercase, strict=False)
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": list(_overrides(panel))},
        "options": _OPTIONS[panel.kind],
    }
    if panel.kind is Kind.TABLE:
        out["transformations"] = _table(panel)
    return out


def _target(query: Query, letter: str, kind: Kind) -> Json:
    instant = kind in (Kind.TABLE, Kind.BARS)
    out: Json = {"refId": letter, "datasource": SOURCE, "expr": query.expr, "editorMode": "code"}
    out |= {"instant": True, "range": False} if instant else {"instant": False, "range": True}
    out["format"] = "table" if kind is Kind.TABLE else "time_series"
    if kind is not Kind.TABLE:
        out["legendFormat"] = query.legend or "__auto"
    return out


def _defaults(panel: Panel) -> Json:
    steps = [{"color": panel.base, "value": None}, *({"color": colour, "value": at} for at, colour in panel.thresholds)]
    out: Json = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}, "mappings": _mappings(panel)}
    if panel.empty is not Empty.NEVER:
        out["noValue"] = "none" if panel.empty is Empty.WHEN_WELL else panel.empty.removeprefix("Empty ").rstrip(".")
    if panel.decimals is not None:
        out["decimals"] = panel.decimals
    match panel.kind:
        case Kind.TIME:
            out |= {"min": 0, "color": {"mode": "palette-classic"}, "custom": _lines(panel)}
        case Kind.BARS:
            out |= {"min": 0, "color": {"mode": "thresholds"}}
        case Kind.STATES:
            out |= {"color": {"mode": "thresholds"}, "custom": {"fillOpacity": 80, "lineWidth": 0}}
        case Kind.TABLE:
            out |= {"custom": {"align": "auto", "cellOptions": {"type": "auto"}}}
        case Kind.STAT:
            out |= {"color": {"mode": "thresholds"}}
    if panel.most is not None:
        out["max"] = panel.most
    return out


def _lines(panel: Panel) -> Json:
    return {
        "drawStyle": "line",
        "lineWidth": 0 if panel.stacked else 1,  # else a series that is 0 draws a line over the others
        "fillOpacity": 70 if panel.stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
    }


def _mappings(panel: Panel) -> list[Json]:
    if not panel.words:
        return []
    words = panel.words.items()
    options = {str(value): {"text": text, "color": colour, "index": at} for at, (value, (text, colour)) in enumerate(words)}
    return [{"type": "value", "options": options}]


def _overrides(panel: Panel) -> Iterator[Json]:
    """Fixed colours of series, units of columns, and the way to the node."""
    for name, colour in panel.colours.items():
        yield _override("byName", name, {"color": {"mode": "fixed", "fixedColor": colour}})
    if panel.kind is not Kind.TABLE:
        return
    for query in panel.queries:
        if query.unit:
            yield _override("byName", query.legend, {"unit": query.unit})
    if panel.drill:
        link = {"title": "Open ${__value.text}", "url": "/d/kvdir-node?${datasource:queryparam}&var-node=${__value.text}"}
        yield _override("byName", panel.drill, {"links": [link]})


def _override(matcher: str, name: str, properties: Json) -> Json:
    return {
        "matcher": {"id": matcher, "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties.items()],
    }


def _table(panel: Panel) -> list[Json]:
    """One line per set of labels, one column per query, titles instead of Grafana's names, nothing else."""
    titles = dict(panel.columns)
    letters = string.ascii_uppercase[: len(panel.queries)]
    values = ["Value"] if len(panel.queries) == 1 else [f"Value #{letter}" for letter in letters]
    titles |= {value: query.legend for value, query in zip(values, panel.queries, strict=True)}
    keep = {"id": "filterFieldsByName", "options": {"include": {"names": list(titles)}}}
    order = {name: at for at, name in enumerate(titles)}
    named = {"id": "organize", "options": {"renameByName": titles, "indexByName": order, "excludeByName": {}}}
    return [{"id": "merge", "options": {}}, keep, named]


def _variable(variable: Variable) -> Json:
    return {
        "type": "query",
        "name": variable.name,
        "label": variable.label,
        "datasource": SOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        **({"hide": 2} if variable.hidden else {"allValue": ".*"}),
    }


def _datasource() -> Json:
    return {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "refresh": 1}


def _link_to_the_others() -> Json:
    return {
        "type": "dashboards",
        "title": "kvdir",
        "tags": ["kvdir"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _alerts_that_fire() -> Json:
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": RED,
        "expr": 'ALERTS{alertname=~"Kvdir.*", alertstate="firing", cluster=~"$cluster", namespace=~"$namespace"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}}",
        "step": "60s",
    }


_LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
_REDUCE = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[Kind, Json] = {
    Kind.TIME: {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    Kind.STAT: {"reduceOptions": _REDUCE, "colorMode": "value", "graphMode": "area", "textMode": "auto", "justifyMode": "auto"},
    Kind.TABLE: {"showHeader": True, "cellHeight": "sm"},
    Kind.BARS: {"reduceOptions": _REDUCE, "orientation": "horizontal", "displayMode": "basic", "showUnfilled": True},
    Kind.STATES: {
        "mergeValues": True,
        "showValue": "never",
        "rowHeight": 0.8,
        "legend": _LEGEND,
        "tooltip": {"mode": "single"},
    },
}
