"""The announced namespaces of one engine stream: which one a block belongs to, by what its event says and earlier ones said.

Rules: an event that does not name its kind or block size is read as the first that did for the same group index; without one
the identity's block size is taken, and group 0 (or none) is full attention. What stays unknown is refused, never guessed.
64-bit hashes of a scheme with longer ones have the scheme's name with `:low64`. Bounded. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvdir.engines.events import Group, Reason, Stored
from kvdir.errors import NamespaceError
from kvdir.namespace import Namespace, StateKind

MAX_NAMESPACES = 256
MAX_NAME_CHARACTERS = 1024
_WHOLE_IN_64_BITS = frozenset({"dynamo:xxh3", "llmd:cbor-fnv", "opaque"})
LOW64 = ":low64"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """What an engine's events do not say. model: as the engine serves it. block_tokens: where events name none; 0: refuse them.

    hash_scheme, hash_seed: see kvdir/hashing; the scheme without `:low64`, which the width of the hashes decides.
    """

    model: str
    hash_scheme: str
    hash_seed: str = "builtin"
    block_tokens: int = 0


@dataclass(slots=True, eq=False)
class Family:
    """Parts that differ in adapter and tenant only. indexes: the group indexes that share the kind, as they were learned; the
    first one's shelf lists the family's blocks.
    """

    width: int
    indexes: list[int | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One announced namespace."""

    digest: bytes
    namespace: Namespace
    family: Family


_PartKey = tuple[str, int, StateKind, int, int, str, str]


class Parts:
    """See the module docstring."""

    def __init__(self, identity: EngineIdentity) -> None:
        self._identity = identity
        self._parts: dict[_PartKey, Part] = {}
        self._families: dict[_PartKey, Family] = {}
        self._learned: dict[int | None, tuple[StateKind, int, int]] = {}
        self.namespaces: dict[bytes, Namespace] = {}

    @property
    def families(self) -> list[Family]:
        return list(self._families.values())

    def of(self, event: Stored) -> Part | Reason:
        """The part of an event's blocks, or why there is none."""
        kind, window_tokens, block_tokens = self._meaning(event.group, event.block_tokens)
        if kind is None:
            return Reason.UNKNOWN_KIND
        if not block_tokens:
            return Reason.NO_BLOCK_SIZE
        model = event.model or self._identity.model
        key = (model, block_tokens, kind, window_tokens, event.width, event.adapter, event.tenant)
        return self._parts.get(key) or self._new(key)

    def _meaning(self, group: Group, block_tokens: int) -> tuple[StateKind | None, int, int]:
        known = self._learned.get(group.index)
        kind, window_tokens = group.kind, group.window_tokens
        if kind is None and known is not None:
            kind, window_tokens = known[:2]
        if kind is None and not group.index:
            kind = StateKind.FULL
        if not block_tokens:
            block_tokens = known[2] if known is not None else self._identity.block_tokens
        elif kind is not None and known is None:
            self._learned[group.index] = (kind, window_tokens, block_tokens)
        return kind, window_tokens, block_tokens

    def _new(self, key: _PartKey) -> Part | Reason:
        model, block_tokens, kind, window_tokens, width, adapter, tenant = key
        if len(self._parts) >= MAX_NAMESPACES:
            return Reason.TOO_MANY_NAMESPACES
        if len(model) + len(adapter) > MAX_NAME_CHARACTERS:
            return Reason.UNDECODABLE_EVENT
        try:
            namespace = Namespace.announced(
                model=model,
                block_tokens=block_tokens,
                hash_scheme=told_scheme(self._identity.hash_scheme, width),
                hash_seed=self._identity.hash_seed,
                kind=kind,
                window_tokens=window_tokens,
                adapter=adapter,
                tenant=tenant,
            )
        except NamespaceError:
            return Reason.UNDECODABLE_EVENT
        family = self._families.setdefault((model, block_tokens, kind, window_tokens, width, "", ""), Family(width))
        part = self._parts[key] = Part(namespace.digest, namespace, family)
        self.namespaces[part.digest] = namespace
        return part


def told_scheme(scheme: str, width: int) -> str:
    """The scheme's name for hashes of `width` bytes: 64 bits of a longer one are a scheme of their own."""
    if width != 8 or scheme.partition("@")[0] in _WHOLE_IN_64_BITS or scheme.endswith(LOW64):
        return scheme
    return scheme + LOW64
