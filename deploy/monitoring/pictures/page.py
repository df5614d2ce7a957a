"""A dashboard with its answers as one HTML page in Grafana's layout and colours, for a browser to take a picture of.

Reads the JSON that Grafana reads: places, units, thresholds, colours and legends are those of the dashboard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from deploy.monitoring.answers import Answered, Series, Span
from deploy.monitoring.grafana import COLUMNS, Json
from deploy.monitoring.pictures.charts import Frame, Line, over_time, spark, states
from deploy.monitoring.pictures.colours import PALETTE, by_threshold, shade
from deploy.monitoring.pictures.units import written

WIDTH, ROW, GAP = 1440, 38, 8
_HEAD, _LEGEND_LINE = 30, 18

_STYLE = f"""
* {{ box-sizing: border-box; margin: 0; }}
body {{ width: {WIDTH}px; background: #111217; color: #ccccdc; font: 12px Inter, "DejaVu Sans", Helvetica, Arial, sans-serif; }}
header {{ height: 44px; padding: 12px 12px 0; font-size: 16px; }} header b {{ font-weight: 500; }}
header span {{ color: #8e95a3; font-size: 12px; margin-left: 14px; }}
main {{ position: relative; }}
.panel {{ position: absolute; background: #181b1f; border: 1px solid #25282e; border-radius: 2px; overflow: hidden; }}
.panel h2 {{ font-size: 12.5px; font-weight: 500; padding: 8px 10px 0; height: {_HEAD}px; white-space: nowrap;
  overflow: hidden; text-overflow: ellipsis; }}
.row {{ position: absolute; font-size: 15px; font-weight: 500; padding: 9px 4px; }}
.row:before {{ content: "▾ "; color: #8e95a3; }}
.legend {{ padding: 0 10px; line-height: {_LEGEND_LINE}px; overflow: hidden; }}
.legend span {{ margin-right: 14px; white-space: nowrap; display: inline-block; color: #b4bac6; }}
.legend i {{ display: inline-block; width: 12px; height: 3px; border-radius: 1px; margin-right: 5px; vertical-align: 3px; }}
.number {{ text-align: center; font-size: 32px; font-weight: 500; padding-top: 6px; }}
.spark {{ position: absolute; left: 0; bottom: 0; }}
.empty {{ color: #8e95a3; text-align: center; padding: 26px 16px; }}
table {{ width: 100%; border-collapse: collapse; }}
th, td {{ padding: 4px 10px; text-align: right; border-top: 1px solid #25282e; }}
th {{ color: #6e9fff; font-weight: 500; border: 0; }} th:first-child, td:first-child {{ text-align: left; }}
.bar {{ display: flex; align-items: center; padding: 4px 10px; }}
.bar b {{ width: 70px; font-weight: 400; overflow: hidden; }}
.bar div {{ flex: 1; background: #22252b; height: 16px; margin: 0 10px; }} .bar i {{ display: block; height: 16px; }}
.bar em {{ width: 74px; font-style: normal; text-align: right; }}
"""


def page(dashboard: Json, answered: Sequence[Answered], span: Span) -> tuple[str, int]:
    """(HTML, its height in pixels)."""
    heads = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
    bodies = "".join(map(_headline, heads)) + "".join(_framed(item, span) for item in answered)
    low = max(item["gridPos"]["y"] + item["gridPos"]["h"] for item in dashboard["panels"])
    title = f"<header><b>{escape(dashboard['title'])}</b><span>{escape(dashboard['description'])}</span></header>"
    html = f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style>{title}<main>{bodies}</main>"
    return html, 44 + low * ROW + GAP


def _place(grid: Mapping[str, int]) -> tuple[float, float, float, float]:
    """left, top, width, height in pixels."""
    column = (WIDTH - GAP) / COLUMNS
    return GAP + grid["x"] * column, grid["y"] * ROW, grid["w"] * column - GAP, grid["h"] * ROW - GAP


def _headline(panel: Json) -> str:
    left, top, _, _ = _place(panel["gridPos"])
    return f'<div class="row" style="left:{left:.0f}px;top:{top:.0f}px">{escape(panel["title"])}</div>'


def _framed(item: Answered, span: Span) -> str:
    left, top, width, height = _place(item.panel["gridPos"])
    inner = _BODIES[item.panel["type"]](item, width, height - _HEAD, span) if _shown(item) else _empty(item.panel)
    style = f"left:{left:.0f}px;top:{top:.0f}px;width:{width:.0f}px;height:{height:.0f}px"
    return f'<div class="panel" style="{style}"><h2>{escape(item.panel["title"])}</h2>{inner}</div>'


def _shown(item: Answered) -> bool:
    return any(math.isfinite(value) for series in item.series for _, value in series.sample.points)


def _empty(panel: Json) -> str:
    return f'<div class="empty">No data: {escape(_defaults(panel).get("noValue", "-"))}</div>'


def _defaults(panel: Json) -> Json:
    defaults: Json = panel["fieldConfig"]["defaults"]
    return defaults


def _fixed(panel: Json) -> dict[str, dict[str, Any]]:
    """Overrides by the name of a series or column."""
    return {
        override["matcher"]["options"]: {item["id"]: item["value"] for item in override["properties"]}
        for override in panel["fieldConfig"]["overrides"]
    }


def _lines(item: Answered) -> list[Line]:
    """With the colours that the dashboard gives, or the next of the palette."""
    fixed = _fixed(item.panel)
    lines = []
    for number, series in enumerate(item.series):
        own = fixed.get(series.legend, {}).get("color", {}).get("fixedColor")
        lines.append(Line(series.legend, shade(own) if own else PALETTE[number % len(PALETTE)], series.sample.points))
    return lines


def _time(item: Answered, width: float, height: float, span: Span) -> str:
    panel, lines = item.panel, _lines(item)
    legend, legend_height = _legend([(line.legend, line.colour) for line in lines], width)
    frame = Frame(width=width - 2, height=height - legend_height - 8, start_s=span.start_s, end_s=span.end_s)
    defaults = _defaults(panel)
    drawn = over_time(
        lines, frame, unit=defaults["unit"], most=defaults.get("max"),
        stacked=defaults["custom"]["stacking"]["mode"] == "normal",
        thresholds=[(step["value"], shade(step["color"])) for step in defaults["thresholds"]["steps"][1:]],
    )  # fmt: skip
    return drawn + legend


def _legend(entries: Sequence[tuple[str, str]], width: float) -> tuple[str, int]:
    """(HTML, its height): two lines at most; what does not fit is counted."""
    room, used, lines, shown = width - 24, 0.0, 1, 0
    for words, _ in entries:
        needed = 31 + 6.6 * len(words)
        if used and used + needed > room:
            lines, used = lines + 1, 0.0
        if lines > 2:
            break
        used, shown = used + needed, shown + 1
    more = f"<span>and {len(entries) - shown} more</span>" if shown < len(entries) else ""
    parts = "".join(f'<span><i style="background:{colour}"></i>{escape(words)}</span>' for words, colour in entries[:shown])
    high = min(lines, 2) * _LEGEND_LINE
    return f'<div class="legend" style="height:{high}px">{parts}{more}</div>', high


def _states(item: Answered, width: float, height: float, span: Span) -> str:
    steps, words = _defaults(item.panel)["thresholds"]["steps"], _defaults(item.panel)["mappings"]
    named = words[0]["options"] if words else {}

    def colour(value: float) -> str:
        own = named.get(f"{value:g}")
        return shade(own["color"]) if own else by_threshold(value, steps)

    rows = [
        (series.legend, [(at, at + span.step_s, colour(value)) for at, value in series.sample.points if math.isfinite(value)])
        for series in item.series
    ]
    bounds = [step["value"] for step in steps[1:]]
    unit = _defaults(item.panel)["unit"]
    entries = [(option["text"], shade(option["color"])) for option in named.values()] or [
        (f"from {written(step['value'], unit)}" if step["value"] else f"below {written(bounds[0], unit)}", shade(step["color"]))
        for step in steps
    ]
    legend, high = _legend(entries, width)
    frame = Frame(width=width - 2, height=height - high - 8, start_s=span.start_s, end_s=span.end_s)
    return states(sorted(rows), frame) + legend


def _stat(item: Answered, width: float, height: float, span: Span) -> str:
    del span
    defaults = _defaults(item.panel)
    value = item.series[0].sample.value
    colour = by_threshold(value, defaults["thresholds"]["steps"])
    line = spark(item.series[0].sample.points, colour, width, height * 0.4)
    words = written(value, defaults["unit"], defaults.get("decimals"))
    return f'<div class="number" style="color:{colour}">{escape(words)}</div>{line}'


def _bars(item: Answered, width: float, height: float, span: Span) -> str:
    del width, height, span
    defaults = _defaults(item.panel)
    ordered = sorted(item.series, key=lambda series: (-series.sample.value, series.legend))
    most = defaults.get("max") or max(series.sample.value for series in ordered) or 1.0
    return "".join(
        f'<div class="bar"><b>{escape(series.legend)}</b><div><i style="width:{100 * series.sample.value / most:.0f}%;'
        f'background:{by_threshold(series.sample.value, defaults["thresholds"]["steps"])}"></i></div>'
        f"<em>{escape(written(series.sample.value, defaults['unit']))}</em></div>"
        for series in ordered
    )


def _table(item: Answered, width: float, height: float, span: Span) -> str:
    del width, span
    (names,) = (step["options"]["renameByName"] for step in item.panel["transformations"] if step["id"] == "organize")
    labels = [name for name in names if not name.startswith("Value")]
    letters = [target["refId"] for target in item.panel["targets"]]
    titles = [title for name, title in names.items() if name.startswith("Value")]
    fixed = _fixed(item.panel)
    head = "".join(f"<th>{escape(title)}</th>" for title in (*(names[label] for label in labels), *titles))
    rows = []
    for key, values in sorted(_merged(item.series, labels).items()):
        cells = [
            written(values[letter], fixed.get(title, {}).get("unit", "short")) if letter in values else ""
            for letter, title in zip(letters, titles, strict=True)
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (*key, *cells)) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows[: int(height / 27) - 1])}</table>"


def _merged(all_series: Sequence[Series], labels: Sequence[str]) -> dict[tuple[str, ...], dict[str, float]]:
    out: dict[tuple[str, ...], dict[str, float]] = {}
    for series in all_series:
        key = tuple(series.sample.labels.get(label, "") for label in labels)
        out.setdefault(key, {})[series.letter] = series.sample.value
    return out


_BODIES = {"timeseries": _time, "state-timeline": _states, "stat": _stat, "bargauge": _bars, "table": _table}
