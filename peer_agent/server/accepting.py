"""Namespaces that engines bring along: an agent with `accept_bytes` serves them without a file that describes them.

Rules: each gets a size class of accept_bytes in the spare part of the arena, the first accept_namespaces of them, for as long
as the agent runs: its blocks are of use to peers also when its engine has gone. A second engine with the same namespace
shares the class. Coordinators hear of a namespace before any event of it, and the replica follows it.
Who may bring one: whoever may attach at all, which is this host (docs/state.md). Refusals say what to do.

Interleaving: slots are laid out in a thread, since that takes as long as there are many; one namespace at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvdir.config import show_bytes
from kvdir.core.policy import ALL, ANONYMOUS, Grant, Identity
from kvdir.errors import Forbidden, NamespaceError, NoSpace, UnknownNamespace
from kvdir.namespace import Namespace
from kvdir.obs.logs import say
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass, stride_bytes
from peer_agent.memory.slots import MAX_BLOCK_BYTES, Spare
from peer_agent.server.namespaces import explain_unknown
from peer_agent.server.own_arena import slot_table
from peer_agent.server.store import Store

log = logging.getLogger(__name__)


class Accepting:
    """announce: told all namespaces, the new one among them, before it is served."""

    def __init__(self, store: Store, arena: Arena, spare: Spare, *, announce: Callable[[tuple[Namespace, ...]], None]) -> None:
        self._store = store
        self._arena = arena
        self._spare = spare
        self._announce = announce
        self._accepted: list[Namespace] = []
        self._one_at_a_time = asyncio.Lock()

    @property
    def accepted(self) -> int:
        """Namespaces accepted since start."""
        return len(self._accepted)

    @property
    def room(self) -> int:
        """How many more will be."""
        return self._spare.namespaces - len(self._accepted)

    def described(self, digest: bytes, canonical: bytes, who: Identity = ANONYMOUS) -> Namespace:
        """The namespace of this digest, served already or as the engine describes it. Raises UnknownNamespace, in words.

        Raises Forbidden for a description of a tenant that is not the engine's, whether or not anybody serves it; the digest
        alone of such a namespace is as unknown as any.
        """
        known = self._store.namespaces.get(digest)
        if known is not None and known.tenant in who.tenants:
            return known
        try:
            namespace = Namespace.from_canonical(canonical)
        except NamespaceError:
            namespace = None
        if namespace is not None and namespace.digest == digest and namespace.tenant not in who.tenants:
            raise Forbidden(
                f"{who.name} may not attach for the tenant of this namespace: the policy file of the agent says whose it may "
                "(tenants)"
            )
        if not self._spare.namespaces or namespace is None or namespace.digest != digest:
            served = (item for item in self._store.namespaces.values() if item.tenant in who.tenants)
            why = explain_unknown(digest, canonical, served)
            fix = "describe it in a file of `namespaces`, or let engines bring theirs with accept_bytes"
            raise UnknownNamespace(why if self._spare.namespaces else f"{why}; {fix}")
        if namespace.is_announced:
            raise UnknownNamespace(f"{namespace.short} is only announced: its blocks have no geometry and cannot be stored")
        return namespace

    async def accept(self, namespace: Namespace, tenants: Grant = ALL) -> None:
        """Serves it from now on, if that is not so already. Raises NoSpace, in words, which name those of these tenants."""
        async with self._one_at_a_time:
            if namespace.digest not in self._store.namespaces:
                await self._add(namespace, tenants)

    async def _add(self, namespace: Namespace, tenants: Grant) -> None:
        slots = self._slots(namespace, tenants)
        placed = self._arena.placed(SizeClass(namespace.digest, namespace.block_bytes, slots))
        table = await asyncio.to_thread(slot_table, placed)
        self._arena.add_class(placed)  # and no await from here on
        self._accepted.append(namespace)
        self._announce((*self._store.namespaces.values(), namespace))
        self._store.add(namespace, table)
        say(log, logging.INFO, "namespace accepted", namespace=namespace.short, blocks=slots, room_for=self.room)

    def _slots(self, namespace: Namespace, tenants: Grant) -> int:
        if self.room <= 0:
            known = ", ".join(item.short for item in self._accepted if item.tenant in tenants) or "for others"
            raise NoSpace(
                f"no room for namespace {namespace.short}: accept_namespaces is {self._spare.namespaces}, and engines have "
                f"brought as many ({known}); restart the agent with more, or run another one for it"
            )
        slots = self._spare.slots(namespace.block_bytes) if namespace.block_bytes <= MAX_BLOCK_BYTES else 0
        if not slots:
            each, needed = show_bytes(self._spare.each_bytes), show_bytes(stride_bytes(namespace.block_bytes))
            raise NoSpace(
                f"a block of namespace {namespace.short} takes {needed}, and accept_bytes is {each}, for all blocks of a "
                "namespace: restart the agent with more"
            )
        return slots
