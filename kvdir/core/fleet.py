"""What coordinators of one store know of its nodes: each saves those that publish to it, and reads what the others saved. Pure.

Rules: a node this coordinator speaks to is answered from its stream; every other one from what its coordinator last saved, made
older by the time since. Ages are durations: the store's clock counts only when a node is first seen, afterwards a save is as
old as its arrival here, so neither a coordinator's clock nor a fail-over to a server with another one makes nodes young or old.
Whoever is silent is stale, then left out, whether the node or its coordinator is gone. What is not saved yet is not known.
Does not: decide about streams (shared_stream.py), or read and write the store.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvdir.core.namespaces import NamespaceTable
from kvdir.core.shared_stream import SharedStream
from kvdir.core.trust import Convergent, Cumulative, total
from kvdir.core.views import LoadView, NodeView, SumsView, TotalView, ViewScope
from kvdir.location import NodeTrust, StreamState, Tier

_REUSE_S = 0.01
_TIERS = {int(tier): tier.name.lower() for tier in Tier}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedNode:
    """What the store keeps of a node. beat: differs in every save. coordinator: who saved it.

    exact: what the store holds is the owner's state as of view.last_seq, as far as is known. resumable: another coordinator may
    go on from the saved position. namespaces: announced.
    """

    view: NodeView
    beat: int
    coordinator: str
    exact: bool
    resumable: bool
    namespaces: tuple[bytes, ...] = ()

    @property
    def epoch(self) -> int:
        return self.view.trust.epoch

    @property
    def left(self) -> bool:
        """Its owner said goodbye."""
        return self.view.trust.state is StreamState.FENCED


@dataclass(slots=True, eq=False)
class _Seen:
    """saved_s: when it was saved, as a time of ours."""

    saved: SavedNode
    token: int
    saved_s: float
    trust: NodeTrust | None = None
    trust_at_s: float = 0.0


class Fleet:
    """See the module docstring. Times are monotonic seconds of this process."""

    def __init__(self, *, stale_after_s: float, expire_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._expire_after_s = expire_after_s
        self._seen: dict[str, _Seen] = {}
        self._own: dict[str, SharedStream] = {}
        self._read_s = float("-inf")

    def __len__(self) -> int:
        return len(self._seen.keys() | self._own.keys())

    # -- what is known ---------------------------------------------------------------------------------------------------

    def own(self, stream: SharedStream) -> None:
        """This coordinator speaks to the node."""
        self._own[stream.node] = stream

    def disown(self, stream: SharedStream, saved: SavedNode | None = None, *, token: int = 0, saved_s: float = 0.0) -> None:
        """No more; what was saved last counts: at saved_s, by the writer with this token; None: nothing was."""
        if self._own.get(stream.node) is not stream:
            return
        del self._own[stream.node]
        if saved is not None:
            self._seen[stream.node] = _Seen(saved, token, saved_s)

    def read(self, nodes: Iterable[tuple[SavedNode, int, float]], *, now_s: float) -> None:
        """Everything saved in the store, as (node, writer's token, age in seconds by the store's clock), asked for at now_s."""
        since_s = now_s - self._read_s
        seen: dict[str, _Seen] = {}
        for saved, token, age_s in nodes:
            name = saved.view.trust.node
            known = self._seen.get(name)
            if known is not None and known.token == token and known.saved.beat >= saved.beat:
                seen[name] = known  # not saved since; or saved by us, and disowned, after this was read
            else:
                aged_s = max(0.0, age_s if known is None else min(age_s, since_s))
                seen[name] = _Seen(saved, token, now_s - aged_s)
        self._seen, self._read_s = seen, now_s

    def forgotten(self, node: str) -> None:
        """The store knows it no more."""
        self._seen.pop(node, None)

    def emptied(self) -> None:
        """The store has forgotten everything."""
        self._seen = {}

    def saved(self, node: str) -> SavedNode | None:
        """What was last saved of a node."""
        seen = self._seen.get(node)
        return seen.saved if seen else None

    def orphans(self, *, limit_s: float, left_only: bool, now_s: float) -> Iterator[tuple[str, int]]:
        """(node, token of its last writer) of those that have been silent for longer than limit_s, or left so long ago."""
        for name, seen in self._seen.items():
            if name not in self._own and now_s - seen.saved_s > limit_s and (seen.saved.left or not left_only):
                yield name, seen.token

    def longest_gone(self, now_s: float) -> tuple[str, int] | None:
        """The same of the one to give up when there is no room for another node: who left, then who is silent longest."""
        gone = [
            (seen.saved.left, now_s - seen.saved_s, name, seen.token)
            for name, seen in self._seen.items()
            if name not in self._own and (seen.saved.left or now_s - seen.saved_s > self._stale_after_s)
        ]
        return max(gone)[2:] if gone else None

    # -- what is answered ------------------------------------------------------------------------------------------------

    def trust(self, node: str, epoch: int, now_s: float) -> NodeTrust | None:
        """For an answer; None for a node that is not to be named: unknown, of another epoch, fenced, or silent for too long.

        Reused for 10 ms: an age needs no more.
        """
        stream = self._own.get(node)
        if stream is not None:
            return None if stream.epoch != epoch or stream.fenced else stream.trust(now_s)
        seen = self._seen.get(node)
        if seen is None or seen.saved.epoch != epoch:
            return None
        if seen.trust is None or not 0 <= now_s - seen.trust_at_s < _REUSE_S:
            seen.trust, seen.trust_at_s = self._aged(seen, now_s), now_s
        trust = seen.trust
        return None if trust.state is StreamState.FENCED or trust.age_s > self._expire_after_s else trust

    def announced(self, now_s: float) -> Iterator[tuple[NodeTrust, tuple[bytes, ...]]]:
        """Every node that may be named in an answer, with the namespaces it announced."""
        for name in self._seen.keys() | self._own.keys():
            own = self._own.get(name)
            epoch = own.epoch if own is not None else self._seen[name].saved.epoch
            trust = self.trust(name, epoch, now_s)
            if trust is not None:
                yield trust, tuple(own.namespaces) if own is not None else self._seen[name].saved.namespaces

    def views(self, now_s: float) -> tuple[NodeView, ...]:
        """Every node, by name; those that left too, until they are forgotten."""
        return tuple(view for view, _ in self._views(now_s))

    def restated(self, now_s: float) -> bool:
        """Whether every live node has made an absolute statement that holds."""
        own = ((stream.cursor.exact, stream.state) for stream in self._own.values())
        others = (
            (seen.saved.exact, self._aged(seen, now_s).state) for node, seen in self._seen.items() if node not in self._own
        )
        return all(exact or state in (StreamState.STALE, StreamState.FENCED) for exact, state in (*own, *others))

    def sums(self, namespaces: NamespaceTable, *, now_s: float) -> SumsView:
        """Sums over live nodes, as core/totals.py makes them: a node contributes to every namespace it announced."""
        live = [(view, known) for view, known in self._views(now_s) if view.trust.state is not StreamState.FENCED]
        grouped: defaultdict[tuple[ViewScope, str], list[tuple[Cumulative, Cumulative]]] = defaultdict(list)
        for view, announced in live:
            for tier, digest, blocks, size in _cells(view, announced):
                grouped[ViewScope.NODE, view.trust.node].append((blocks, size))
                for name in _TIERS.values() if tier is None else (_TIERS.get(tier, str(tier)),):
                    grouped[ViewScope.TIER, name].append((blocks, size))
                known = namespaces.get(digest)
                if known is not None:
                    grouped[ViewScope.NAMESPACE, digest.hex()].append((blocks, size))
                    grouped[ViewScope.TENANT, known.namespace.tenant].append((blocks, size))
        totals = tuple(
            TotalView(scope, subject, *(total((part[at] for part in parts), now_s=now_s) for at in (0, 1)))
            for (scope, subject), parts in sorted(grouped.items())
        )
        none = Convergent(0, now_s)
        return SumsView(
            totals, tuple(LoadView(view.trust.node, view.used_bytes, view.capacity_bytes, none, none) for view, _ in live)
        )

    def _views(self, now_s: float) -> list[tuple[NodeView, tuple[bytes, ...]]]:
        out = [(stream.view(now_s), tuple(stream.namespaces)) for stream in self._own.values()]
        for name, seen in self._seen.items():
            if name not in self._own:
                out.append((_moved(seen, self._aged(seen, now_s), now_s), seen.saved.namespaces))
        return sorted(out, key=lambda item: item[0].trust.node)

    def _aged(self, seen: _Seen, now_s: float) -> NodeTrust:
        trust = seen.saved.view.trust
        age_s = trust.age_s + max(0.0, now_s - seen.saved_s)
        if age_s <= self._stale_after_s or trust.state in (StreamState.STALE, StreamState.FENCED):
            return replace(trust, age_s=age_s)
        reason = f"not heard within the limit, nor is coordinator {seen.saved.coordinator}, to which it published"
        return replace(trust, age_s=age_s, state=StreamState.STALE, reason="; ".join(filter(None, (reason, trust.reason))))


def _cells(view: NodeView, announced: tuple[bytes, ...]) -> Iterator[tuple[int | None, bytes, Cumulative, Cumulative]]:
    """(tier or None for all, namespace digest, blocks, bytes)"""
    for holding in view.holdings:
        yield holding.tier, holding.namespace_digest, holding.blocks, holding.bytes
    nothing = Cumulative(0, view.trust.state is StreamState.SYNCED, view.used_bytes.as_of_s, None, view.trust.reason)
    for digest in announced or (b"",):
        yield None, digest, nothing, nothing


def _moved(seen: _Seen, trust: NodeTrust, now_s: float) -> NodeView:
    """The view with its times on our clock, and without trust where the node has fallen silent. Saved times are ages."""
    view, at_s = seen.saved.view, seen.saved_s

    def convergent(figure: Convergent) -> Convergent:
        return Convergent(figure.value, at_s + figure.as_of_s)

    def cumulative(figure: Cumulative) -> Cumulative:
        since_s = None if figure.untrusted_since_s is None else at_s + figure.untrusted_since_s
        if figure.trusted and trust.state is not StreamState.SYNCED:
            return Cumulative(figure.value, False, at_s + figure.as_of_s, at_s, trust.reason)
        return Cumulative(figure.value, figure.trusted, at_s + figure.as_of_s, since_s, figure.reason)

    return replace(
        view,
        trust=trust,
        used_bytes=convergent(view.used_bytes),
        capacity_bytes=convergent(view.capacity_bytes),
        holdings=tuple(
            replace(holding, blocks=cumulative(holding.blocks), bytes=cumulative(holding.bytes)) for holding in view.holdings
        ),
    )
