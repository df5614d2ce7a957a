"""A thousand nodes with churn and failures, in one process: wall time, memory, trust over time, hits and repair traffic.

    .venv/bin/python bench/fleet.py [--nodes 1000] [--duration-s 180] [--plot fleet.svg] [--output json]

Real cores (directory, cursors, repair, index, outboxes, sketches), manual clock, a public trace: kvdir/testing/fleet.py. The
plot needs matplotlib (`pip install "kvdir[bench]"`). Exit code 1 when a trusted figure was wrong or the fleet did not converge.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvdir.cli.bench import machine, show
from kvdir.testing.fleet import Fleet
from kvdir.testing.fleet_faults import enter_faults
from kvdir.testing.fleet_requests import fleet_requests
from kvdir.testing.fleet_results import STATES, FleetOutcome, FleetSetup

TRACE = Path(__file__).parents[1] / "peer_agent" / "demo" / "conversation_1000.jsonl.gz"
COLORS = {"synced": "#7fb069", "gap": "#e6aa68", "repairing": "#d36135", "stale": "#a0a0a0", "unknown": "#404040"}


def run(setup: FleetSetup, trace: Path, *, rounds: int) -> tuple[FleetOutcome, dict[str, Any]]:
    """The outcome, and its figures. Peak memory is of the whole process."""
    fleet = Fleet(setup, progress=_progress())
    enter_faults(fleet)
    began_s = time.perf_counter()
    outcome = fleet.run(fleet_requests(trace, setup, rounds=rounds))
    wall_s = time.perf_counter() - began_s
    reads = outcome.reads
    links_s = sum(sum(sample.states.values()) for sample in outcome.timeline) * setup.sample_s
    applied = outcome.events + outcome.heartbeats
    figures: dict[str, Any] = {
        "nodes": setup.nodes,
        "coordinators": setup.coordinators,
        "simulated_s": setup.duration_s,
        "wall_s": round(wall_s, 1),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "events_and_heartbeats": applied,
        "events_and_heartbeats_per_wall_s": round(applied / wall_s),
        "requests": reads.requests,
        "blocks": reads.blocks,
        "hit_local_share": round(reads.hit_local / reads.blocks, 4),
        "hit_peer_share": round(reads.hit_peer / reads.blocks, 4),
        "failed_lookups": outcome.failed_lookups,
        "stale_claims_share": round(reads.stale_blocks / max(1, reads.claimed_blocks), 5),
        "messages": reads.messages,
        "messages_lost": reads.messages_lost + outcome.messages_cut,
        "evicted_blocks": outcome.evicted_blocks,
        "trust_checks": outcome.trust_checks,
        "trust_violations": outcome.trust_violations,
        "settle_s": outcome.settle_s,
        "differences_after": outcome.differences,
        **{f"{state}_share": round(_share(outcome, state), 4) for state in STATES},
    }
    for kind, cost in outcome.repairs.items():
        figures[f"repair_{kind}_asked"] = cost.asked
        figures[f"repair_{kind}_bytes"] = cost.bytes
        figures[f"repair_{kind}_bytes_per_stream_s"] = round(cost.bytes / max(1.0, links_s), 2)
    return outcome, figures


def plot(outcome: FleetOutcome, figures: Mapping[str, Any], path: Path) -> None:
    """Three graphs over time: states of streams, hits, repair bytes; faults as lines. The suffix chooses PNG or SVG."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "kvdir"
    from matplotlib import pyplot as plt

    timeline = outcome.timeline
    at_s = [sample.at_s for sample in timeline]
    graph, (states, hits, repair) = plt.subplots(3, 1, figsize=(9, 8), sharex=True, constrained_layout=True)
    graph.suptitle(
        f"{figures['nodes']} nodes, {figures['coordinators']} coordinators: {figures['trust_violations']} trusted figures wrong"
    )
    totals = [max(1, sum(sample.states.values())) for sample in timeline]
    shares = [[100 * sample.states[state] / total for sample, total in zip(timeline, totals, strict=True)] for state in STATES]
    states.stackplot(at_s, *shares, labels=STATES, colors=[COLORS[state] for state in STATES])
    states.set_ylabel("streams at coordinators, %")
    states.set_ylim(0, 100)
    states.legend(loc="lower left", ncols=len(STATES), fontsize=8)
    for name in ("hit_local", "hit_peer"):
        hits.plot(
            at_s, _smooth([getattr(s, name) for s in timeline], [s.blocks for s in timeline]), label=name.replace("_", " ")
        )
    hits.set_ylabel("blocks of requests, %, 10 points")
    hits.legend(loc="upper left", fontsize=8)
    for kind in timeline[-1].repair_bytes:
        repair.plot(at_s, [max(1, sample.repair_bytes[kind]) / 2**20 for sample in timeline], label=kind)
    repair.set_ylabel("repair so far, MiB")
    repair.set_xlabel("simulated seconds")
    repair.legend(loc="upper left", fontsize=8)
    for number, (moment_s, words) in enumerate(outcome.faults[1:], start=1):
        for each in (states, hits, repair):
            each.axvline(moment_s, color="black", linewidth=0.6, linestyle=":")
        hits.annotate(str(number), (moment_s, hits.get_ylim()[1]), fontsize=8, va="top")
        print(f"  {number}: at {moment_s:g} s {words}", file=sys.stderr)
    graph.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _smooth(part: list[int], whole: list[int], window: int = 10) -> list[float]:
    return [
        100 * sum(part[max(0, at - window) : at + 1]) / max(1, sum(whole[max(0, at - window) : at + 1]))
        for at in range(len(part))
    ]


def _share(outcome: FleetOutcome, state: str) -> float:
    return sum(s.states[state] for s in outcome.timeline) / max(1, sum(sum(s.states.values()) for s in outcome.timeline))


def _progress() -> Any:
    served = 0

    def advance() -> None:
        nonlocal served
        served += 1
        if served % 100 == 0 and sys.stderr.isatty():
            print(f"\r... {served} requests", end="", file=sys.stderr, flush=True)

    return advance


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = FleetSetup(duration_s=180.0)
    parser.add_argument("--nodes", type=int, default=defaults.nodes)
    parser.add_argument("--coordinators", type=int, default=defaults.coordinators)
    parser.add_argument("--duration-s", type=float, default=defaults.duration_s)
    parser.add_argument("--blocks-per-node", type=int, default=defaults.blocks_per_node)
    parser.add_argument("--heartbeat-s", type=float, default=defaults.heartbeat_s)
    parser.add_argument("--max-index-bytes", type=int, default=0, help="bound of every coordinator's index; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake format, .jsonl or .jsonl.gz")
    parser.add_argument("--rounds", type=int, default=3, help="how often the trace is served, side by side, with other blocks")
    parser.add_argument("--plot", type=Path, help="write a graph, .png or .svg")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = vars(parser.parse_args())
    trace, rounds, path, output = (options.pop(name) for name in ("trace", "rounds", "plot", "output"))
    outcome, figures = run(FleetSetup(**options), trace, rounds=rounds)
    if path is not None:
        plot(outcome, figures, path)
    if output == "json":
        document = {
            "bench": "fleet",
            "machine": machine(),
            **figures,
            "faults": outcome.faults,
            "violations": outcome.violations,
        }
        print(json.dumps(document | {"timeline": [dataclasses.asdict(sample) for sample in outcome.timeline]}))
    else:
        for name, value in [*machine().items(), *figures.items()]:
            print(f"{name:36} {show(value):>24}")
        for words in outcome.violations:
            print(f"  {words}")
    return 1 if outcome.trust_violations or outcome.settle_s is None or outcome.differences else 0


if __name__ == "__main__":
    sys.exit(main())
