"""Values as Grafana writes them: enough of its units for the dashboards here."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SHORT = ((1e9, " Bil"), (1e6, " Mil"), (1e3, " K"), (1.0, ""))
_BYTES = ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B"))
_BYTES_A_SECOND = ((1e9, " GB/s"), (1e6, " MB/s"), (1e3, " kB/s"), (1.0, " B/s"))
_TIME = ((86400.0, " days"), (3600.0, " hours"), (60.0, " mins"), (1.0, " s"), (1e-3, " ms"), (1e-6, " µs"))


def written(value: float, unit: str, decimals: int | None = None) -> str:
    """ValueError for a unit that no dashboard uses."""
    if not math.isfinite(value):
        return "-"
    match unit:
        case "short":
            return _scaled(value, _SHORT, decimals)
        case "bytes":
            return _scaled(value, _BYTES, decimals)
        case "Bps":
            return _scaled(value, _BYTES_A_SECOND, decimals)
        case "s":
            return _scaled(value, _TIME, decimals)
        case "percentunit":
            return f"{_number(value * 100, decimals)}%"
    raise ValueError(f"{unit} is no unit that is drawn: add it to deploy/monitoring/pictures/units.py")


def ticks(most: float, unit: str, count: int = 4) -> list[float]:
    """Round values from 0 to `most` or just beyond it; of times and bytes, round in the unit they are written in."""
    if most <= 0 or not math.isfinite(most):
        return [0.0, 1.0]
    scale = _scale(most, unit)
    raw = most / scale / count
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * base for factor in (1, 2, 2.5, 5, 10) if factor * base >= raw * 0.999)
    return [step * scale * number for number in range(math.ceil(most / scale / step - 1e-9) + 1)]


def _scale(value: float, unit: str) -> float:
    table: dict[str, Sequence[tuple[float, str]]] = {"bytes": _BYTES, "s": _TIME}
    return next((factor for factor, _ in table.get(unit, ()) if value >= factor), 1.0)


def _scaled(value: float, scales: Sequence[tuple[float, str]], decimals: int | None) -> str:
    size = abs(value)
    factor, name = next(((factor, name) for factor, name in scales if size >= factor * 0.9995), scales[-1])
    if size == 0:
        factor, name = next(item for item in scales if item[0] == 1.0)
    return f"{_number(value / factor, decimals)}{name}"


def _number(value: float, decimals: int | None) -> str:
    """Three digits that count, unless said otherwise."""
    if decimals is not None:
        return f"{value:.{decimals}f}"
    size = abs(value)
    places = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
