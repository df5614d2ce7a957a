"""What planning a load costs the event loop: every call of the plan, from the directory's answer to the last block, as JSON.

    python bench/plan.py [--rounds N]

Answers and reads take no time here, so the figures are the planner's alone: CPU milliseconds per load (median of the
rounds), the longest single call, and how many reads the load was split into. Claims come as they come from a lookup (runs).
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from kvdir.location import NodeTrust, StreamState, Tier
from peer_agent.core.figures import PathFigures
from peer_agent.core.nominees import PeerFigures, claims
from peer_agent.core.orders import Limits, Outcome, Terms
from peer_agent.core.plan import ReadPlan

MIB = 1 << 20
PATH = PathFigures(latency_s=2e-4, bytes_per_s=2e9, round_trip_s=5e-4, reads=10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """runs: of claims, evenly spread; every second one is claimed by half of the nodes. dead: nodes with an open breaker."""

    blocks: int
    nodes: int
    runs: int = 8
    dead: int = 0
    block_bytes: int = 128 << 10


CASES = (
    Case(blocks=32, nodes=1),
    Case(blocks=256, nodes=4),
    Case(blocks=8192, nodes=4),
    Case(blocks=8192, nodes=4, runs=4096),
    Case(blocks=8192, nodes=64),
    Case(blocks=8192, nodes=4, dead=1000),
)


@dataclass(slots=True)
class Stopwatch:
    total_s: float = 0.0
    longest_s: float = 0.0
    by_call: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        began_s = time.thread_time()
        answer = call()
        took_s = time.thread_time() - began_s
        self.total_s += took_s
        self.longest_s = max(self.longest_s, took_s)
        self.by_call[name] = self.by_call.get(name, 0.0) + took_s
        return answer


def node(number: int) -> NodeTrust:
    return NodeTrust(f"n{number}", number, StreamState.SYNCED, "", 0.0, 0, "there:1")


def lookup(case: Case) -> tuple[bytes, list[bytes], list[NodeTrust]]:
    """As a lookup answers: packed runs, holder sets, nodes."""
    count = case.nodes + case.dead
    holders = [struct.pack(f"<{n}I", *(at << 8 | Tier.CPU for at in range(n))) for n in (count, max(1, count // 2))]
    step = case.blocks // case.runs
    return (
        b"".join(struct.pack("<3I", at * step, step, at % 2) for at in range(case.runs)),
        holders,
        list(map(node, range(count))),
    )


def one_load(case: Case) -> tuple[Stopwatch, int]:
    watch, reads, now_s, here = Stopwatch(), 0, 0.0, np.arange(case.blocks)
    dead = {f"n{number}" for number in range(case.dead)}
    alive, broken = PeerFigures(path=PATH, connected=True), PeerFigures(path=PATH, skip_until_s=100.0)
    plan = ReadPlan(
        case.blocks, Terms(block_bytes=case.block_bytes, began_s=0.0, deadline_s=60.0, limits=Limits(max_read_bytes=4 << 30))
    )
    runs, sets, nodes = lookup(case)
    found = watch("claims", lambda: claims(runs, sets, nodes))
    watch("nominate", lambda: plan.nominate(found, me="me", figures=lambda name: broken if name in dead else alive))
    while True:
        asks = watch("next_asks", lambda: plan.next_asks(now_s))
        for ask in asks:
            watch("answered", lambda ask=ask: plan.answered(ask, here, now_s=now_s))
        fetches = watch("next_fetches", lambda: plan.next_fetches(now_s))
        for fetch in fetches:
            reads += 1
            outcome = bytes([Outcome.HERE]) * len(fetch.positions)
            watch("fetched", lambda fetch=fetch, outcome=outcome: plan.fetched(fetch, outcome, now_s=now_s))
        if not asks and not fetches:
            assert set(plan.results) == {2}, "not everything came"
            return watch, reads


def measure(case: Case, rounds: int) -> dict[str, Any]:
    loads = [one_load(case) for _ in range(rounds)]
    middle, reads = sorted(loads, key=lambda load: load[0].total_s)[len(loads) // 2]
    return {
        "blocks": case.blocks,
        "nodes": case.nodes,
        "dead": case.dead,
        "runs": case.runs,
        "reads": reads,
        "ms_per_load": round(middle.total_s * 1e3, 3),
        "longest_call_ms": round(statistics.median(watch.longest_s for watch, _ in loads) * 1e3, 3),
        "ms_by_call": {name: round(seconds * 1e3, 3) for name, seconds in middle.by_call.items()},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    chosen = parser.parse_args()
    print(json.dumps({"bench": "plan", "cases": [measure(case, chosen.rounds) for case in CASES]}, indent=2))
