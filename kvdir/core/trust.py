"""Two kinds of figures, and when each may be trusted.

*Convergent*: newer overwrites older, so a loss heals by itself (load, last access, heartbeat). Usable always.
*Cumulative*: a fold over a lossy stream (blocks, bytes, counts), which one loss offsets for ever. Untrusted from the first
known loss until an absolute restatement by the owner covers it; never again trusted merely because time went by.

Rule: whatever destroys something on the strength of a cumulative figure takes a `Trusted` number, not an int. There is one
source of those, `require_trusted()`, so the type checker finds whoever forgot the guard (tests/typing). Times are on the
monotonic clock of the process that holds the figure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self, final

from kvdir.errors import UntrustedView


@final
class _Guard:
    """Who has it has checked."""


_CHECKED: Final = _Guard()


@final
class Trusted(int):
    """A cumulative number that was trusted when it was asked for; act on it at once, it does not stay true.

    Arithmetic gives plain ints: add the views (`Cumulative.__add__`, `total`), then ask.
    """

    def __new__(cls, value: int, checked: _Guard) -> Self:
        if checked is not _CHECKED:
            raise TypeError("a Trusted number comes from require_trusted() only")
        return super().__new__(cls, value)


@dataclass(frozen=True, slots=True)
class Convergent:
    """value, as last heard at as_of_s. It can be old, never offset, so nothing has to be asked before it is used."""

    value: int
    as_of_s: float

    @property
    def trusted(self) -> bool:
        return True

    def require_trusted(self) -> int:
        """The value, as a plain int: no total may be made of it."""
        return self.value


@dataclass(frozen=True, slots=True)
class Cumulative:
    """value, folded from events up to as_of_s. untrusted_since_s: when the first loss it does not cover became known."""

    value: int
    trusted: bool
    as_of_s: float
    untrusted_since_s: float | None = None
    reason: str = ""

    def require_trusted(self) -> Trusted:
        """The value, or UntrustedView: refuse the destructive action, reconcile the node first."""
        if not self.trusted:
            raise UntrustedView(
                f"this figure is not trusted ({self.reason or 'a loss is known'}): "
                "run `kvdir reconcile NODE`, or wait until the stream is synced"
            )
        return Trusted(self.value, _CHECKED)

    def __add__(self, other: Cumulative) -> Cumulative:
        """A sum is trusted if both are; it is as old as the older one, and untrusted since the earlier loss."""
        since = [part.untrusted_since_s for part in (self, other) if part.untrusted_since_s is not None]
        return Cumulative(
            self.value + other.value,
            self.trusted and other.trusted,
            min(self.as_of_s, other.as_of_s),
            min(since) if since else None,
            self.reason or other.reason,
        )


def total(figures: Iterable[Cumulative], *, now_s: float) -> Cumulative:
    """The sum, as `__add__` makes it, in one pass; nothing sums to a trusted 0 as of now."""
    parts = list(figures)
    if not parts:
        return Cumulative(0, True, now_s)
    value, as_of_s = sum(part.value for part in parts), min(part.as_of_s for part in parts)
    doubtful = [part for part in parts if not part.trusted]
    if not doubtful:
        return Cumulative(value, True, as_of_s)
    since = [part.untrusted_since_s for part in doubtful if part.untrusted_since_s is not None]
    reason = next((part.reason for part in doubtful if part.reason), "")
    return Cumulative(value, False, as_of_s, min(since) if since else None, reason)
