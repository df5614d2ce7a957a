"""Who this agent is, and how far requests may go: what the services need to know beside the store."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """epoch: random 64 bits of this lifetime. arena_id: 16 random bytes of the file engines map.
    arena_memory: in words, for people. replica_path: of the region engines may look up in; empty: none is kept. coordinators:
    whom they ask while it cannot be used."""

    node: str
    epoch: int
    version: str
    arena_path: str
    arena_id: bytes
    arena_bytes: int
    arena_memory: str
    replica_path: str = ""
    coordinators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may ask for. Wishes beyond are shortened (times) or refused by name (counts, bytes)."""

    max_fingerprints: int
    max_reply_bytes: int
    max_lease_s: float
    max_pin_s: float
    max_deadline_s: float

    def lease_s(self, lease_ms: int) -> float:
        """0 asks for the longest."""
        return min(lease_ms / 1000, self.max_lease_s) if lease_ms else self.max_lease_s

    def deadline_s(self, deadline_ms: int, remaining_s: float | None) -> float:
        """deadline_ms 0: as long as the call's own deadline, or the configured maximum, allows."""
        wish_s = deadline_ms / 1000 if deadline_ms else self.max_deadline_s
        return max(0.0, min(wish_s, self.max_deadline_s, self.max_deadline_s if remaining_s is None else remaining_s))


def version() -> str:
    """Of the installed package; "0" where it runs from a source tree."""
    try:
        return metadata.version("kvdir")
    except metadata.PackageNotFoundError:
        return "0"
