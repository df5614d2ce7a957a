"""What an owner may publish: under which node name, and in whose namespaces. For both kinds of coordinators.

Rules: a node name that is not its own ends the call, with words; a namespace of a tenant that it may not store is refused with
words to the owner and left out, because a node serves many tenants, and one engine must not silence the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from kvdir.core.admission import Hello
from kvdir.core.namespaces import Announced, NamespaceTable
from kvdir.core.policy import Grant, Identity
from kvdir.namespace import NO_TENANT
from kvdir.obs.logs import say
from kvdir.rpc.caller import caller
from kvdir.rpc.gate import Gate
from kvdir.v1 import events_pb2

log = logging.getLogger("kvdir.events")

MOST_TOLD = 16
"""Of one hello: what a connection has to say is bounded, and the welcome must not be lost for it."""

Say = Callable[[events_pb2.PublishResponse], None]


class Publisher:
    """Whoever makes one publish call. `ended`: it may not go on, and nothing more of it counts."""

    def __init__(self, gate: Gate, namespaces: NamespaceTable) -> None:
        self._who = caller()
        self._began_with = self._who.identity.stores
        self._gate = gate
        self._namespaces = namespaces

    @property
    def ended(self) -> bool:
        return bool(self._who.ended)

    @property
    def stores(self) -> Grant:
        """In whose namespaces it may say that it holds something."""
        return self._who.identity.stores

    def check_node(self, node: str) -> None:
        """Raises Forbidden."""
        identity = self._who.identity
        if not identity.may_publish(node):
            self._gate.refuse(
                "node",
                f"{identity.name} may not publish as node {node!r}, only as {identity.nodes.words()}: "
                "the policy file of this coordinator says which names are whose (nodes)",
            )

    def rest_on(self, node: str, end: Callable[[], None]) -> None:
        """The call goes on only while it may say the same; end: it may not."""
        stores = self._began_with

        def judge(identity: Identity) -> str:
            if not identity.may_publish(node):
                return f"{identity.name} may not publish as node {node!r} any more"
            return "" if identity.stores == stores else "what may be stored is another: publish anew"

        self._who.rests_on(judge, on_end=end)

    def foreign(self, hello: Hello) -> tuple[Announced, ...]:
        """What it announces and may not. Nobody's, because it cannot be read, is for the directory to refuse."""
        stores = self.stores
        if stores.every:
            return ()
        return tuple(item for item in hello.namespaces if (self._namespaces.tenant_of(item) or NO_TENANT) not in stores)

    def refuse(self, node: str, foreign: tuple[Announced, ...], say_to_owner: Say) -> None:
        """In words, to the owner and the log."""
        self._gate.refused["tenant"] += len(foreign)
        words = (
            f"{self._who.identity.name} may not store in the tenant of this namespace: "
            "the policy file of the coordinator says whose it may (store)"
        )
        for item in foreign[:MOST_TOLD]:
            say(log, logging.WARNING, "namespace refused", node=node, namespace=item.digest.hex()[:16], reason=words)
            refusal = events_pb2.NamespaceRefused(namespace_digest=item.digest, words=words)
            say_to_owner(events_pb2.PublishResponse(namespace_refused=refusal))


def without(hello: Hello, foreign: tuple[Announced, ...]) -> Hello:
    """The hello with what it may announce."""
    return replace(hello, namespaces=tuple(item for item in hello.namespaces if item not in foreign)) if foreign else hello
