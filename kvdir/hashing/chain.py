"""Fingerprints of tokens by a named scheme."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.hashing import _native
from kvdir.hashing.blake3_chain import blake3_blocks
from kvdir.hashing.extra import ExtraKeys, check_extra, encode
from kvdir.hashing.roots import root_of, seed_number
from kvdir.hashing.schemes import BUILTIN, Scheme, parse
from kvdir.hashing.tokens import Tokens, as_tokens

MOST_BLOCK_TOKENS = 2**20


def fingerprints(
    tokens: Tokens,
    *,
    scheme: str,
    block_tokens: int,
    seed: str = BUILTIN,
    extra: ExtraKeys | None = None,
    root: bytes | None = None,
    model: str = "",
) -> Fingerprints:
    """Of the whole blocks of `tokens`; a last block that is not full has none, as in engines.

    scheme: as in a namespace's hash_scheme; with `:low64` the result has 8 bytes each, of chains that are computed whole.
    seed: as in hash_seed. extra: extra keys of each hash, so of each whole block. root: the fingerprint of the block before
    these, to continue a chain; whole, so never one of 64 bits of a wider scheme. model: what llm-d's root is made of, as its
    router knows it; others do without. Numbers of 64-bit schemes are stored big endian. Raises InvalidInput, in words;
    Unsupported where a package is missing.
    """
    naming = parse(scheme)
    chosen, every = naming.scheme, naming.every_tokens or block_tokens
    if not isinstance(block_tokens, int | np.integer) or not 1 <= block_tokens <= MOST_BLOCK_TOKENS:
        raise InvalidInput(f"block_tokens must be between 1 and {MOST_BLOCK_TOKENS}, is {block_tokens!r}")
    if block_tokens % every:
        raise InvalidInput(f"hash scheme {scheme!r} has no hash at the end of a block of {block_tokens} tokens: not a multiple")
    array = as_tokens(tokens)
    array = array[: len(array) // block_tokens * block_tokens]
    parent = root_of(chosen, seed, block_tokens=every, model=model) if root is None else _checked_root(chosen, root)
    packed = _hash_blocks(chosen, array, every, parent, extra, seed_number(chosen, seed))
    wide = np.frombuffer(packed, np.uint8).reshape(-1, chosen.width)[block_tokens // every - 1 :: block_tokens // every]
    if naming.low64:
        wide = wide[:, :8] if chosen.told == "first" else wide[:, -8:]
    return Fingerprints(packed if wide.nbytes == len(packed) else wide.tobytes(), wide.shape[1])


def _checked_root(scheme: Scheme, root: bytes) -> bytes:
    if len(root) == scheme.width:
        return bytes(root)
    why = "64 bits of it do not suffice to continue a chain" if len(root) == 8 else "pass the whole fingerprint before"
    raise InvalidInput(f"root has {len(root)} bytes, a fingerprint of {scheme.name} has {scheme.width}: {why}")


def _hash_blocks(
    scheme: Scheme, tokens: npt.NDArray[np.uint32], block_tokens: int, root: bytes | None, extra: ExtraKeys | None, seed: int
) -> bytes:
    if extra is not None:
        check_extra(scheme, extra, len(tokens) // block_tokens)
    if scheme.chain is None:
        assert root is not None
        return blake3_blocks(tokens, block_tokens, root, extra)
    tails, ends = (None, None) if extra is None else encode(scheme, extra)
    try:
        return _native.hash_blocks(scheme.chain, tokens, block_tokens, root=root, extras=tails, extra_ends=ends, seed=seed)
    except ValueError as error:
        raise InvalidInput(str(error)) from error
