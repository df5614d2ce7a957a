"""A directory with many nodes, namespaces and tenants in it, put there without any network: for what grows with a fleet."""

from __future__ import annotations

from dataclasses import replace

from kvdir.core.admission import Hello, Welcomed
from kvdir.core.directory import Directory
from kvdir.core.event import Event
from kvdir.core.namespaces import Announced
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from kvdir.namespace import Namespace
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE


def many_namespaces(count: int, *, tenants: int) -> list[Namespace]:
    """`count` namespaces of different models, in turn of `tenants` tenants."""
    return [
        replace(EXAMPLE_NAMESPACE, model=f"model-{number}", tenant=f"salt:{number % tenants:032x}") for number in range(count)
    ]


def fill(
    directory: Directory, *, nodes: int, namespaces: list[Namespace], each: int = 4, now_s: float, blocks: int = 8
) -> None:
    """Every node announces `each` of the namespaces and holds `blocks` of each in two tiers; every tenth has lost an event."""
    announced = [Announced(item.digest, item.canonical().encode(), item.block_bytes) for item in namespaces]
    for number in range(nodes):
        mine = [announced[(number * each + offset) % len(announced)] for offset in range(min(each, len(announced)))]
        hello = Hello(f"node-{number:05d}", number + 1, 0, f"10.0.0.1:{number}", namespaces=tuple(mine))
        if not isinstance(directory.hello(hello, now_s=now_s), Welcomed):
            raise ValueError(f"node {number} was refused")
        node = directory.nodes[hello.node].stream
        assert node is not None
        chain = Fingerprints.chain((b"%d" % block for block in range(blocks)), root=b"%d" % number)
        events = [Event.stored(tier, item.digest, chain) for item in mine for tier in (Tier.GPU, Tier.CPU)]
        directory.batch(node, 1 if number % 10 else 2, events, now_s=now_s)
    directory.take_effects()
