"""What a lookup worker counted, in a small file that the main process reads for /metrics.

Rules: written whole beside the old one and renamed, so a reader never sees half of it; a worker that takes the place of a
dead one goes on from its file, so counters never fall. `alive_ns` (CLOCK_MONOTONIC) is the sign of life.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvdir.obs.call_figures import MethodFigures


@dataclass(slots=True)
class ProcessFigures:
    """counters: by the names of kvdir.core.admission.Counters, and `passed_on`. methods: as CallFigures.methods."""

    alive_ns: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    methods: dict[str, MethodFigures] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replaces the file."""
        beside = path.with_suffix(".new")
        beside.write_bytes(msgspec.json.encode(self))
        os.replace(beside, path)


def read(path: Path) -> ProcessFigures | None:
    """None: not there, or not readable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProcessFigures)
    except (OSError, msgspec.DecodeError):
        return None
