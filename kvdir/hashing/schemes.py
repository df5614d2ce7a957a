"""The table of schemes: names as they stand in a namespace's hash_scheme, widths, and what each is to its project.

Rules: a name never changes its meaning; what a project changes gets a new name. `@16` after it says that hashes are made after
every 16 tokens where blocks have more: a block's fingerprint is the hash at its end. A suffix `:low64` says that only the 64
bits which the engine's events carry are known (Scheme.told). `opaque` is a scheme that nobody here can compute: accepted,
never computed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from kvdir.errors import InvalidInput

BUILTIN = "builtin"
"""hash_seed: the fixed seed that the project has in its code."""

OPAQUE = "opaque"
LOW64 = ":low64"


class Chain(enum.IntEnum):
    """Numbers of the native chains (csrc/chain.hpp)."""

    SHA256_PICKLE = 0
    SHA256_CBOR = 1
    XXH3_PICKLE = 2
    XXH3_CBOR = 3
    SHA256_RAW = 4
    XXH3_SEEDED = 5
    FNV_CBOR = 6


class Seeding(enum.Enum):
    """What a seed is to a scheme."""

    TEXT = "any text, hashed into the root"
    NUMBER = "a number below 2**64"
    NONE = "no seed"


class Extra(enum.Enum):
    """How the extra keys of a block (LoRA, media, salt) get into its message."""

    PICKLE = "pickle"
    CBOR = "cbor"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way to compute fingerprints.

    width: bytes of one. chain: the native one; None: BLAKE3, by its package. builtin_seed: what "builtin" means, None where
    the project has no fixed seed. told: which 64 bits of a wider fingerprint events carry as a number. setting: how the engine
    is told to use it, for messages. by_model: the chain's root is made of the model's name, too.
    """

    name: str
    width: int
    chain: Chain | None
    seeding: Seeding
    builtin_seed: str | None
    extra: Extra
    told: Literal["first", "last"] = "last"
    setting: str
    by_model: bool = False


def _vllm(algorithm: str, width: int, chain: Chain, builtin_seed: str | None, extra: Extra) -> Scheme:
    setting = f"--prefix-caching-hash-algo {algorithm}"
    return Scheme(
        name=f"vllm:{algorithm}", width=width, chain=chain, seeding=Seeding.TEXT, builtin_seed=builtin_seed, extra=extra,
        setting=setting,
    )  # fmt: skip


VLLM_SEED = "vllm-none-hash"
"""What vLLM's SHA-256 chains begin with unless PYTHONHASHSEED is set (v1/core/kv_cache_utils.py of 0.32, its PR 51875)."""

_ALL = (
    _vllm("sha256", 32, Chain.SHA256_PICKLE, VLLM_SEED, Extra.PICKLE),
    _vllm("sha256_cbor", 32, Chain.SHA256_CBOR, VLLM_SEED, Extra.CBOR),
    _vllm("xxhash", 16, Chain.XXH3_PICKLE, None, Extra.PICKLE),
    _vllm("xxhash_cbor", 16, Chain.XXH3_CBOR, None, Extra.CBOR),
    Scheme(
        name="sglang:sha256", width=32, chain=Chain.SHA256_RAW, seeding=Seeding.NONE, builtin_seed="", extra=Extra.NONE,
        told="first", setting="SGLang's page hash",
    ),
    Scheme(
        name="dynamo:xxh3", width=8, chain=Chain.XXH3_SEEDED, seeding=Seeding.NUMBER, builtin_seed="1337", extra=Extra.NONE,
        setting="Dynamo's sequence hash",
    ),
    Scheme(
        name="llmd:cbor-fnv", width=8, chain=Chain.FNV_CBOR, seeding=Seeding.TEXT, builtin_seed="", extra=Extra.CBOR,
        setting="llm-d's hashSeed", by_model=True,
    ),
    Scheme(
        name="kvdir:blake3", width=32, chain=None, seeding=Seeding.TEXT, builtin_seed="", extra=Extra.CBOR,
        setting="kvdir's own chain",
    ),
)  # fmt: skip

SCHEMES: Mapping[str, Scheme] = MappingProxyType({scheme.name: scheme for scheme in _ALL})


@dataclass(frozen=True, slots=True)
class Naming:
    """What a hash_scheme says: the scheme, whether only 64 bits are known, and after how many tokens a hash is made (0:
    blocks).
    """

    scheme: Scheme
    low64: bool
    every_tokens: int


def parse(name: str) -> Naming:
    """A hash_scheme, `scheme[@tokens][:low64]`. Raises InvalidInput in words for any other text."""
    base, at, every = name.removesuffix(LOW64).partition("@")
    if base == OPAQUE:
        raise InvalidInput(f"hash scheme {name!r} is known to nobody: such fingerprints can be matched, not computed")
    scheme = SCHEMES.get(base)
    if scheme is None:
        raise InvalidInput(
            f"hash scheme {name!r} is unknown; one of {', '.join(SCHEMES)}, with {LOW64} where only 64 bits are known"
        )
    if at and not (every.isascii() and every.isdigit() and len(every) <= 7 and int(every) > 0):
        raise InvalidInput(f"hash scheme {name!r}: after @ comes the number of tokens for each hash, such as {base}@16")
    if name.endswith(LOW64) and scheme.width == 8:
        raise InvalidInput(f"hash scheme {name!r}: {base} has 64 bits and no others; write it without {LOW64}")
    return Naming(scheme, name.endswith(LOW64), int(every or 0))
