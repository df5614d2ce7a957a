"""A copy as the page reads it: one JSON object that stands alone, so that one which is skipped is no loss. Pure.

Rules: every figure that is folded from a lossy stream is [value, why it is not trusted], the second empty when it is; nothing
is cut short without saying how much; no fingerprint is in it, only the beginning of one. Bounded: notes, namespaces and
sources are; nodes are as many as there are. Ages are seconds at the moment of the copy.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvdir.core.instance import parse
from kvdir.core.recent_lookups import RecentLookup
from kvdir.core.story import StoryEntry
from kvdir.core.trust import Cumulative
from kvdir.core.views import HoldingView, NamespaceView, NodeView
from kvdir.core.who_holds import Claim, WhoHolds
from kvdir.errors import NamespaceError
from kvdir.location import NodeTrust, StreamState, Tier
from kvdir.namespace import Namespace
from kvdir.server.page.copies import Copy
from kvdir.server.page.rates import Point

NAMESPACES = 12
CLAIMS = 50
_FINGERPRINT = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b")
_TIERS = {int(tier): tier.name.lower() for tier in Tier}

Figure = tuple[int, str]
"""(value, why it is not trusted; "" when it is)"""


@dataclass(slots=True)
class Sum:
    """Of figures; untrusted with the reason of the first one that is."""

    blocks: int = 0
    bytes: int = 0
    why: str = ""
    nodes: set[str] = field(default_factory=set)

    def add(self, node: str, blocks: Cumulative, bytes: Cumulative) -> None:
        self.blocks += blocks.value
        self.bytes += bytes.value
        if blocks.value:
            self.nodes.add(node)
        if not blocks.trusted:
            self.doubt(node, blocks.reason)

    def doubt(self, node: str, reason: str) -> None:
        self.why = self.why or f"{node}: {reason or 'untrusted'}"

    @property
    def figures(self) -> tuple[Figure, Figure]:
        return (self.blocks, self.why), (self.bytes, self.why)


def document(copy: Copy, point: Point | None, *, number: int, viewers: int) -> dict[str, Any]:
    """number: of this document; the client tells by it what it missed."""
    live = [view for view in copy.nodes if view.trust.state is not StreamState.FENCED]
    states = Counter(view.trust.state.name.lower() for view in copy.nodes)
    tiers, namespaces = _sums(live)
    return {
        "number": number,
        "at_ms": copy.unix_ms,
        "viewers": viewers,
        "coordinator": _coordinator(copy),
        "states": states,
        "tiers": {name: item.figures for name, item in tiers.items()},
        "used_bytes": _used(live),
        "capacity_bytes": sum(view.capacity_bytes.value for view in live),
        "point": point,
        "nodes": [_node(view, copy) for view in copy.nodes],
        "namespaces": _namespaces(namespaces, copy.status.namespaces),
        "more_namespaces": max(0, len(namespaces) - NAMESPACES),
        "notes": [_note(copy.noted - at, note, copy.now_s) for at, note in enumerate(copy.notes)],
        "noted": copy.noted,
        "lookups": [recent_document(item, now_s=copy.now_s) for item in copy.lookups],
    }


def _used(live: list[NodeView]) -> Figure:
    """Each node's is its own statement: of a node that is not heard it is an old one."""
    old = next((view.trust for view in live if view.trust.state is StreamState.STALE), None)
    why = f"{old.node}: as of {old.age_s:.0f} s ago" if old is not None else ""
    return sum(view.used_bytes.value for view in live), why


def _coordinator(copy: Copy) -> dict[str, Any]:
    status = copy.status
    return {
        "life": copy.life,
        "name": status.coordinator,
        "version": status.version,
        "uptime_s": round(status.uptime_s, 1),
        "warming": status.warming,
        "partial": status.partial,
        "remarks": copy.remarks,
        "store": status.store,
        "store_fault": status.store_fault,
        "blocks": status.blocks,
        "index_bytes": status.index_bytes,
        "max_index_bytes": status.max_index_bytes,
        "evicted_blocks": status.evicted_blocks,
        "restored_blocks": status.restored_blocks,
        "lookups": status.lookups,
        "lookup_blocks": status.lookup_blocks,
        "lookup_hits": status.lookup_hits,
        "refuted_blocks": copy.stale_blocks,
        "events_applied": status.events_applied,
        "watchers": copy.watchers,
        "lookup_workers": copy.lookup_workers,
        "heartbeat_s": copy.heartbeat_s,
        "stale_after_s": copy.stale_after_s,
        "expire_after_s": copy.expire_after_s,
    }


def _node(view: NodeView, copy: Copy) -> dict[str, Any]:
    trust, stream = view.trust, parse(view.trust.node)
    return {
        **_trust(trust),
        "of": stream.node if stream.engine else "",
        "engine": stream.engine,
        "rank": stream.dp_rank,
        "hidden": trust.state is not StreamState.FENCED and trust.age_s > copy.expire_after_s,
        "lag": view.announced_seq - view.last_seq,
        "gaps": view.gaps,
        "repairs": (view.replays, view.sketches, view.snapshots),
        "missed": view.missed_events,
        "dropped": view.dropped_events,
        "untrusted_s": round(view.untrusted_s, 1),
        "used": view.used_bytes.value,
        "capacity": view.capacity_bytes.value,
        "tiers": {name: item.figures for name, item in _tiers(view.holdings, trust).items()},
        "reads": _reads(view),
    }


def _trust(trust: NodeTrust) -> dict[str, Any]:
    return {
        "node": trust.node,
        "state": trust.state.name.lower(),
        "reason": trust.reason,
        "age_s": round(trust.age_s, 1),
        "confirmed": round(trust.confirmed, 4),
        "missing": trust.missing_events,
    }


def _reads(view: NodeView) -> dict[str, Any] | None:
    reads = view.reads
    if reads is None:
        return None
    return {
        "hit_local": reads.hit_local,
        "hit_peer": reads.hit_peer,
        "miss": reads.miss,
        "stale": reads.stale,
        "corrupt": reads.corrupt,
        "late": reads.late,
        "skipped": reads.skipped,
        "bytes": reads.read_bytes,
        "sources": [(source.node, source.bytes) for source in reads.sources],
    }


def _tiers(holdings: Iterable[HoldingView], trust: NodeTrust) -> dict[str, Sum]:
    out: defaultdict[str, Sum] = defaultdict(Sum)
    for holding in holdings:
        out[_TIERS.get(holding.tier, str(holding.tier))].add(trust.node, holding.blocks, holding.bytes)
    return out


def _sums(live: list[NodeView]) -> tuple[dict[str, Sum], dict[bytes, Sum]]:
    """By tier, and by namespace. A stream that is not synced makes untrusted all that it may have changed."""
    tiers: defaultdict[str, Sum] = defaultdict(Sum)
    namespaces: defaultdict[bytes, Sum] = defaultdict(Sum)
    for view in live:
        for holding in view.holdings:
            tiers[_TIERS.get(holding.tier, str(holding.tier))].add(view.trust.node, holding.blocks, holding.bytes)
            namespaces[holding.namespace_digest].add(view.trust.node, holding.blocks, holding.bytes)
    for view in live:
        if view.trust.state is not StreamState.SYNCED:
            for item in (*tiers.values(), *(namespaces[digest] for digest in view.namespaces)):
                item.doubt(view.trust.node, view.trust.reason)
    return tiers, namespaces


def _namespaces(sums: dict[bytes, Sum], known: Iterable[NamespaceView]) -> list[dict[str, Any]]:
    views = {view.digest: view for view in known}
    most = sorted(sums.items(), key=lambda item: (-item[1].bytes, -item[1].blocks, item[0]))[:NAMESPACES]
    out = []
    for digest, item in most:
        blocks, size = item.figures
        out.append({**name_of(digest, views.get(digest)), "blocks": blocks, "bytes": size, "nodes": len(item.nodes)})
    return out


def name_of(digest: bytes, view: NamespaceView | None) -> dict[str, Any]:
    """A namespace for people."""
    if view is None:
        return {"digest": digest.hex(), "model": "", "words": "not announced here", "tenant": ""}
    return {"digest": digest.hex(), **_in_words(view.canonical_json), "block_bytes": view.block_bytes}


@functools.lru_cache(maxsize=2048)
def _in_words(canonical: str) -> dict[str, str]:
    try:
        namespace = Namespace.from_canonical(canonical)
    except NamespaceError:
        return {"model": "", "words": "of another release", "tenant": ""}
    group = "" if namespace.part < 0 else f"group {namespace.part} ({namespace.group.kind})"
    adapter = "" if namespace.adapter == "none" else f"adapter {namespace.adapter}"
    told = "told by engines" if namespace.is_announced else namespace.kv_dtype
    parts = (told, f"{namespace.block_tokens} tokens", group, adapter, namespace.parallel)
    tenant = "" if namespace.tenant == "none" else namespace.tenant
    return {"model": namespace.model, "words": ", ".join(filter(None, parts)), "tenant": tenant}


def _note(number: int, note: StoryEntry, now_s: float) -> dict[str, Any]:
    return {"number": number, **story_document(note, now_s=now_s)}


def story_document(entry: StoryEntry, *, now_s: float) -> dict[str, Any]:
    return {
        "age_s": round(max(0.0, now_s - entry.at_s), 1),
        "node": entry.node,
        "epoch": f"{entry.epoch:016x}",
        "kind": str(entry.kind),
        "words": _FINGERPRINT.sub(r"\1…", entry.words),
        "seq": entry.seq,
    }


def recent_document(item: RecentLookup, *, now_s: float) -> dict[str, Any]:
    return {
        "age_s": round(max(0.0, now_s - item.at_s), 1),
        "namespace": item.namespace_digest.hex(),
        "asked": item.asked,
        "hits": item.hits,
        "nodes": [_trust(trust) for trust in item.nodes],
        "more": item.more,
        "below_trust": item.below_trust,
        "incomplete": item.incomplete,
        "request_id": item.request_id,
        "trace_id": item.trace_id,
    }


def explained(answer: WhoHolds, view: NamespaceView | None) -> dict[str, Any]:
    """Who holds what, for the explainer. claims: those with most blocks, at most CLAIMS; runs name them by their places."""
    order = sorted(range(len(answer.claims)), key=lambda number: -answer.claims[number].blocks)[:CLAIMS]
    place = {number: at for at, number in enumerate(order)}
    return {
        "namespace": name_of(answer.namespace_digest, view),
        "asked": answer.asked,
        "hits": answer.hits,
        "warming": answer.warming,
        "incomplete": answer.incomplete,
        "runs": [(start, count, [place[at] for at in claims if at in place]) for start, count, claims in answer.runs],
        "claims": [_claim(answer.claims[number]) for number in order],
        "more_claims": len(answer.claims) - len(order),
        "doubtful": [_trust(trust) for trust in answer.doubtful[:CLAIMS]],
        "more_doubtful": max(0, len(answer.doubtful) - CLAIMS),
    }


def _claim(claim: Claim) -> dict[str, Any]:
    return {
        **_trust(claim.trust),
        "blocks": claim.blocks,
        "tiers": {_TIERS.get(tier, str(tier)): blocks for tier, blocks in claim.tiers},
        "left_out": claim.left_out,
    }


def node_document(view: NodeView, copy: Copy, story: Iterable[StoryEntry], *, now_s: float) -> dict[str, Any]:
    """One node with everything there is to say."""
    known = {item.digest: item for item in copy.status.namespaces}
    return {
        **_node(view, copy),
        "epoch": f"{view.trust.epoch:016x}",
        "address": view.trust.peer_address,
        "started_unix_ms": view.started_unix_ms,
        "last_seq": view.last_seq,
        "announced_seq": view.announced_seq,
        "holdings": [
            {
                **name_of(holding.namespace_digest, known.get(holding.namespace_digest)),
                "tier": _TIERS.get(holding.tier, str(holding.tier)),
                "blocks": (holding.blocks.value, "" if holding.blocks.trusted else holding.blocks.reason or "untrusted"),
                "bytes": (holding.bytes.value, "" if holding.bytes.trusted else holding.bytes.reason or "untrusted"),
                "owner_blocks": holding.owner_blocks,
                "owner_at_seq": holding.owner_at_seq,
            }
            for holding in sorted(view.holdings, key=lambda holding: (-holding.bytes.value, holding.namespace_digest))
        ],
        "story": [story_document(entry, now_s=now_s) for entry in reversed(list(story))],
    }
