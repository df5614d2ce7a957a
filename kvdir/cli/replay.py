"""`kvdir replay`: a trace on the real cores with a simulated network (kvdir/testing/simulate.py).

Owns the options and the print, nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdir.cli.output import emit, facts, output_option, progress_bar, progress_option, stack, table
from kvdir.config import show_bytes

if TYPE_CHECKING:
    from kvdir.testing.sim_results import Setup
    from kvdir.testing.trace import Request

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
@click.option("--compare", is_flag=True, help="Replay it without loss and delay, too, and say what they cost in hits.")
@click.option("--sample-s", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Step of the time line.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of routing and loss; equal seeds, equal results.")
@output_option
@progress_option
def replay(trace: Path, requests: int | None, compare: bool, output: str, progress: bool | None, **conditions: Any) -> None:
    """Replay TRACE (Mooncake format, .jsonl or .jsonl.gz) in process: hit rate against staleness.

    Directory, stream cursors, outboxes and index are the real ones; time, network and node memory are simulated. No bytes move
    and nothing listens. With --output json, `timeline` has one point every --sample-s: hits, synced streams, trusted
    figures, and by how many blocks the directory differs from the truth (docs/replay.md shows how to plot it).

    \b
    Examples:
      kvdir replay trace.jsonl --loss 0.2 --compare
      kvdir replay trace.jsonl --loss 0.2 --no-repair --literal --message-blocks 1 --requests 2000
      kvdir replay trace.jsonl --policy affinity --output json | jq .hit_ratio
    """
    from kvdir.testing.routing import Policy
    from kvdir.testing.sim_results import Setup
    from kvdir.testing.trace import read_trace

    setup = Setup(**{**conditions, "policy": Policy(conditions["policy"])})
    setups = [setup]
    if compare:
        if not setup.loss and not setup.delay_s:
            raise click.UsageError("--compare needs something to compare: add --loss or --delay-s")
        setups.append(dataclasses.replace(setup, loss=0.0, delay_s=0.0))
    served = list(read_trace(trace, limit=requests))
    with progress_bar("requests", len(served) * len(setups), show=progress) as advance:
        results = [_run(each, served, advance) for each in setups]
    document = results[0] if not compare else {**results[0], "compare": comparison(results[0], results[1])}
    emit(document, lambda: _view(document), output=output)


def _run(setup: Setup, served: Sequence[Request], advance: Callable[..., None]) -> dict[str, Any]:
    from kvdir.testing.simulate import Simulation

    outcome = Simulation(setup, progress=advance).run(served)
    return figures(dataclasses.asdict(setup), dataclasses.asdict(outcome))


def comparison(given: Mapping[str, Any], ideal: Mapping[str, Any]) -> dict[str, Any]:
    """The given run beside the same without loss and delay. *_kept: shares of the ideal run's hits; None if it had none."""
    hits = given["hit_local"] + given["hit_peer"]
    ideal_hits = ideal["hit_local"] + ideal["hit_peer"]
    return {
        "hit_peer_kept": round(given["hit_peer"] / ideal["hit_peer"], 4) if ideal["hit_peer"] else None,
        "hits_kept": round(hits / ideal_hits, 4) if ideal_hits else None,
        "without_loss_and_delay": {key: value for key, value in ideal.items() if key not in ("timeline", "untrusted")},
    }


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
    missed = d["missed_unknown"] + d["missed_stale"] + d["missed_unasked"]
    pairs = [
        ("requests, blocks", f"{d['requests']:,}, {d['blocks']:,}"),
        ("hit ratio", f"{d['hit_ratio']:.1%} = local {d['hit_ratio_local']:.1%} + peers {d['hit_ratio_peer']:.1%}"),
        ("recomputed", f"{d['recomputed']:,}, of which {missed:,} were on some node:"),
        ("  not known yet", f"{d['missed_unknown']:,} (no holder was named: the event was lost or under way)"),
        ("  stale claims", f"{d['missed_stale']:,} (a holder was named, the tries went to others that had lost theirs)"),
        ("  out of tries", f"{d['missed_unasked']:,} (a holder was named, others were asked, nothing was stale)"),
        ("owners asked", f"{d['probes']:,}, of which {d['empty_probes']:,} held nothing that was wanted"),
        ("stale claims", f"{d['stale_blocks']:,} of {d['claimed_blocks']:,} blocks ({d['stale_ratio']:.2%})"),
        ("messages", f"{d['messages']:,}, {d['messages_lost']:,} lost; {d['gaps']:,} gaps"),
        ("repairs", "; ".join(_repair_words(kind, cost) for kind, cost in d["repairs"].items())),
        ("trusted but wrong", f"{d['trust_violations']:,} (must be 0)"),
        ("converged", settle),
        ("load imbalance", f"{d['imbalance']:.2f} (busiest node over mean)"),
    ]
    parts = [facts([*pairs, *_compare_pairs(d)], title="replay"), _untrusted_view(d)]
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
    return stack(*parts, table(columns, rows, title="over time"))


def _repair_words(kind: str, cost: Mapping[str, Any]) -> str:
    return f"{cost['done']:,} of {cost['asked']:,} {kind} ({show_bytes(cost['bytes'])})"


def _compare_pairs(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    compared = document.get("compare")
    if compared is None:
        return []
    ideal = compared["without_loss_and_delay"]

    def kept(share: float | None, count: int) -> str:
        return "-" if share is None else f"{share:.2%} of the {count:,} blocks without loss and delay"

    return [
        ("peer hits kept", kept(compared["hit_peer_kept"], ideal["hit_peer"])),
        ("all hits kept", kept(compared["hits_kept"], ideal["hit_local"] + ideal["hit_peer"])),
    ]


def _untrusted_view(document: Mapping[str, Any]) -> object:
    rows = [
        (time["node"], time["intervals"], f"{time['total_s']:.2f}", f"{time['longest_s']:.2f}", f"{time['share']:.2%}")
        for time in document["untrusted"]
    ]
    columns = ["stream", "intervals #", "untrusted s #", "longest s #", "of the time #"]
    caption = f"all streams: {document['untrusted_share']:.2%} of the time"
    return table(columns, rows, title="when figures were not trusted", caption=caption)
