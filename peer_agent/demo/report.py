"""What the demo says at the end: one object for programs, one table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvdir.cli.output import facts, stack, table
from kvdir.config import show_bytes
from peer_agent.demo.workload import Tally


@dataclass(frozen=True, slots=True)
class Settled:
    """The directory after the last request, once the streams had settled or the wait for that had ended.

    agrees: whether for every node the directory's count of blocks equals the owner's own, as of the same sequence number.
    """

    streams_synced: int
    streams_total: int
    views_trusted: int
    views_total: int
    directory_blocks: int
    owner_blocks: int
    agrees: bool
    waited_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """Conditions of the run and its figures that are not counted in the requests.

    agent_down_s: from the kill until engines could use the agent again; None when none was killed.
    """

    nodes: int
    block_bytes: int
    blocks_per_node: int
    loss: float
    killed: bool
    agent_down_s: float | None
    seconds: float
    hit_ratio_without_peers: float


def document(run: Run, tally: Tally, settled: Settled) -> dict[str, Any]:
    """The JSON object; its keys are an interface."""
    return {
        "requests": tally.requests,
        "blocks": tally.blocks,
        "hit_local": tally.hit_local,
        "hit_peer": tally.hit_peer,
        "recomputed": tally.recomputed,
        "stale": tally.stale,
        "late": tally.late,
        "corrupt": tally.corrupt + tally.wrong,
        "wrong_bytes_handed_out": tally.wrong,
        "peer_bytes": tally.peer_bytes,
        "failed_requests": tally.failed_requests,
        "failures": tally.failures[:10],
        "stored": tally.stored,
        "not_stored": tally.not_stored,
        "lookups": len(tally.lookup_us),
        "lookup_p50_us": percentile(tally.lookup_us, 50),
        "lookup_p99_us": percentile(tally.lookup_us, 99),
        "load_p50_us": percentile(tally.load_us, 50),
        "load_p99_us": percentile(tally.load_us, 99),
        "hit_ratio": ratio(tally.hit_local + tally.hit_peer, tally.blocks),
        "hit_ratio_without_peers": round(run.hit_ratio_without_peers, 4),
        "streams_synced": settled.streams_synced,
        "streams_total": settled.streams_total,
        "views_trusted": settled.views_trusted,
        "views_total": settled.views_total,
        "directory_blocks": settled.directory_blocks,
        "owner_blocks": settled.owner_blocks,
        "directory_agrees": settled.agrees,
        "settle_s": round(settled.waited_s, 3),
        "nodes": run.nodes,
        "block_bytes": run.block_bytes,
        "blocks_per_node": run.blocks_per_node,
        "loss": run.loss,
        "killed": run.killed,
        "agent_down_s": run.agent_down_s,
        "seconds": round(run.seconds, 2),
    }


def view(figures: dict[str, Any]) -> object:
    """The table for people."""
    blocks = figures["blocks"]

    def share(key: str) -> tuple[str, str, str]:
        return key.replace("_", " "), f"{figures[key]:,}", f"{ratio(figures[key], blocks):.1%}"

    counts = [("blocks asked for", f"{blocks:,}", "")]
    counts += [share(key) for key in ("hit_local", "hit_peer", "recomputed", "stale", "late", "corrupt")]
    head = (
        f"{figures['requests']:,} requests on {figures['nodes']} nodes of {figures['blocks_per_node']:,} blocks of "
        f"{show_bytes(figures['block_bytes'])}, {figures['seconds']:.1f} s"
    )
    rest = [
        ("hit ratio", f"{figures['hit_ratio']:.1%}, without peers {figures['hit_ratio_without_peers']:.1%}"),
        ("moved between nodes", show_bytes(figures["peer_bytes"])),
        ("lookup p50 / p99", f"{figures['lookup_p50_us']:,} / {figures['lookup_p99_us']:,} us of {figures['lookups']:,}"),
        ("load p50 / p99", f"{figures['load_p50_us']:,} / {figures['load_p99_us']:,} us a request"),
        ("failed requests", f"{figures['failed_requests']:,}"),
        ("streams synced", f"{figures['streams_synced']} of {figures['streams_total']} after {figures['settle_s']:.1f} s"),
        ("figures trusted", f"{figures['views_trusted']} of {figures['views_total']}"),
        ("directory", _agreement(figures)),
    ]
    if figures["agent_down_s"] is not None:
        rest.insert(4, ("killed agent was back", f"after {figures['agent_down_s']:.1f} s"))
    return stack(head, table(["", "blocks #", "share #"], counts), facts(rest))


def _agreement(figures: dict[str, Any]) -> str:
    both = f"{figures['directory_blocks']:,} blocks, the nodes themselves say {figures['owner_blocks']:,}"
    return both if figures["directory_agrees"] else f"{both} (not settled in {figures['settle_s']:.0f} s)"


def ratio(part: int, whole: int) -> float:
    """Four digits; 0 of nothing is 0."""
    return round(part / whole, 4) if whole else 0.0


def percentile(values: Sequence[int], percent: int) -> int:
    """The nearest-rank percentile; 0 when there is none."""
    if not values:
        return 0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, -(-percent * len(ordered) // 100) - 1)]
