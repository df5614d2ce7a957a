"""The namespace: the compatibility contract under which two engines may share blocks byte for byte.

Rules: every field that changes the bytes of a block is in it, and required; nothing is guessed (`auto`, empty and unknown
values are refused, all faults at once); equal meaning gives an equal canonical form, whose digest is the identity.
Salts: only a digest of the tenant salt is kept, so a Namespace can be logged and sent; the salt itself never is.
Does not: hash tokens (kvdir/fingerprint.py and the engine adapters do). Standard library only.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdir.errors import NamespaceError
from kvdir.parallel import REPLICATED, ranks, without

CANONICAL_VERSION = 1
NO_TENANT = "none"
ANNOUNCED = "announced"
"""cache_policy, weights, layout and position of blocks that an engine only tells of: good to route by, never to move."""
MAX_BLOCK_BYTES, MAX_BLOCK_TOKENS = 2**40, 2**20
WHOLE = -1
"""`Namespace.part` of blocks that hold all state groups."""

DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "uint8": 1, "fp4_e2m1": 0.5,
}  # fmt: skip
"""Effective element types of KV we know, with bytes per element."""


class StateKind(enum.StrEnum):
    """Kind of a state group (design 06): what its blocks mean and when they can be restored."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    MLA = "mla"
    RECURRENT = "recurrent"
    INDEX = "index"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """Layers that share one kind and geometry.

    layers: number of layers. kv_heads, head_dim: per layer, on one rank. tensors: 2 for K and V, 1 for MLA or index.
    window_tokens: only for sliding_window. state_bytes: only for recurrent, bytes of one point state over all layers.
    block_tokens: tokens of one block of this group's own; 0: as the namespace says. bytes_override: bytes of one block of
    this group's own where the engine pads; 0: by geometry.
    """

    kind: str
    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    tensors: int = 2
    window_tokens: int = 0
    state_bytes: int = 0
    block_tokens: int = 0
    bytes_override: int = 0

    def faults(self, where: str) -> list[str]:
        """What is wrong with it, in words."""
        out = [
            f"{where}.{name}: must be a whole number, is {getattr(self, name)!r}"
            for name in _GROUP_COUNTS
            if not _is_count(getattr(self, name))
        ]
        if out:
            return out
        if self.kind not in [*StateKind]:
            out.append(f"{where}.kind: {self.kind!r} is unknown; one of {', '.join(StateKind)}")
        if self.layers <= 0:
            out.append(f"{where}.layers: must be at least 1")
        if self.kind == StateKind.RECURRENT:
            if self.state_bytes <= 0:
                out.append(f"{where}.state_bytes: required for a recurrent group")
        elif self.kv_heads <= 0 or self.head_dim <= 0 or self.tensors not in (1, 2):
            out.append(f"{where}: kv_heads and head_dim must be positive, tensors 1 or 2")
        if (self.kind == StateKind.SLIDING_WINDOW) != (self.window_tokens > 0):
            out.append(f"{where}.window_tokens: must be given for sliding_window and only there")
        if not 0 <= self.block_tokens <= MAX_BLOCK_TOKENS or self.bytes_override < 0:
            out.append(f"{where}: block_tokens must be 0 to {MAX_BLOCK_TOKENS:,}, and bytes_override must not be negative")
        return out

    def block_bytes(self, block_tokens: int, element_bytes: float) -> int:
        """Bytes of one block of this group. block_tokens: for a group that does not say its own."""
        block_tokens = self.block_tokens or block_tokens
        if self.bytes_override:
            return self.bytes_override
        if self.kind == StateKind.RECURRENT:
            return self.state_bytes
        return int(self.tensors * self.layers * self.kv_heads * self.head_dim * block_tokens * element_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """See the module docstring. Build it with `Namespace.create(...)`, from a mapping, or from a canonical form.

    model: name as the engine serves it. weights: digest or revision of the weights (two models of one name differ here).
    kv_dtype: effective element type of the cache, never "auto". layout: memory order inside a block, such as "NHD".
    block_tokens: tokens of one block. groups: state groups, in engine order. position: position encoding with its
    parameters, such as "rope:theta=500000". parallel: "replicated" or the split this holder has, such as "tp=0/4".
    adapter: "none" or name and digest of the LoRA. tenant: "none" or "salt:<digest>". hash_scheme, hash_seed: how
    fingerprints are computed. cache_policy: "exact" unless blocks are altered (compressed, quantised) in some named way.
    bytes_override: bytes of one block where the engine pads; 0 = by geometry. part: which state group its blocks hold, for
    an engine that keeps the groups apart (`parts`); WHOLE: a block holds all of them.
    """

    model: str
    weights: str
    kv_dtype: str
    layout: str
    block_tokens: int
    groups: tuple[StateGroup, ...]
    position: str
    parallel: str
    adapter: str
    tenant: str
    hash_scheme: str
    hash_seed: str
    cache_policy: str
    bytes_override: int = 0
    part: int = WHOLE

    def __post_init__(self) -> None:
        faults = self._faults()
        if faults:
            raise NamespaceError(faults)

    def _faults(self) -> list[str]:
        out = []
        for name in _TEXT_FIELDS:
            value = getattr(self, name)
            if value in ("", None):
                out.append(f"{name}: required, is empty")
            elif not isinstance(value, str) or value.strip() != value:
                out.append(f"{name}: must be text without spaces around it")
            elif value.lower() in ("auto", "default", "unknown"):
                out.append(f"{name}: {value!r} is not allowed: say the effective value the engine really uses")
            elif name == "kv_dtype" and value not in DTYPE_BYTES:
                out.append(f"kv_dtype: {value!r} is unknown; one of {', '.join(DTYPE_BYTES)}")
            elif name == "tenant" and not _TENANT.fullmatch(value):
                # The value is not repeated: it may be a salt that somebody put into the wrong field.
                out.append('tenant: must be "none", or give the salt as tenant_salt, of which only a digest is kept')
        if not 0 < self.block_tokens <= MAX_BLOCK_TOKENS:
            out.append(f"block_tokens: must be 1 to {MAX_BLOCK_TOKENS:,}")
        if not self.groups:
            out.append("groups: at least one state group is required")
        for number, group in enumerate(self.groups):
            out += group.faults(f"groups[{number}]")
        if self.bytes_override < 0:
            out.append("bytes_override: must not be negative")
        if not out and self.part != WHOLE:
            out += self._part_faults()
        elif len(self.groups) == 1 and self.groups[0].block_tokens not in (0, self.block_tokens):
            out.append("groups[0].block_tokens: the only state group has the namespace's block_tokens; leave it out")
        if not out and not 0 < self.block_bytes <= MAX_BLOCK_BYTES:
            out.append(f"groups: a block would have {self.block_bytes} bytes, must be between 1 and {MAX_BLOCK_BYTES}")
        return out

    def _part_faults(self) -> list[str]:
        if not 0 <= self.part < len(self.groups):
            return [f"part: must be the number of one of the {len(self.groups)} groups, or {WHOLE} for all, is {self.part}"]
        if self.block_tokens != (self.groups[self.part].block_tokens or self.block_tokens):
            return ["part: block_tokens must be those of its state group; make parts with Namespace.parts()"]
        return []

    @classmethod
    def create(cls, *, tenant_salt: bytes | str | None = None, **fields: Any) -> Namespace:
        """From keyword arguments or a parsed file. Raises NamespaceError with everything missing, unknown or ambiguous.

        tenant_salt: at least 8 bytes; kept only as a digest. groups: StateGroup objects or mappings.
        """
        faults = [f"{name}: unknown field; known: {', '.join(_FIELDS)}" for name in sorted(set(fields) - set(_FIELDS))]
        values = {name: fields[name] for name in fields if name in _FIELDS}
        try:
            values["groups"] = tuple(_group(item) for item in values.get("groups", ()))
        except TypeError as error:
            faults.append(f"groups: {error}")
            values["groups"] = ()
        if tenant_salt is not None:
            try:
                values["tenant"] = "salt:" + salt_digest(tenant_salt)
            except ValueError as error:
                faults.append(f"tenant_salt: {error}")
        values.setdefault("tenant", NO_TENANT)
        for name in _COUNTS:
            if name in values and not _is_count(values[name]):
                faults.append(f"{name}: must be a whole number, is {values[name]!r}")
                values[name] = 1
        probe = object.__new__(cls)
        for name in _FIELDS:
            object.__setattr__(probe, name, values.get(name, _COUNTS.get(name, "")))
        faults += probe._faults()
        if faults:
            raise NamespaceError(faults)
        return probe

    @classmethod
    def announced(
        cls,
        *,
        model: str,
        block_tokens: int,
        hash_scheme: str,
        hash_seed: str,
        kind: str = StateKind.FULL,
        window_tokens: int = 0,
        adapter: str = "none",
        tenant: str = NO_TENANT,
        parallel: str = REPLICATED,
    ) -> Namespace:
        """Of blocks that an engine announces in events, whose geometry nobody states. One state group; raises NamespaceError.

        Such blocks are for routers: an agent that attaches always has a namespace with geometry, so these never match it.
        """
        recurrent = kind == StateKind.RECURRENT
        group = StateGroup(
            kind=kind,
            layers=1,
            kv_heads=0 if recurrent else 1,
            head_dim=0 if recurrent else 1,
            tensors=1,
            window_tokens=window_tokens,
            state_bytes=1 if recurrent else 0,
        )
        return cls.create(
            model=model, weights=ANNOUNCED, kv_dtype="uint8", layout=ANNOUNCED, block_tokens=block_tokens, groups=(group,),
            position=ANNOUNCED, parallel=parallel, adapter=adapter, tenant=tenant, hash_scheme=hash_scheme,
            hash_seed=hash_seed, cache_policy=ANNOUNCED,
        )  # fmt: skip

    @property
    def is_announced(self) -> bool:
        """Whether its blocks are only told of by an engine (`announced`)."""
        return self.cache_policy == ANNOUNCED

    @classmethod
    def from_canonical(cls, text: str | bytes) -> Namespace:
        """From `canonical()`. Raises NamespaceError on garbage or another version."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise NamespaceError([f"not a canonical namespace: {error}"]) from error
        if not isinstance(fields, dict) or "version" not in fields:
            raise NamespaceError(["not a canonical namespace: it is a JSON object with a version"])
        version = fields.pop("version")
        if version != CANONICAL_VERSION:
            raise NamespaceError([f"canonical version {version} is not {CANONICAL_VERSION}: both sides need the same release"])
        unknown = sorted(set(fields) - set(_FIELDS))
        if unknown:
            raise NamespaceError([f"{name}: unknown field; known: {', '.join(_FIELDS)}" for name in unknown])
        return cls.create(**fields)

    def canonical(self) -> str:
        """Canonical JSON: sorted keys, no spaces, ASCII; equal namespaces give equal text.

        Fields that came later are left out where they say nothing, so that the digests of earlier releases stand.
        """
        fields: dict[str, Any] = dataclasses.asdict(self) | {"version": CANONICAL_VERSION}
        if self.part == WHOLE:
            del fields["part"]
        for group in fields["groups"]:
            for name in ("block_tokens", "bytes_override"):
                if not group[name]:
                    del group[name]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @property
    def digest(self) -> bytes:
        """32 bytes: BLAKE2b-256 of the canonical form (RFC 7693)."""
        return _digest_of(self)

    @property
    def group(self) -> StateGroup:
        """The one state group that its blocks hold. ValueError for a namespace of several: ask one of its `parts`."""
        if self.part == WHOLE and len(self.groups) > 1:
            raise ValueError(f"{self.short} has {len(self.groups)} state groups in a block; take one of its parts()")
        return self.groups[max(self.part, 0)]

    def parts(self) -> tuple[Namespace, ...]:
        """One namespace for each state group, whose blocks are stored, evicted and found on their own (docs/state.md).

        Itself, where there is only one group. Of a part: all of them, itself among them, as far as its `parallel` still says
        the rank.
        """
        return tuple(self.of_group(number) for number in range(len(self.groups)))

    def of_group(self, number: int) -> Namespace:
        """The part that holds state group `number`. Every part names all groups, so two models never share one by accident.

        MLA state is the same on every tensor-parallel rank: its part has no such split, and is stored once.
        """
        if len(self.groups) == 1:
            return self
        groups, group = self.groups, self.groups[number]
        if any(item.block_tokens for item in groups):
            groups = tuple(dataclasses.replace(item, block_tokens=item.block_tokens or self.block_tokens) for item in groups)
        return dataclasses.replace(
            self,
            groups=groups,
            part=number,
            block_tokens=group.block_tokens or self.block_tokens,
            parallel=without(self.parallel, "tp") if group.kind == StateKind.MLA else self.parallel,
        )

    def family(self) -> tuple[Namespace, ...]:
        """It and those of the other ranks of its split, in order of rank; only itself where `parallel` names no split."""
        return tuple(dataclasses.replace(self, parallel=parallel) for parallel in ranks(self.parallel))

    @property
    def block_bytes(self) -> int:
        """Bytes of one stored block: the sum over state groups, or `bytes_override`; of a part, those of its group."""
        element = DTYPE_BYTES[self.kv_dtype]
        if self.part != WHOLE:
            return self.group.block_bytes(self.block_tokens, element)
        return self.bytes_override or sum(group.block_bytes(self.block_tokens, element) for group in self.groups)

    @property
    def short(self) -> str:
        """For people: model, of a part its state group, and the first eight hex digits of the digest."""
        group = "" if self.part == WHOLE else f"/{self.part}-{self.group.kind}"
        return f"{self.model}{group}@{self.digest.hex()[:8]}"

    @staticmethod
    def diff(a: Namespace, b: Namespace) -> list[str]:
        """Why two namespaces do not match, one sentence a difference; empty when they do."""
        out = []
        for name in _FIELDS:
            left, right = getattr(a, name), getattr(b, name)
            if left == right:
                continue
            if name == "tenant":
                out.append("tenant: the tenant salts differ, or only one side has one")
            elif name == "groups":
                out += _diff_groups(left, right)
            else:
                out.append(f"{name}: {left!r} here, {right!r} there ({_MEANING.get(name, 'blocks are not interchangeable')})")
        return out


_FIELDS = tuple(field.name for field in dataclasses.fields(Namespace))
_COUNTS = {"block_tokens": 0, "bytes_override": 0, "part": WHOLE}
"""Fields that are whole numbers, with what they are when not given."""
_TEXT_FIELDS = tuple(name for name in _FIELDS if name not in _COUNTS and name != "groups")
_GROUP_COUNTS = tuple(field.name for field in dataclasses.fields(StateGroup) if field.name != "kind")
_TENANT = re.compile(r"none|salt:[0-9a-f]{32}")
_MEANING = {
    "weights": "same name, other weights: the bytes differ",
    "kv_dtype": "the element type of the cache differs",
    "layout": "the order of elements inside a block differs",
    "block_tokens": "blocks cover different numbers of tokens",
    "parallel": "each holds a different part of the heads or layers",
    "hash_scheme": "fingerprints are computed differently and can never match",
    "hash_seed": "fingerprints are computed differently and can never match; for vLLM set the same PYTHONHASHSEED everywhere",
    "adapter": "another LoRA adapter",
    "part": "each holds another state group",
}


@functools.lru_cache(maxsize=256)
def _digest_of(namespace: Namespace) -> bytes:
    """Once per namespace: it is asked for in every call, and costs more than many of them."""
    return hashlib.blake2b(namespace.canonical().encode(), digest_size=32, person=b"kvdir-namespace").digest()


def salt_digest(salt: bytes | str) -> str:
    """Hex digest that stands for a tenant salt. ValueError below 8 bytes: short salts can be guessed."""
    raw = salt.encode() if isinstance(salt, str) else bytes(salt)
    if len(raw) < 8:
        raise ValueError("must have at least 8 bytes: short salts can be guessed")
    return hashlib.blake2b(raw, digest_size=16, person=b"kvdir-salt").hexdigest()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_BLOCK_BYTES


def _group(item: StateGroup | Mapping[str, Any]) -> StateGroup:
    return item if isinstance(item, StateGroup) else StateGroup(**item)


def _diff_groups(left: Sequence[StateGroup], right: Sequence[StateGroup]) -> list[str]:
    if len(left) != len(right):
        return [f"groups: {len(left)} state groups here, {len(right)} there"]
    out = []
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        for field in dataclasses.fields(StateGroup):
            mine, theirs = getattr(a, field.name), getattr(b, field.name)
            if mine != theirs:
                out.append(f"groups[{number}].{field.name}: {mine!r} here, {theirs!r} there (the geometry of a block differs)")
    return out
