"""A fleet for the live page that is not there: for tests and figures of the page with many nodes.

Every node changes a little from one copy to the next, as nodes do: ages, figures, now and then a gap that is repaired.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvdir.core.event import ReadFigures, ReadSource
from kvdir.core.recent_lookups import RecentLookup
from kvdir.core.story import Kind, StoryEntry
from kvdir.core.trust import Convergent, Cumulative
from kvdir.core.views import HoldingView, NamespaceView, NodeView, StatusView
from kvdir.core.who_holds import WhoHolds
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, StreamState, Tier
from kvdir.namespace import Namespace, StateGroup
from kvdir.obs.http import HttpSide
from kvdir.obs.metrics import CoordinatorMetrics
from kvdir.server.page.answers import Answers
from kvdir.server.page.copies import Copy, PageSource
from kvdir.server.page.feed import BUSY, INTERVAL_S, MAX_VIEWERS, Feed
from kvdir.server.page.routes import PageRoutes

BLOCK_BYTES = 128 * 2**10
MODEL = "example/model-8b"
NAMESPACE = Namespace.create(
    model=MODEL, weights="sha256:0", kv_dtype="bfloat16", layout="NHD", block_tokens=16,
    groups=(StateGroup(kind="full", layers=32, kv_heads=8, head_dim=128),), position="rope:theta=500000",
    parallel="replicated", adapter="none", hash_scheme="vllm:sha256_cbor", hash_seed="0", cache_policy="exact",
    bytes_override=BLOCK_BYTES,
)  # fmt: skip
_VIEW = NamespaceView(NAMESPACE.digest, NAMESPACE.canonical(), BLOCK_BYTES, NAMESPACE.block_tokens)


def fleet_copy(nodes: int, *, now_s: float = 100.0, names: Sequence[str] = (), model: str = MODEL) -> Copy:
    """All of them synced. names: of the first ones, instead of node-000, node-001, ... model: that the namespace names."""
    served = _VIEW if model == MODEL else replace(_VIEW, canonical_json=replace(NAMESPACE, model=model).canonical())
    views = tuple(_node(names[at] if at < len(names) else f"node-{at:03d}", at, nodes, now_s) for at in range(nodes))
    blocks = sum(holding.blocks.value for view in views for holding in view.holdings)
    status = StatusView(
        "0.0", "fleet", now_s, False, blocks, 16 * blocks, nodes, nodes, (served,), 1000, 30_000, 21_000, 50_000
    )
    return Copy(
        life="fleet", now_s=now_s, unix_ms=int(time.time() * 1000), status=status, stale_blocks=10, nodes=views, notes=(),
        noted=0, lookups=(), remarks=(), watchers=0, lookup_workers=0, heartbeat_s=1.0, stale_after_s=5.0,
        expire_after_s=60.0,
    )  # fmt: skip


class FleetSource:
    """PageSource over such a fleet. copies: how often one was asked for."""

    def __init__(
        self, nodes: int, *, names: Sequence[str] = (), model: str = MODEL, seed: int = 0, life: str = "fleet"
    ) -> None:
        self._rng = random.Random(seed)
        self._copy = replace(fleet_copy(nodes, now_s=time.monotonic(), names=names, model=model), life=life)
        self._notes: list[StoryEntry] = []
        self._noted = 0
        self.copies = 0

    async def copy(self) -> Copy:
        self.copies += 1
        now_s, rng, status = time.monotonic(), self._rng, self._copy.status
        took_s = now_s - self._copy.now_s
        nodes = tuple(_moved(view, rng, now_s) for view in self._copy.nodes)
        for view, before in zip(nodes, self._copy.nodes, strict=True):
            if view.trust.state is not before.trust.state:
                words = f"{before.trust.state.name.lower()} -> {view.trust.state.name.lower()}: {view.trust.reason}"
                self._notes.insert(0, StoryEntry(now_s, view.trust.node, view.trust.epoch, Kind.STATE, words))
                self._noted += 1
        del self._notes[60:]
        asked = status.lookup_blocks + int(5000 * took_s)
        self._copy = replace(
            self._copy,
            now_s=now_s,
            unix_ms=int(time.time() * 1000),
            nodes=nodes,
            notes=tuple(self._notes),
            noted=self._noted,
            status=replace(
                status, lookups=status.lookups + int(200 * took_s), lookup_blocks=asked, lookup_hits=asked * 7 // 10
            ),
        )
        return self._copy

    async def explain(self, namespace_digest: bytes, fingerprints: Fingerprints) -> WhoHolds:
        return WhoHolds(namespace_digest, len(fingerprints), (), (), (), False, False)

    async def story(self, node: str) -> tuple[Sequence[StoryEntry], float]:
        return [note for note in self._notes if note.node == node], time.monotonic()

    def lookup(self, name: str) -> RecentLookup | None:
        return None


def _node(name: str, at: int, nodes: int, now_s: float) -> NodeView:
    blocks = 1500 + 7 * at
    figure = Cumulative(blocks, True, now_s)
    holding = HoldingView(NAMESPACE.digest, Tier.CPU, figure, replace(figure, value=blocks * BLOCK_BYTES), blocks, 10)
    sources = tuple(ReadSource(f"node-{(at + step) % nodes:03d}", 100, 100 * BLOCK_BYTES * step) for step in range(1, 9))
    return NodeView(
        trust=NodeTrust(name, at + 1, StreamState.SYNCED, "", 0.4, 0, f"10.0.0.{at % 250}:7410", 1.0),
        last_seq=10, announced_seq=10, gaps=0, replays=0, snapshots=1,
        used_bytes=Convergent(blocks * BLOCK_BYTES, now_s), capacity_bytes=Convergent(8000 * BLOCK_BYTES, now_s),
        dropped_events=0, holdings=(holding,), untrusted_s=0.0, started_unix_ms=1_700_000_000_000,
        namespaces=(NAMESPACE.digest,),
        reads=ReadFigures(hit_local=500, hit_peer=300, miss=200, read_bytes=300 * BLOCK_BYTES, sources=sources),
    )  # fmt: skip


def _moved(view: NodeView, rng: random.Random, now_s: float) -> NodeView:
    """A second later."""
    trust, reads = view.trust, view.reads or ReadFigures()
    if trust.state is not StreamState.SYNCED:
        trust = replace(trust, state=StreamState.SYNCED, reason="")
    elif rng.random() < 0.01:
        trust = replace(trust, state=StreamState.REPAIRING, reason="replay under way; 2 events missing from 11")
    used = min(view.capacity_bytes.value, view.used_bytes.value + rng.randrange(3) * BLOCK_BYTES)
    moved = replace(
        reads,
        hit_local=reads.hit_local + rng.randrange(40),
        hit_peer=reads.hit_peer + rng.randrange(20),
        miss=reads.miss + rng.randrange(10),
        late=reads.late + (rng.random() < 0.05),
        read_bytes=reads.read_bytes + rng.randrange(20) * BLOCK_BYTES,
    )
    blocks = Cumulative(used // BLOCK_BYTES, trust.state is StreamState.SYNCED, now_s, None, trust.reason)
    holding = replace(view.holdings[0], blocks=blocks, bytes=replace(blocks, value=used)) if view.holdings else None
    return replace(
        view,
        trust=replace(trust, age_s=rng.random()),
        used_bytes=Convergent(used, now_s),
        reads=moved,
        holdings=(holding,) if holding else (),
    )


@contextlib.contextmanager
def page_server(
    source: PageSource, *, max_viewers: int = MAX_VIEWERS, interval_s: float = INTERVAL_S, busy: float = BUSY, port: int = 0
) -> Iterator[str]:
    """The page of that source on loopback, with a loop of its own in another thread. port: 0 is a free one. Yields its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="page-source", daemon=True)
    thread.start()
    feed = Feed(source, loop, max_viewers=max_viewers, interval_s=interval_s, busy=busy)
    routes = PageRoutes(feed, Answers(source, loop))
    try:
        side = HttpSide(("127.0.0.1", port), CoordinatorMetrics(), alive=str, ready=str, further=routes)
        try:
            yield f"http://127.0.0.1:{side.address[1]}/"
        finally:
            side.close()
    finally:
        asyncio.run_coroutine_threadsafe(feed.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
