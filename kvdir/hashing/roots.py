"""What a chain begins with: the root that a seed (and for llm-d the model's name) gives."""

from __future__ import annotations

import hashlib
import pickle

from kvdir.errors import InvalidInput
from kvdir.hashing import _native
from kvdir.hashing.blake3_chain import blake3_root
from kvdir.hashing.extra import cbor
from kvdir.hashing.schemes import BUILTIN, Chain, Scheme, Seeding


def root_of(scheme: Scheme, seed: str, *, block_tokens: int, model: str = "") -> bytes | None:
    """One fingerprint; None where a chain's first block has no parent. Raises InvalidInput for a seed it cannot have."""
    text = _seed_text(scheme, seed)
    match scheme.chain:
        case Chain.SHA256_PICKLE:
            return hashlib.sha256(pickle.dumps(text, protocol=5)).digest()
        case Chain.SHA256_CBOR:
            return hashlib.sha256(cbor(text)).digest()
        case Chain.XXH3_PICKLE:
            return _native.xxh3_128(pickle.dumps(text, protocol=5))
        case Chain.XXH3_CBOR:
            return _native.xxh3_128(cbor(text))
        case Chain.FNV_CBOR:
            if not model:
                raise InvalidInput(f"{scheme.name} needs the model's name, as the router has it: give model=...")
            return _native.fnv1a_64(cbor([_native.fnv1a_64(text.encode()), None, model])).to_bytes(8, "big")
        case None:
            return blake3_root(text, block_tokens)
    return None


def seed_number(scheme: Scheme, seed: str) -> int:
    """For the chains that take a number; 0 for the rest."""
    return int(_seed_text(scheme, seed)) if scheme.seeding is Seeding.NUMBER else 0


def _seed_text(scheme: Scheme, seed: str) -> str:
    if not isinstance(seed, str):
        raise InvalidInput(f"hash seed must be text such as {BUILTIN!r} or '0', not {type(seed).__name__}")
    if seed == BUILTIN:
        if scheme.builtin_seed is None:
            raise InvalidInput(
                f"{scheme.name} has no seed of its own: vLLM draws one for each process unless PYTHONHASHSEED is set. Set "
                "PYTHONHASHSEED to the same value for every engine and give that value as hash_seed"
            )
        return scheme.builtin_seed
    if scheme.seeding is Seeding.NONE:
        raise InvalidInput(f"{scheme.name} has no seed: hash_seed must be {BUILTIN!r}")
    if scheme.seeding is Seeding.NUMBER and not (seed.isascii() and seed.isdigit() and len(seed) <= 20 and int(seed) < 2**64):
        raise InvalidInput(f"{scheme.name} takes a number below 2**64 as hash_seed, or {BUILTIN!r}")
    return seed
