"""Grafana's dark theme: what names of colours look like, and the order in which lines without one take theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PALETTE = (
    "#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0", "#508642", "#cca300", "#447ebc",
)  # fmt: skip
_NAMED = {
    "green": "#73bf69", "orange": "#ff9830", "red": "#f2495c", "blue": "#5794f2", "text": "#ccccdc",
    "semi-dark-green": "#56a64b", "semi-dark-blue": "#3274d9", "semi-dark-orange": "#ff780a", "semi-dark-red": "#e02f44",
    "semi-dark-yellow": "#f2cc0c", "semi-dark-purple": "#a352cc",
}  # fmt: skip


def shade(name: str) -> str:
    """Of a name, or of #rrggbb itself. KeyError for a name that Grafana may know, and nobody here uses."""
    return name if name.startswith("#") else _NAMED[name]


def by_threshold(value: float, steps: Sequence[Mapping[str, Any]]) -> str:
    """The colour of the last step that the value reaches."""
    reached = [step for step in steps if step["value"] is None or value >= step["value"]]
    return shade(reached[-1]["color"])
