"""The namespaces that agents announced: digest -> description, and the index scope that stands for it.

Rules: a digest that does not belong to its canonical form, or a form this release cannot read, is refused, so events
under it are skipped and counted (fail closed). Bounded in number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdir.core.policy import ALL, Grant
from kvdir.errors import NamespaceError, UnknownNamespace
from kvdir.namespace import Namespace

if TYPE_CHECKING:
    from kvdir.core.mirror import Mirror


@dataclass(frozen=True, slots=True)
class Announced:
    """A namespace on the wire, not yet believed."""

    digest: bytes
    canonical: bytes
    block_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class KnownNamespace:
    """scope: what the index mixes into the key. Two namespaces share one with probability 2**-64 only."""

    digest: bytes
    namespace: Namespace
    scope: int
    block_bytes: int

    @property
    def counted_bytes(self) -> int:
        """Of a block, in sums of bytes: 0 of one that an engine only announces, since nobody states its geometry."""
        return 0 if self.namespace.is_announced else self.block_bytes


class NamespaceTable:
    """Every namespace some stream announced."""

    def __init__(self, *, limit: int, mirrors: Sequence[Mirror] = ()) -> None:
        self._limit = limit
        self._mirrors = mirrors
        self._known: dict[bytes, KnownNamespace] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[KnownNamespace]:
        return iter(tuple(self._known.values()))

    def get(self, digest: bytes) -> KnownNamespace | None:
        return self._known.get(digest)

    def seen(self, digest: bytes, tenants: Grant) -> KnownNamespace | None:
        """None: there is none, or none that a caller with this grant may know of, which is the same to him."""
        known = self._known.get(digest)
        return None if known is None or known.namespace.tenant not in tenants else known

    def require(self, digest: bytes, tenants: Grant = ALL) -> KnownNamespace:
        """Raises UnknownNamespace, naming those that are known, of these tenants: the words for a foreign one are the same."""
        known = self.seen(digest, tenants)
        if known is None:
            names = sorted(item.namespace.short for item in self._known.values() if item.namespace.tenant in tenants)
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise UnknownNamespace(
                f"no node here serves namespace {digest.hex()[:16] or '(empty)'}; known: {shown or 'none yet'}. "
                "Every field of the namespace must match: compare with Namespace.diff(mine, theirs)"
            )
        return known

    def tenant_of(self, announced: Announced) -> str | None:
        """Whose it is: as the table has it, because a digest that is known is not read again; None: nobody can tell."""
        known = self._known.get(announced.digest)
        if known is not None:
            return known.namespace.tenant
        try:
            return Namespace.from_canonical(announced.canonical).tenant
        except NamespaceError:
            return None

    def announce(self, announced: Announced) -> str:
        """Adds it; returns why not, in words, or an empty string."""
        if announced.digest in self._known:
            return ""
        if len(self._known) >= self._limit:
            return f"more than {self._limit} namespaces (max_namespaces)"
        try:
            namespace = Namespace.from_canonical(announced.canonical)
        except NamespaceError as error:
            return f"cannot be read here: {error.faults[0]}"
        if namespace.digest != announced.digest:
            return "its digest does not belong to its canonical form"
        if namespace.block_bytes != announced.block_bytes:
            return f"it says {announced.block_bytes} bytes a block, its fields give {namespace.block_bytes}"
        scope = int.from_bytes(namespace.digest[:8], "little")
        known = self._known[namespace.digest] = KnownNamespace(namespace.digest, namespace, scope, namespace.block_bytes)
        for mirror in self._mirrors:
            mirror.namespace(known)
        return ""

    def keep(self, used: Iterable[bytes]) -> None:
        """Forgets every namespace that no stream announces any more."""
        for digest in self._known.keys() - set(used):
            del self._known[digest]
            for mirror in self._mirrors:
                mirror.namespace_gone(digest)
