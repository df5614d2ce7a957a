"""Lines, stacked areas and states over time as SVG, with their axes. Sizes in CSS pixels. Does not know of panels' frames."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from deploy.monitoring.pictures.units import ticks, written

_RIGHT, _TOP, _BOTTOM = 10, 8, 22
_GRID, _TEXT = "#2c3036", "#9da5b4"
_FONT = 'font-size="11" fill="' + _TEXT + '"'


@dataclass(frozen=True, slots=True)
class Line:
    """points: (unix seconds, value), with NaN where there is none."""

    legend: str
    colour: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where and when: the size of the drawing, and the span of its axis."""

    width: float
    height: float
    start_s: float
    end_s: float
    left: float = 62

    def x(self, at_s: float) -> float:
        return self.left + (at_s - self.start_s) / (self.end_s - self.start_s) * (self.width - self.left - _RIGHT)

    @property
    def inner(self) -> float:
        return self.height - _TOP - _BOTTOM


def over_time(
    lines: Sequence[Line],
    frame: Frame,
    *,
    unit: str,
    stacked: bool = False,
    most: float | None = None,
    thresholds: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines from 0 up; stacked: each upon those before it. thresholds: dashed, and never what makes the axis longer."""
    tops = _stacked(lines) if stacked else [dict(line.points) for line in lines]
    highest = max((value for top in tops for value in top.values() if math.isfinite(value)), default=0.0)
    marks = ticks(min(most, max(highest * 1.05, most / 4)) if most is not None else highest * 1.05, unit)
    scale = marks[-1]

    def y(value: float) -> float:
        return _TOP + frame.inner * (1 - value / scale)

    body = [*_grid(frame, marks, unit, y(0), y(scale)), *_clock(frame)]
    below: dict[float, float] = {}
    for line, top in zip(lines, tops, strict=True):
        for run in _runs(top):
            path = " ".join(f"{frame.x(at):.1f},{y(value):.1f}" for at, value in run)
            floor = " ".join(f"{frame.x(at):.1f},{y(below.get(at, 0.0)):.1f}" for at, _ in reversed(run))
            opacity = 0.7 if stacked else 0.08
            body.append(f'<polygon points="{path} {floor}" fill="{line.colour}" fill-opacity="{opacity}"/>')
            if not stacked:
                body.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="1.2"/>')
        if stacked:
            below = top
    for at, colour in thresholds:
        if at <= scale:
            body.append(_rule(frame, y(at), colour))
    return _svg(frame, body)


def states(lines: Sequence[tuple[str, Sequence[tuple[float, float, str]]]], frame: Frame) -> str:
    """Rows of coloured time: (name, pieces of (from, to, colour)). Names have as much room as they take, up to a third."""
    frame = replace(frame, left=min(frame.width / 3, 16 + 6.4 * max((len(name) for name, _ in lines), default=0)))
    high = frame.inner / max(1, len(lines))
    body = list(_clock(frame))
    for number, (name, pieces) in enumerate(lines):
        top = _TOP + number * high
        for start, end, colour in _joined(pieces):
            x, width = frame.x(start), max(1.0, frame.x(end) - frame.x(start))
            body.append(
                f'<rect x="{x:.1f}" y="{top + high * 0.15:.1f}" width="{width:.1f}" height="{high * 0.7:.1f}" '
                f'fill="{colour}" fill-opacity="0.8"/>'
            )
        room = int((frame.left - 16) / 6.4)
        short = name if len(name) <= room else name[: room - 1] + "…"
        body.append(
            f'<text x="{frame.left - 6:.0f}" y="{top + high / 2 + 4:.1f}" text-anchor="end" {_FONT}>{escape(short)}</text>'
        )
    return _svg(frame, body)


def spark(points: Sequence[tuple[float, float]], colour: str, width: float, height: float) -> str:
    """The line under a large number, without axes."""
    known = [(at, value) for at, value in points if math.isfinite(value)]
    if len(known) < 2:
        return ""
    (start, _), (end, _) = known[0], known[-1]
    most = max(value for _, value in known) or 1.0
    path = " ".join(
        f"{(at - start) / (end - start) * width:.1f},{height - value / most * height * 0.9:.1f}" for at, value in known
    )
    return (
        f'<svg class="spark" width="{width:.0f}" height="{height:.0f}"><polygon points="0,{height} {path} {width},{height}" '
        f'fill="{colour}" fill-opacity="0.15"/><polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1"/></svg>'
    )


def _joined(pieces: Sequence[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Pieces of one colour that follow each other are one, so that no seams are drawn."""
    for _, same in itertools.groupby(pieces, key=lambda piece: piece[2]):
        run = list(same)
        yield run[0][0], run[-1][1], run[0][2]


def _stacked(lines: Sequence[Line]) -> list[dict[float, float]]:
    """Sums from below; what is missing counts as 0."""
    sums: dict[float, float] = dict.fromkeys((at for line in lines for at, _ in line.points), 0.0)
    out = []
    for line in lines:
        for at, value in line.points:
            sums[at] += value if math.isfinite(value) else 0.0
        out.append(dict(sorted(sums.items())))
    return out


def _runs(points: dict[float, float]) -> Iterator[list[tuple[float, float]]]:
    """Pieces without holes."""
    run: list[tuple[float, float]] = []
    for at, value in points.items():
        if math.isfinite(value):
            run.append((at, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _grid(frame: Frame, marks: Sequence[float], unit: str, bottom: float, top: float) -> Iterator[str]:
    for value in marks:
        y = bottom - (bottom - top) * value / marks[-1]
        yield f'<line x1="{frame.left}" x2="{frame.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID}"/>'
        yield f'<text x="{frame.left - 6:.0f}" y="{y + 4:.1f}" text-anchor="end" {_FONT}>{escape(written(value, unit))}</text>'


def _clock(frame: Frame) -> Iterator[str]:
    """Times of day, as many as there is room for."""
    count = max(2, int((frame.width - frame.left) / 90))
    for number in range(count):
        at = frame.start_s + (frame.end_s - frame.start_s) * (number + 0.5) / count
        words = time.strftime("%H:%M:%S", time.gmtime(at))
        yield f'<text x="{frame.x(at):.1f}" y="{frame.height - 6}" text-anchor="middle" {_FONT}>{words}</text>'


def _rule(frame: Frame, y: float, colour: str) -> str:
    return (
        f'<line x1="{frame.left}" x2="{frame.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}" '
        'stroke-dasharray="6 4" stroke-opacity="0.8"/>'
    )


def _svg(frame: Frame, body: Sequence[str]) -> str:
    return f'<svg width="{frame.width:.0f}" height="{frame.height:.0f}">{"".join(body)}</svg>'
