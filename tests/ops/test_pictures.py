"""Pictures of dashboards: values as Grafana writes them, and every kind of panel drawn from made-up answers."""

from __future__ import annotations

import math

import pytest

from deploy.monitoring.answers import Answered, Series, Span
from deploy.monitoring.boards import BOARDS
from deploy.monitoring.grafana import Dashboard, to_json
from deploy.monitoring.pictures.page import page
from deploy.monitoring.pictures.units import ticks, written
from kvdir.testing.prometheus_servers import Sample

SPAN = Span(start_s=1000, end_s=1060, step_s=2, rate_s=15)


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0, "s", "0 s"), (0.000_05, "s", "50 µs"), (0.0123, "s", "12.3 ms"), (90, "s", "1.5 mins"), (691_200, "s", "8 days"),
        (-30, "s", "-30 s"), (1536, "bytes", "1.5 KiB"), (0, "bytes", "0 B"), (2_500_000, "Bps", "2.5 MB/s"),
        (0.1234, "percentunit", "12.3%"), (1, "percentunit", "100%"), (1234, "short", "1.23 K"), (0.25, "short", "0.25"),
        (999_999, "short", "1 Mil"), (math.nan, "short", "-"), (math.inf, "s", "-"),
    ],
)  # fmt: skip
def test_values_are_written_as_grafana_does(value: float, unit: str, words: str) -> None:
    assert written(value, unit) == words


@pytest.mark.parametrize("most", [0.000_3, 0.7, 1.0, 3.3, 99, 1_000, 5e9])
@pytest.mark.parametrize("unit", ["short", "bytes", "s", "percentunit"])
def test_an_axis_ends_at_or_beyond_the_highest_value_with_few_marks(most: float, unit: str) -> None:
    marks = ticks(most, unit)
    assert marks[0] == 0
    assert marks[-1] >= most * 0.999
    assert marks[-2] < most
    assert 3 <= len(marks) <= 7


def answered(dashboard: Dashboard, *, gap: bool) -> list[Answered]:
    """Two series for each query, with markup in their names; gap: a hole in the middle."""
    points = tuple((float(at), math.nan if gap and 1020 < at < 1030 else at % 7) for at in range(1000, 1061, 2))
    out = []
    for panel in to_json(dashboard)["panels"]:
        if panel["type"] != "row":
            labels = [{"node": f"<b>n{number}", "plane": "tcp", "transport": "x"} for number in range(2)]
            series = [Series(query["refId"], own["node"], Sample(own, points)) for query in panel["targets"] for own in labels]
            out.append(Answered(panel, tuple(series)))
    return out


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
@pytest.mark.parametrize("gap", [False, True])
def test_every_panel_is_drawn_when_it_has_answers(board: Dashboard, gap: bool) -> None:
    html, height = page(to_json(board), answered(board, gap=gap), SPAN)
    assert html.count('class="panel"') == len(list(board.panels))
    assert "No data" not in html
    assert "nan" not in html.lower().replace("nano", "")
    assert "<b>n" not in html
    assert height > 500


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_empty_panels_say_why_when_there_are_no_answers(board: Dashboard) -> None:
    nothing = [Answered(panel, ()) for panel in to_json(board)["panels"] if panel["type"] != "row"]
    html, _ = page(to_json(board), nothing, SPAN)
    assert html.count("No data") == len(list(board.panels))
