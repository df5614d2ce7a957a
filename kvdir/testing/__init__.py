"""For tests, ours and yours: a whole cluster in one thread, manual clocks, contract suites, simulations of traces.

    LocalCluster          agents, network and coordinator on simulated time (sim/); also `python -m kvdir.testing.sim`
    ManualClock           a clock that moves when told
    check_index           contract suite for implementations of the block index
    simulate, trace       replay of request traces on the real cores

Names are loaded when they are used, so that the contract suites need nothing but what they check.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdir.testing.clock import ManualClock
    from kvdir.testing.sim.cluster import LocalCluster

__all__ = ["LocalCluster", "ManualClock"]

_HOMES = {"LocalCluster": "kvdir.testing.sim.cluster", "ManualClock": "kvdir.testing.clock"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvdir.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
