"""What the coordinator of a LocalCluster believes, asked for as services ask. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdir.core.answer import Lookup
from kvdir.core.directory import Directory
from kvdir.core.inspect import node_views
from kvdir.core.trust import Cumulative
from kvdir.core.views import NodeView
from kvdir.location import NodeTrust
from kvdir.testing.sim.invariants import claims_of
from kvdir.testing.sim.ledger import Item
from kvdir.testing.sim.network import name_of
from kvdir.testing.sim.node import Blocks, fingerprints_of

if TYPE_CHECKING:
    from kvdir.testing.sim.site import Site


class LocalDirectory:
    """What the coordinator believes; `core` is the real thing. `node` is a number or a name."""

    def __init__(self, site: Site) -> None:
        self._site = site

    @property
    def core(self) -> Directory:
        return self._site.coordinator.directory

    def view(self, node: int | str) -> NodeView:
        """KeyError when nothing is known about it."""
        for view in node_views(self.core, now_s=self._site.now_s):
            if view.trust.node == name_of(node):
                return view
        raise KeyError(f"{name_of(node)} is not known to the coordinator")

    def trust(self, node: int | str) -> NodeTrust:
        """State, reason, age and missing events of the node's current stream; KeyError when there is none."""
        return self.view(node).trust

    def blocks(self, node: int | str) -> Cumulative:
        """How many blocks the node holds, over all namespaces and tiers: a cumulative figure, with `require_trusted()`."""
        view, now_s = self.view(node), self._site.now_s
        trust = view.trust
        total = Cumulative(0, trust.state.trusted, now_s, None if trust.state.trusted else now_s, trust.reason)
        for holding in view.holdings:
            total = total + holding.blocks
        return total

    def lookup(self, blocks: Blocks, *, namespace: int = 0, prefix: bool = False) -> Lookup:
        """The real lookup of these blocks, in this order."""
        digest = self._site.digests[namespace]
        return self.core.lookup(digest, fingerprints_of(blocks), prefix=prefix, now_s=self._site.now_s)

    def holders(self, blocks: Blocks, *, namespace: int = 0) -> list[set[str]]:
        """The names of the nodes that a lookup gives, block by block."""
        answer = self.lookup(blocks, namespace=namespace)
        out: list[set[str]] = [set() for _ in range(answer.asked)]
        for run in answer:
            for at in range(run.start, run.start + run.count):
                out[at] |= {answer.nodes[number].node for number, _ in run.holders}
        return out

    def claims(self, node: int | str) -> set[Item]:
        """Everything that lookups name for the node."""
        found = claims_of(self.core, self._site.universe(), now_s=self._site.now_s)
        return {item for (name, _), items in found.items() if name == name_of(node) for item in items}

    def hidden(self, node: int | str) -> bool:
        """Whether the node was silent for so long that lookups leave it out."""
        known = self.core.nodes.get(name_of(node))
        return known is not None and known.stream is not None and known.stream.hidden
