"""Dashboards: their JSON is what Grafana reads, their metrics exist, and on a running demo no panel is empty."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard

from deploy.monitoring.__main__ import FILES, files
from deploy.monitoring.alerts import GROUPS
from deploy.monitoring.answers import Answered, Span, answers
from deploy.monitoring.boards import BOARDS
from deploy.monitoring.grafana import COLUMNS, Dashboard, Empty, to_json
from deploy.monitoring.watched import Watched, watched_demo
from kvdir.obs.definitions import DEFINITIONS
from kvdir.obs.definitions import GROUPS as METRICS

SUFFIXES = re.compile(r"_(bucket|sum|count)$")
NOT_OURS = re.compile(r"up|ALERTS|vllm:.+|(cluster|process):.+")
"""Prometheus' own, vLLM's, and what recording rules make."""
SHOWN_BY_THE_DEMO = (Empty.NEVER, Empty.WITH_STORE, Empty.WITHOUT_CALLS)


def named_metrics(expression: str) -> Iterator[str]:
    """Every metric that PromQL names."""
    plain = re.sub(r"\$__\w+", "5m", expression)
    found: list[Any] = [promql_parser.parse(plain)]
    while found:
        node = found.pop()
        if isinstance(node, promql_parser.VectorSelector):
            yield node.name or next(item.value for item in node.matchers.matchers if item.name == "__name__")
        found += _children(node)


def _children(node: Any) -> list[Any]:
    """Of one node of the parsed expression; the parser's own walk takes callbacks."""
    names = ("expr", "lhs", "rhs", "vector_selector")
    children = [child for name in names if (child := getattr(node, name, None)) is not None]
    return children + list(getattr(node, "args", ()) or ())


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of everything that is generated."""
    for board in BOARDS:
        for panel in board.panels:
            yield from ((f"{board.title} / {panel.title}", query.expr) for query in panel.queries)
    for group in GROUPS:
        yield from ((rule.name, rule.expr) for rule in group.rules)


def test_every_metric_that_is_named_is_declared() -> None:
    known = set(DEFINITIONS)
    unknown = {
        (where, name)
        for where, expression in expressions()
        for name in named_metrics(expression)
        if not NOT_OURS.fullmatch(name) and name not in known and SUFFIXES.sub("", name) not in known
    }
    assert not unknown


def test_every_group_of_metrics_is_drawn_where_its_page_says() -> None:
    """docs/metrics.md names a dashboard for each group; some of its metrics must be there."""
    drawn = {
        board.title: {
            SUFFIXES.sub("", name) for panel in board.panels for query in panel.queries for name in named_metrics(query.expr)
        }
        for board in BOARDS
    }
    for group in METRICS:
        named = {SUFFIXES.sub("", metric.name) for metric in group.metrics}
        assert drawn[group.dashboard] & named, f"{group.title}: nothing of it is in {group.dashboard}"


def test_names_are_found_wherever_they_stand_in_an_expression() -> None:
    tricky = 'topk(3, quantile_over_time(0.9, a_bucket[5m]) / on (x) (b{c="d"} > 0)) or -max_over_time(e[1h:1m])'
    assert set(named_metrics(tricky)) == {"a_bucket", "b", "e"}


def test_generated_files_are_those_in_the_chart() -> None:
    assert not [path for path, text in files() if path.read_text() != text]
    assert {path.name for path in (FILES / "dashboards").iterdir()} == {f"{board.name}.json" for board in BOARDS}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_grafanas_own_models_know_every_key(board: Dashboard) -> None:
    """What the models do not know is not in what they write. The keys of a data source's own annotations are not in them."""
    made = to_json(board)
    for annotation in made["annotations"]["list"]:
        del annotation["step"], annotation["textFormat"], annotation["titleFormat"]
    read = json.loads(json.dumps(GrafanaDashboard.from_json(made), cls=JSONEncoder))
    assert not list(_lost(made, read))


def _lost(made: Any, read: Any, path: str = "") -> Iterator[str]:
    if isinstance(made, dict):
        for key, value in made.items():
            if key not in read:
                yield f"{path}.{key}"
            else:
                yield from _lost(value, read[key], f"{path}.{key}")
    elif isinstance(made, list):
        assert len(made) == len(read), path
        for number, (one, other) in enumerate(zip(made, read, strict=True)):
            yield from _lost(one, other, f"{path}[{number}]")
    elif made != read:
        yield f"{path}: {made!r} became {read!r}"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_panels_fit_and_say_what_good_looks_like(board: Dashboard) -> None:
    made = to_json(board)
    cells: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        place = panel["gridPos"]
        own = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < COLUMNS
        cells |= own
        assert panel["type"] == "row" or len(panel["description"]) > 1
    titles = [panel.title for panel in board.panels]
    assert len(titles) == len(set(titles))
    datasources = {json.dumps(panel["datasource"]) for panel in made["panels"] if panel["type"] != "row"}
    assert datasources == {json.dumps({"type": "prometheus", "uid": "${datasource}"})}


@pytest.fixture(scope="module")
def demo() -> Iterator[Watched]:
    """Loses events, so that panels of losses have something to show."""
    with watched_demo("--loss", "0.1", "--rate", "25") as watched:
        yield watched


def _empty(watched: Watched, board: Dashboard, span: Span) -> list[str]:
    """Panels that show nothing although they always should. QueryRefused for a query that Prometheus cannot evaluate."""
    shown = answers(watched.prometheus, to_json(board), span, {})
    return [
        panel.title
        for panel, item in zip(board.panels, shown, strict=True)
        if panel.empty in SHOWN_BY_THE_DEMO and not _has_a_value(item)
    ]


def _has_a_value(item: Answered) -> bool:
    return any(math.isfinite(value) for series in item.series for _, value in series.sample.points)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_no_panel_is_empty_when_the_demo_runs(board: Dashboard, demo: Watched) -> None:
    deadline_s = time.monotonic() + 90
    while True:
        now_s = time.time()
        empty = _empty(demo, board, Span(start_s=now_s - 30, end_s=now_s, step_s=2, rate_s=15))
        if not empty:
            return
        assert time.monotonic() < deadline_s, f"empty: {empty}"
        time.sleep(0.5)
