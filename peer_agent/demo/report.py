"""What the demo says at the end: one object for programs, one table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvdir.cli.output import facts, stack, table
from kvdir.config import show_bytes
from kvdir.core.diff import Verdict
from peer_agent.demo.leaks import Life
from peer_agent.demo.workload import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFigures:
    """What the directory says about a node, and what its agent says itself. state: of the stream; "unknown" without one.

    trusted: whether every one of the directory's figures is.
    """

    node: str
    state: str
    trusted: bool
    blocks: int
    bytes: int
    owner_blocks: int
    owner_bytes: int

    @property
    def equal(self) -> bool:
        return (self.blocks, self.bytes) == (self.owner_blocks, self.owner_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The directory after the last request, once the streams had settled or the wait for that had ended.

    untrusted_s, repairs (asked for, by kind): sums over all streams, that of a killed agent included. agreement: of all
    coordinators, by digest.
    """

    streams_synced: int
    streams_total: int
    views_trusted: int
    views_total: int
    nodes: tuple[NodeFigures, ...]
    untrusted_s: float
    repairs: Mapping[str, int]
    waited_s: float
    agreement: Verdict = Verdict.EQUAL

    @property
    def equal(self) -> bool:
        """Every figure of the directory equals the agent's own."""
        return all(node.equal for node in self.nodes)

    @property
    def agrees(self) -> bool:
        """Equal, and said to be so: every node has a stream, synced, with trusted figures only; and so at each coordinator."""
        synced = all(node.trusted and node.state == "synced" for node in self.nodes)
        return self.equal and synced and self.agreement is Verdict.EQUAL


@dataclass(frozen=True, slots=True)
class Run:
    """Conditions of the run and its figures that are not counted in the requests.

    agent_down_s: from the kill until engines could use the agent again; None when none was killed. coordinator_down_s: from the
    kill until it was ready again, empty. store: that the coordinators share, without its password; empty: none.
    """

    nodes: int
    block_bytes: int
    blocks_per_node: int
    loss: float
    killed: bool
    agent_down_s: float | None
    seconds: float
    hit_ratio_without_peers: float
    coordinators: int = 1
    store: str = ""
    coordinator_killed: bool = False
    coordinator_down_s: float | None = None


def document(run: Run, tally: Tally, settled: Settled, lives: Sequence[Life]) -> dict[str, Any]:
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
        "directory_blocks": sum(node.blocks for node in settled.nodes),
        "owner_blocks": sum(node.owner_blocks for node in settled.nodes),
        "directory_agrees": settled.agrees,
        "views_equal_owner_counts": settled.equal,
        "untrusted_seconds": round(settled.untrusted_s, 3),
        "repairs": dict(settled.repairs),
        "streams": [{**asdict(node), "equal": node.equal} for node in settled.nodes],
        "settle_s": round(settled.waited_s, 3),
        "leaks": [fault for life in lives for fault in life.faults()],
        "leaks_watched": sum(life.tells for life in lives),
        "processes": [life.document() for life in lives],
        "nodes": run.nodes,
        "block_bytes": run.block_bytes,
        "blocks_per_node": run.blocks_per_node,
        "loss": run.loss,
        "killed": run.killed,
        "agent_down_s": run.agent_down_s,
        "coordinators": run.coordinators,
        "store": run.store,
        "coordinators_agree": settled.agreement is Verdict.EQUAL,
        "coordinators_verdict": settled.agreement.value,
        "coordinator_killed": run.coordinator_killed,
        "coordinator_down_s": run.coordinator_down_s,
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
        ("untrusted", f"{figures['untrusted_seconds']:.1f} s, summed over the streams"),
        ("repairs asked for", ", ".join(f"{count:,} {kind}" for kind, count in figures["repairs"].items())),
    ]
    rest.append(("leaks", _leaks(figures)))
    if figures["agent_down_s"] is not None:
        rest.insert(4, ("killed agent was back", f"after {figures['agent_down_s']:.1f} s"))
    emptied = "" if figures["store"] else ", empty"
    if figures["coordinator_down_s"] is not None:
        rest.insert(4, ("killed coordinator was back", f"after {figures['coordinator_down_s']:.1f} s{emptied}"))
    if figures["store"]:
        rest.append(("coordinators", f"{figures['coordinators']}, with one directory in {figures['store']}"))
    elif figures["coordinators"] > 1:
        rest.append(("coordinators", f"{figures['coordinators']}, at the end {figures['coordinators_verdict']}"))
    return stack(head, table(["", "blocks #", "share #"], counts), facts(rest), _streams(figures))


def _leaks(figures: dict[str, Any]) -> str:
    if figures["leaks"]:
        return "; ".join(figures["leaks"])
    watched, lives = figures["leaks_watched"], len(figures["processes"])
    return (
        "none" if watched == lives else f"none of slots and locks; growth judged for {watched} of {lives} processes (too short)"
    )


def _streams(figures: dict[str, Any]) -> object:
    """The directory's cumulative figures and the agents' own counts, side by side."""
    rows = [
        (
            stream["node"],
            stream["state"],
            "yes" if stream["trusted"] else "no",
            f"{stream['blocks']:,}",
            f"{stream['owner_blocks']:,}",
            show_bytes(stream["bytes"]),
            show_bytes(stream["owner_bytes"]),
        )
        for stream in figures["streams"]
    ]
    heads = ["node", "stream", "trusted", "blocks #", "agent #", "bytes #", "agent #"]
    unequal = ", ".join(stream["node"] for stream in figures["streams"] if not stream["equal"])
    verdict = f"not equal: {unequal}" if unequal else "every figure equals the agent's own"
    waited = "" if figures["directory_agrees"] else f"; not settled within {figures['settle_s']:.0f} s"
    return table(heads, rows, title="the directory's figures beside the agents' own", caption=verdict + waited)


def ratio(part: int, whole: int) -> float:
    """Four digits; 0 of nothing is 0."""
    return round(part / whole, 4) if whole else 0.0


def percentile(values: Sequence[int], percent: int) -> int:
    """The nearest-rank percentile; 0 when there is none."""
    if not values:
        return 0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, -(-percent * len(ordered) // 100) - 1)]
