"""`kvdir replay`: a trace on the real cores with a simulated network (kvdir/testing/simulate.py).

Owns the options and the print, nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvdir.cli.output import emit, facts, output_option, progress_bar, progress_option, stack, table

TIMELINE_ROWS = 20


@click.command()
@click.argument("trace", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--requests", type=click.IntRange(min=1), help="Only the first N requests.  [default: all]")
@click.option("--nodes", type=click.IntRange(1, 4096), default=16, show_default=True, help="Number of nodes.")
@click.option("--blocks-per-node", type=click.IntRange(min=1), default=2000, show_default=True, help="Memory of a node, LRU.")
@click.option(
    "--policy",
    type=click.Choice(["p2c", "random", "affinity"]),
    default="p2c",
    show_default=True,
    help="Which node gets a request: the less busy of two random ones, any, or by the first blocks of the prompt.",
)
@click.option(
    "--loss", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True, help="Share of messages lost."
)
@click.option("--delay-s", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Delay of every message.")
@click.option(
    "--heartbeat-s", type=click.FloatRange(min=0.01), default=1.0, show_default=True, help="Distance of two heartbeats."
)
@click.option(
    "--message-blocks",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Most blocks in one message (1: every block is lost on its own; slow). 0: no limit.",
)
@click.option(
    "--owner-answers/--literal",
    default=True,
    show_default=True,
    help="Ask the owner for the whole remaining list, or only for what the directory claims it holds.",
)
@click.option("--repair/--no-repair", default=True, show_default=True, help="Whether requests for repair reach the nodes.")
@click.option("--sample-s", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Step of the time line.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of routing and loss; equal seeds, equal results.")
@output_option
@progress_option
def replay(trace: Path, requests: int | None, output: str, progress: bool | None, **conditions: Any) -> None:
    """Replay TRACE (Mooncake format, .jsonl or .jsonl.gz) in process: hit rate against staleness.

    Directory, stream cursors, outboxes and index are the real ones; time, network and node memory are simulated. No bytes move
    and nothing listens. With --output json, `timeline` has one point every --sample-s: hits, synced streams, trusted
    figures, and by how many blocks the directory differs from the truth (docs/replay.md shows how to plot it).

    \b
    Examples:
      kvdir replay trace.jsonl --loss 0.05 --delay-s 1
      kvdir replay trace.jsonl --loss 0.2 --no-repair --literal --message-blocks 1 --requests 2000
      kvdir replay trace.jsonl --policy affinity --output json | jq .hit_ratio
    """
    from kvdir.testing.routing import Policy
    from kvdir.testing.sim_results import Setup
    from kvdir.testing.simulate import Simulation
    from kvdir.testing.trace import read_trace

    setup = Setup(**{**conditions, "policy": Policy(conditions["policy"])})
    total = requests or sum(1 for _ in read_trace(trace))
    with progress_bar("requests", total, show=progress) as advance:
        outcome = Simulation(setup, progress=advance).run(read_trace(trace, limit=requests))
    document = figures(dataclasses.asdict(setup), dataclasses.asdict(outcome))
    emit(document, lambda: _view(document), output=output)


def figures(setup: Mapping[str, Any], outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object: the outcome, the ratios made from it, and the conditions."""
    blocks = outcome["blocks"]
    ratios = {
        "hit_ratio": _ratio(outcome["hit_local"] + outcome["hit_peer"], blocks),
        "hit_ratio_local": _ratio(outcome["hit_local"], blocks),
        "hit_ratio_peer": _ratio(outcome["hit_peer"], blocks),
        "stale_ratio": _ratio(outcome["stale_blocks"], outcome["claimed_blocks"]),
    }
    return {**ratios, **outcome, "setup": dict(setup)}


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _view(document: Mapping[str, Any]) -> object:
    d = document
    settle = f"{d['settle_s']:.2f} s after the last loss" if d["settle_s"] is not None else "no (see --repair)"
    result = facts(
        [
            ("requests, blocks", f"{d['requests']:,}, {d['blocks']:,}"),
            ("hit ratio", f"{d['hit_ratio']:.1%} = local {d['hit_ratio_local']:.1%} + peers {d['hit_ratio_peer']:.1%}"),
            ("recomputed", f"{d['recomputed']:,}"),
            ("owners asked", f"{d['probes']:,}, of which {d['empty_probes']:,} held nothing that was wanted"),
            ("stale claims", f"{d['stale_blocks']:,} of {d['claimed_blocks']:,} blocks ({d['stale_ratio']:.2%})"),
            ("messages", f"{d['messages']:,}, {d['messages_lost']:,} lost"),
            ("repairs", f"{d['gaps']:,} gaps, {d['replays']:,} replays, {d['snapshots']:,} snapshots asked for"),
            ("untrusted", f"{d['untrusted_share']:.1%} of all stream time"),
            ("trusted but wrong", f"{d['trust_violations']:,} (must be 0)"),
            ("converged", settle),
            ("load imbalance", f"{d['imbalance']:.2f} (busiest node over mean)"),
        ],
        title="replay",
    )
    samples = d["timeline"]
    shown = samples[:: max(1, -(-len(samples) // TIMELINE_ROWS))]
    rows = [
        (
            f"{s['at_s']:.0f}",
            f"{_ratio(s['hit_local'] + s['hit_peer'], s['blocks']):.1%}",
            f"{s['streams_synced']}",
            f"{s['views_trusted']}",
            f"{s['missing_events']:,}",
            f"{s['error_blocks']:,}",
        )
        for s in shown
    ]
    columns = ["s #", "hits #", "streams synced #", "figures trusted #", "events missing #", "blocks off #"]
    return stack(result, table(columns, rows, title="over time"))
