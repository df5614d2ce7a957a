"""Two kinds of figures, and when each may be trusted.

*Convergent*: newer overwrites older, so a loss heals by itself (load, last access, heartbeat). Usable always.
*Cumulative*: a fold over a lossy stream (blocks, bytes, counts), which one loss offsets for ever. Untrusted from the first
known loss until an absolute restatement by the owner covers it; never again trusted merely because time went by.

Rule: whoever destroys something on the strength of a cumulative figure calls `require_trusted()`. Times are on the monotonic
clock of the process that holds the figure.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdir.errors import UntrustedView


@dataclass(frozen=True, slots=True)
class Convergent:
    """value, as last heard at as_of_s."""

    value: int
    as_of_s: float

    @property
    def trusted(self) -> bool:
        return True

    def require_trusted(self) -> int:
        """The value: a convergent figure can be old, never offset."""
        return self.value


@dataclass(frozen=True, slots=True)
class Cumulative:
    """value, folded from events up to as_of_s. untrusted_since_s: when the first loss it does not cover became known."""

    value: int
    trusted: bool
    as_of_s: float
    untrusted_since_s: float | None = None
    reason: str = ""

    def require_trusted(self) -> int:
        """The value, or UntrustedView: refuse the destructive action, reconcile the node first."""
        if not self.trusted:
            raise UntrustedView(
                f"this figure is not trusted ({self.reason or 'a loss is known'}): "
                "run `kvdir reconcile NODE`, or wait until the stream is synced"
            )
        return self.value

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
