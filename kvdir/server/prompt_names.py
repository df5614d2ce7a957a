"""From a prompt to the names of its blocks: the parts to score, over every namespace that may know them.

    tokens or hashes ─▶ fingerprints in each namespace of the model ─▶ groups of a family ─▶ parts of like families

Rules:
- A family are the namespaces that belong to one way of keeping a model's state: the state groups, and the ranks of a split, of
  one set-up. All of them are needed together, so each is a group of the part.
- Families of the same kinds of groups name the same blocks: what an engine announces and what the arenas keep. They are names
  of the same groups, so that a block counts wherever it is. A family that is split over ranks gives each rank's group those.
- Engines of one model and scheme are one announced family. Should they differ in their state groups, what counts is what they
  all need: that may miss a hit, it never claims one.
- A namespace whose fingerprints cannot be computed here is left out, and why is said.
Pure.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvdir.core.best_tiers import Kind, kind_of
from kvdir.core.score import ScoreGroup, ScoreName, ScorePart
from kvdir.engines.events import lora_name_of, tenant_of
from kvdir.errors import InvalidInput, Unsupported
from kvdir.fingerprint import Fingerprints
from kvdir.hashing import LOW64, OPAQUE, SCHEMES, fingerprints, parse, vllm_extra
from kvdir.hashing import _native as native
from kvdir.hashing.roots import seed_number
from kvdir.hashing.schemes import Extra
from kvdir.namespace import NO_TENANT, WHOLE, Namespace, salt_digest

Naming = Callable[[Namespace], Fingerprints | None]
"""The prompt's fingerprints in a namespace; None: they cannot be had. Raises InvalidInput, Unsupported with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which namespaces may know a prompt. adapter: as a namespace has it (engines.adapter_of). cache_salt: opens those of the
    tenant with that salt; tenant_id: those that a router's events name so (engines.tenant_of).
    """

    model: str
    adapter: str = "none"
    cache_salt: str = ""
    tenant_id: str = ""

    @property
    def tenants(self) -> frozenset[str]:
        """Whose namespaces may know it."""
        tenants = {NO_TENANT, tenant_of(self.tenant_id or None), tenant_of(self.tenant_id or None, self.cache_salt)}
        if len(self.cache_salt.encode()) >= 8:
            tenants.add(f"salt:{salt_digest(self.cache_salt)}")
        return frozenset(tenants)

    def holds(self, namespace: Namespace) -> bool:
        return namespace.model == self.model and namespace.adapter == self.adapter and namespace.tenant in self.tenants


@dataclass(frozen=True, slots=True)
class Named:
    """parts: to score. skipped: by namespace (for people) why it is not among them."""

    parts: tuple[ScorePart, ...]
    skipped: dict[str, str] = field(default_factory=dict)


def names(namespaces: Iterable[Namespace], naming: Naming, *, block_tokens: int = 0) -> Named:
    """The parts of one prompt, over the namespaces that may know it. block_tokens: only families with such blocks; 0: all."""
    skipped: dict[str, str] = {}
    families: defaultdict[object, list[tuple[Kind, ScoreName]]] = defaultdict(list)
    broken: set[object] = set()
    for namespace in namespaces:
        family = _family(namespace)
        try:
            named = naming(namespace)
        except (InvalidInput, Unsupported) as error:
            named, skipped[namespace.short] = None, str(error)
        if named is None:
            broken.add(family)  # without one of its groups nothing can be said about the others
        else:
            families[family].append((kind_of(namespace), ScoreName(namespace.digest, named)))
    kept = [
        members
        for family, members in families.items()
        if family not in broken and block_tokens in (0, *(kind.block_tokens for kind, _ in members))
    ]
    return Named(tuple(_parts(kept)), skipped)


def _parts(families: Sequence[Sequence[tuple[Kind, ScoreName]]]) -> Iterable[ScorePart]:
    single: defaultdict[frozenset[Kind], defaultdict[Kind, list[ScoreName]]] = defaultdict(lambda: defaultdict(list))
    split = []
    for members in families:
        kinds = Counter(kind for kind, _ in members)
        if max(kinds.values()) > 1:
            split.append((frozenset(kinds), members))
            continue
        for kind, name in members:
            single[frozenset(kinds)][kind].append(name)
    for groups in single.values():
        yield ScorePart(tuple(ScoreGroup(tuple(group)) for _, group in sorted(groups.items())))
    for kinds_of, members in split:
        yield ScorePart(tuple(ScoreGroup((name, *single[kinds_of][kind])) for kind, name in members))


def _family(namespace: Namespace) -> object:
    """Equal for those that are needed together."""
    hashed = (namespace.hash_scheme.removesuffix(LOW64), namespace.hash_seed, namespace.adapter, namespace.tenant)
    if namespace.is_announced:
        return hashed
    kept = (namespace.weights, namespace.kv_dtype, namespace.layout, namespace.groups, namespace.position)
    return (*hashed, *kept, namespace.cache_policy, namespace.bytes_override, namespace.part == WHOLE)


# -- by tokens -----------------------------------------------------------------------------------------------------------


def by_tokens(tokens: npt.NDArray[np.uint32], *, adapter: str = "none", adapter_path: str = "", cache_salt: str = "") -> Naming:
    """As the engine of each scheme hashes them; each scheme, seed and block size once. adapter: as a namespace has it."""
    lora = lora_name_of(adapter) or ""

    @functools.cache
    def hashed(scheme: str, seed: str, block_tokens: int, model: str) -> Fingerprints:
        extra = None
        if lora or cache_salt:
            known = parse(scheme)
            if known.scheme.extra not in (Extra.PICKLE, Extra.CBOR) or not known.scheme.name.startswith("vllm:"):
                raise InvalidInput(f"how {scheme} takes an adapter or a cache salt into its hashes is not known here")
            hashes = len(tokens) // (known.every_tokens or block_tokens)
            extra = vllm_extra(hashes, lora_name=lora, lora_path=adapter_path, cache_salt=cache_salt)
        return fingerprints(tokens, scheme=scheme, seed=seed, block_tokens=block_tokens, extra=extra, model=model)

    def naming(namespace: Namespace) -> Fingerprints:
        return hashed(namespace.hash_scheme, namespace.hash_seed, namespace.block_tokens, namespace.model)

    return naming


# -- by hash -------------------------------------------------------------------------------------------------------------


def by_hashes(hashes: Sequence[bytes], *, local: bool = False) -> Naming:
    """Hashes that the caller computed, in every namespace whose fingerprints are as wide; whole ones also where 64 bits are
    told.

    local: of single blocks, as Dynamo's clients send them: chained where Dynamo would, taken for rolling elsewhere.
    """
    given = Fingerprints.of(hashes)

    def naming(namespace: Namespace) -> Fingerprints | None:
        scheme = namespace.hash_scheme
        base = scheme.removesuffix(LOW64)
        if base == OPAQUE:
            return given
        if base not in SCHEMES and "@" not in base:
            return given
        known = parse(scheme)
        if local and known.scheme.name == "dynamo:xxh3" and given.width == 8:
            return chained(hashes, seed_number(known.scheme, namespace.hash_seed))
        if known.low64 and given.width == known.scheme.width:
            told = (item[:8] if known.scheme.told == "first" else item[-8:] for item in hashes)
            return Fingerprints(b"".join(told), 8)
        if given.width != (8 if known.low64 else known.scheme.width):
            return None
        return given

    return naming


def chained(local: Sequence[bytes], seed: int) -> Fingerprints:
    """Rolling hashes of Dynamo from those of single blocks: each is XXH3-64 of the one before and its own, little endian."""
    out = list(local[:1])
    for _, own in pairwise(local):
        rolled = native.xxh3_64(out[-1][::-1] + own[::-1], seed)
        out.append(rolled.to_bytes(8, "big"))
    return Fingerprints.of(out)
