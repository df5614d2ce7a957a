"""What must hold at every moment, whatever the network does (design 04), and what must hold once it has healed.

Reads only. Truth comes from the ledgers of the lives, belief from the same calls that services make. Each fault is a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvdir.core.directory import Directory
from kvdir.core.feedback import StaleReport
from kvdir.core.holders import Holder
from kvdir.core.inspect import faults, node_views
from kvdir.core.node import Stream
from kvdir.core.totals import sums_view
from kvdir.core.views import NodeView, ViewScope
from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState, Tier
from kvdir.testing.sim.ledger import Item, count
from kvdir.testing.sim.network import Delivery

if TYPE_CHECKING:
    from kvdir.testing.sim.node import Life, LocalNode
    from kvdir.testing.sim.site import Site

Claims = Mapping[tuple[str, int], set[Item]]
"""What lookups name, by (node, epoch)."""


def broken(site: Site, *, sums: bool = True) -> Iterator[str]:
    """Promises that do not hold now. sums: also those over many streams, which take as long to check as all the rest."""
    core = site.directory.core
    yield from faults(core)
    claims = claims_of(core, site.universe(), now_s=site.now_s)
    for (name, epoch), items in claims.items():
        yield from _wrong_claims(site, core, name, epoch, items)
    if sums:
        yield from _wrong_sums(site, core)
    for view in node_views(core, now_s=site.now_s):
        life = site.node(view.trust.node).life_of(view.trust.epoch)
        if life is None:
            yield f"{view.trust.node} is said to have epoch {view.trust.epoch:x}, which it never had"
        elif _registered_too_late(site, core, life):
            yield f"{life.node.name}: epoch {life.epoch:x} was registered after its process had died, or left for its successor"
        elif view.trust.state is StreamState.SYNCED and view.trust.age_s > core.limits.stale_after_s + 2 * site.tick_s:
            yield f"{view.trust.node} is synced, and silent for {view.trust.age_s:.1f} s"
        elif view.trust.state is StreamState.SYNCED:
            yield from _wrong_figures(site, view, life, claims.get((view.trust.node, view.trust.epoch), set()))


def unsettled(site: Site) -> Iterator[str]:
    """What stands in the way of: every stream synced, every view trusted and equal to the owner's truth."""
    core = site.directory.core
    claims = claims_of(core, site.universe(), now_s=site.now_s)
    if core.warming:
        yield "the coordinator is warming"
    for node in site.nodes:
        if any(life.alive for life in node.lives):
            yield from _unsettled_node(site, node, claims)


def claims_of(core: Directory, universe: Mapping[bytes, list[Fingerprints]], *, now_s: float) -> Claims:
    """Asks for everything in `universe` (lists of fingerprints by namespace)."""
    claims: dict[tuple[str, int], set[Item]] = {}
    for digest, lists in universe.items():
        if core.namespaces.get(digest) is None:
            continue
        for asked in lists:
            answer = core.lookup(digest, asked, now_s=now_s)
            for run in answer:
                for number, tier in run.holders:
                    trust = answer.nodes[number]
                    items = claims.setdefault((trust.node, trust.epoch), set())
                    items.update(Item(digest, tier, asked[at]) for at in range(run.start, run.start + run.count))
    return claims


def contents(core: Directory) -> object:
    """What lookups could name, for comparing before with after: every block with its visible holders."""
    cursor, parts = 0, []
    while True:
        cursor, keys, numbers, sets = core.index.dump(cursor, 65_536)
        for key, number in zip(memoryview(keys).cast("Q"), memoryview(numbers).cast("I"), strict=True):
            holders = (core.holders.get(holder) for holder in memoryview(sets[number]).cast("I"))
            names = [(h.owner.node, h.owner.epoch, h.namespace.digest, h.tier) for h in holders if h is not None and h.visible]
            if names:
                parts.append((key, sorted(names)))
        if not cursor:
            return sorted(parts)


class Violation(AssertionError):
    """A promise was broken. at_s: simulated time. recent: the last messages that arrived before."""

    def __init__(self, words: str, *, at_s: float, recent: tuple[Delivery, ...] = ()) -> None:
        super().__init__(f"{words} (at {at_s:.3f} s)")
        self.words = words
        self.at_s = at_s
        self.recent = recent


class Watch:
    """Looks at single messages, before and after they are handled (network.Watcher)."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._feedback_s = float("-inf")

    def twice(self, first_s: float) -> Callable[[], None]:
        """Applying anything twice changes nothing that lookups name, unless a reader has taken a hint back in between."""
        if not self._site.watch or self._feedback_s >= first_s:
            return _nothing
        core = self._site.directory.core
        if core.room.max_bytes:
            return _nothing  # room is made for it before anybody knows that it is not needed
        before = contents(core)

        def compare() -> None:
            if contents(core) != before:
                self._site.note(self._site.violation("a message that came twice changed what lookups name"))

        return compare

    def feedback(self, report: StaleReport) -> Callable[[], None]:
        """Feedback for another epoch changes nothing, and none undoes a store that was heard since the owner answered."""
        site, core = self._site, self._site.directory.core
        self._feedback_s = site.now_s
        named = {report.namespace_digest: [report.fingerprints]}
        before = claims_of(core, named, now_s=site.now_s)
        stream = core.nodes[report.node].stream if report.node in core.nodes else None
        life = site.node(report.node).life_of(report.epoch)
        heard = stream.cursor.applied_seq if stream else 0

        def compare() -> None:
            after = claims_of(core, named, now_s=site.now_s)
            gone = {key: items - after.get(key, set()) for key, items in before.items() if items - after.get(key, set())}
            if not gone:
                return
            if gone.keys() != {(report.node, report.epoch)} or life is None:
                site.note(site.violation(f"feedback about epoch {report.epoch:x} of {report.node} changed {gone}"))
            elif heard > report.owner_seq:
                stored = set(life.ledger.at(heard) or ()) - (life.ledger.at(report.owner_seq) or set())
                if gone[report.node, report.epoch] & stored:
                    site.note(site.violation(f"feedback as of event {report.owner_seq} undid a later store"))

        return compare if site.watch else _nothing


def _nothing() -> None:
    pass


def _registered_too_late(site: Site, core: Directory, life: Life) -> bool:
    stream = core.nodes[life.node.name].stream
    if stream is not None and stream.restored and not stream.connection:
        return False  # by no hello, but from a checkpoint
    key = (life.node.name, life.epoch)
    first_seen = key not in site.registered
    site.registered.add(key)
    if not first_seen:
        return False
    if life.died_s is not None and life.died_s < site.checked_s:
        return True
    successor = life.node.life
    followed = successor.alive and (successor.node.name, successor.epoch) in site.registered
    return life.left_s is not None and life.left_s < site.checked_s and followed


def _wrong_claims(site: Site, core: Directory, name: str, epoch: int, items: set[Item]) -> Iterator[str]:
    known = core.nodes.get(name)
    stream = known.stream if known else None
    if known is None or stream is None or stream.epoch != epoch or epoch in known.fenced or stream.fenced:
        yield f"a lookup names epoch {epoch:x} of {name}, which is fenced"
        return
    if site.now_s - stream.cursor.last_heard_s > core.limits.expire_after_s + 2 * site.tick_s:
        yield f"a lookup names {name}, silent for {site.now_s - stream.cursor.last_heard_s:.1f} s"
    life = site.node(name).life_of(epoch)
    if life is None or not items <= life.ledger.ever:
        yield f"a lookup names blocks that epoch {epoch:x} of {name} never had"


def _wrong_sums(site: Site, core: Directory) -> Iterator[str]:
    """Sums over nodes, tiers, namespaces and tenants: each trusted one against the owners' truth."""
    trusted = [view for view in sums_view(core, now_s=site.now_s).totals if view.blocks.trusted]
    if not trusted:
        return
    truth: dict[tuple[ViewScope, str], int] = {}
    tenants = dict(zip(site.digests, (namespace.tenant for namespace in site.namespaces), strict=True))
    for node in core.nodes.values():
        stream = node.stream
        life = site.node(node.name).life_of(stream.epoch) if stream is not None and not stream.fenced else None
        if stream is None or life is None:
            continue
        for (digest, tier), blocks in count(life.ledger.at(stream.cursor.applied_seq) or ()).items():
            for key in (
                (ViewScope.NODE, node.name),
                (ViewScope.TIER, tier.name.lower()),
                (ViewScope.NAMESPACE, digest.hex()),
                (ViewScope.TENANT, tenants[digest]),
            ):
                truth[key] = truth.get(key, 0) + blocks
    for view in trusted:
        held = truth.get((view.scope, view.subject), 0)
        if view.blocks.require_trusted() != held:
            yield f"trusted sum of {view.blocks.value} blocks for {view.scope.name.lower()} {view.subject}, owners held {held}"


def _wrong_figures(site: Site, view: NodeView, life: Life, claimed: set[Item]) -> Iterator[str]:
    name, seq = view.trust.node, view.last_seq
    truth = life.ledger.at(seq)
    if truth is None:
        yield f"{name} is synced at event {seq}, and its owner is at {life.ledger.last_seq}"
        return
    counts = count(truth)
    doubted = False
    for holding in view.holdings:
        held = counts.pop((holding.namespace_digest, Tier(holding.tier)), 0)
        if not holding.blocks.trusted:
            doubted = True
        elif holding.blocks.require_trusted() != held:
            yield f"{name}: trusted figure {holding.blocks.value} at event {seq}, its owner held {held}"
        elif holding.bytes.value != held * site.block_bytes[holding.namespace_digest]:
            yield f"{name}: trusted figure of {holding.bytes.value} bytes for {held} blocks"
    if doubted:
        return
    if any(counts.values()):
        yield f"{name}: synced at event {seq} without a figure for {sum(counts.values())} blocks that its owner held"
    if site.directory.hidden(name):
        return
    if claimed - truth or (claimed != truth and not _partial(site.directory.core, name)):
        yield f"{name}: synced at event {seq}, {_difference(claimed, truth)}"


def _unsettled_node(site: Site, node: LocalNode, claims: Claims) -> Iterator[str]:
    core, number = site.directory.core, site.number
    publishing = [life for life in node.lives if life.publishing(number)]
    fences = [life.fences.get(number, "") for life in node.lives if life.alive]
    if not publishing and all(fences) and not all(life.alive for life in node.lives):
        return  # the process that took the name over is gone, and those it fenced do not come back
    if len(publishing) != 1:
        yield f"{len(publishing)} processes of {node.name} publish: {fences}"
        return
    (life,) = publishing
    known = core.nodes.get(node.name)
    stream: Stream | None = known.stream if known else None
    if stream is None or stream.epoch != life.epoch:
        yield f"{node.name} is not known by its epoch {life.epoch:x}"
        return
    cursor = stream.cursor
    if cursor.state is not StreamState.SYNCED:
        yield f"{node.name} is {cursor.state.name.lower()}: {cursor.reason}"
        return
    if cursor.applied_seq != life.outbox.last_seq:
        yield f"{node.name} stands at event {cursor.applied_seq}, its owner at {life.outbox.last_seq}"
        return
    if any(not stream.blocks_figure(holder).trusted and _healing(stream, holder) for holder in stream.holders.values()):
        yield f"{node.name}: a figure is in doubt"
    claimed = claims.get((node.name, life.epoch), set())
    if claimed - life.ledger.held or (claimed != life.ledger.held and not _partial(core, node.name)):
        yield f"{node.name}: {_difference(claimed, life.ledger.held)}"


def _partial(core: Directory, name: str) -> bool:
    """Entries of the node were evicted: lookups name a part of what it holds."""
    stream = core.nodes[name].stream
    return stream is not None and any(holder.partial for holder in stream.holders.values())


def _healing(stream: Stream, holder: Holder[Stream]) -> bool:
    """Whether a doubt ends by itself: not where entries were evicted and the owner states no digests."""
    return stream.sketchable or not holder.partial


def _difference(claimed: set[Item], truth: set[Item]) -> str:
    return f"lookups name {len(claimed - truth)} blocks too many and {len(truth - claimed)} too few"
