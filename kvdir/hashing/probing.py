"""The probe: the fingerprint of fixed tokens, by which two sides find out at once that they hash differently, and how.

Without it such engines simply never hit. The probe's tokens are 1, 2, ... block_tokens, without adapter, salt or other extra
keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdir.errors import InvalidInput, Unsupported
from kvdir.hashing.chain import fingerprints
from kvdir.hashing.extra import ExtraKeys
from kvdir.hashing.schemes import BUILTIN, LOW64, SCHEMES, Scheme, Seeding, parse
from kvdir.hashing.tokens import Tokens

_SEEDS = (BUILTIN, "0", "1", "42", "123", "1234", "random")
"""PYTHONHASHSEED as people set it."""

_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Block sizes that engines have."""

MOST_TRIED_TOKENS = 4096
"""Of larger blocks no other way is tried: it would take seconds, and whoever attaches is waited for."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to name blocks."""

    scheme: str
    seed: str
    block_tokens: int

    def first(self, tokens: Tokens | None, extra: ExtraKeys | None, model: str) -> bytes | None:
        """Its fingerprint of a first block; None if it cannot be computed."""
        if tokens is None:
            tokens = probe_tokens(self.block_tokens)
        try:
            found = fingerprints(
                tokens, scheme=self.scheme, seed=self.seed, block_tokens=self.block_tokens, extra=extra, model=model
            )
        except (InvalidInput, Unsupported):
            return None
        return found[0] if len(found) else None


def probe(scheme: str, seed: str, block_tokens: int, *, model: str = "") -> bytes:
    """Fingerprint of the tokens 1 .. block_tokens. Raises InvalidInput for a scheme or seed that cannot be computed."""
    return fingerprints(probe_tokens(block_tokens), scheme=scheme, seed=seed, block_tokens=block_tokens, model=model)[0]


def probe_tokens(block_tokens: int) -> npt.NDArray[np.uint32]:
    return np.arange(1, block_tokens + 1, dtype=np.uint32)


def explain_mismatch(
    seen: bytes,
    *,
    scheme: str,
    seed: str,
    block_tokens: int,
    tokens: Tokens | None = None,
    extra: ExtraKeys | None = None,
    model: str = "",
) -> str:
    """Why a fingerprint that an engine gave is not that of `scheme` and `seed`, and what to set; "" if it is.

    Also "" where `scheme` and `seed` cannot be computed here (`opaque`, names of others), so that nothing can be compared.
    tokens: of one first block, with its `extra` keys; None: those of the probe, for which other block sizes are tried, too.
    Costs up to some ten milliseconds when they differ.
    """
    ours = _Way(scheme, seed, block_tokens)
    wanted = ours.first(tokens, extra, model)
    if wanted is None or seen == wanted:
        return ""
    what = "the probe" if tokens is None else "a first block"
    out = (
        f"the engine's fingerprint of {what} is {_short(seen)}, by {scheme} with hash_seed {seed!r} and {block_tokens} tokens "
        f"a block it would be {_short(wanted)}: no block would ever be found. "
    )
    for way in _other_ways(ours, len(seen), sizes=_SIZES if tokens is None else ()):
        if way.first(tokens, extra, model) == seen:
            return out + _advice(ours, way)
    return out + _no_advice(len(seen))


def _other_ways(ours: _Way, width: int, *, sizes: tuple[int, ...]) -> Iterator[_Way]:
    """Of fingerprints with this width, likely ones first: another seed, another scheme, hashes after fewer tokens, other
    blocks.
    """
    if ours.block_tokens > MOST_TRIED_TOKENS:
        return
    mine = parse(ours.scheme)
    schemes = [scheme for scheme in SCHEMES.values() if scheme.width == width or width == 8 < scheme.width]
    schemes.sort(key=lambda scheme: scheme is not mine.scheme)
    seeds = dict.fromkeys((ours.seed, *_SEEDS))
    for every, size in dict.fromkeys(_spans(mine.every_tokens, ours.block_tokens, sizes)):
        for scheme in schemes:
            for seed in (BUILTIN,) if scheme.seeding is Seeding.NONE else seeds:
                yield _Way(_name(scheme, every, low64=scheme.width != width), seed, size)


def _spans(every: int, block_tokens: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(tokens for each hash or 0 for a block, tokens of a block)"""
    yield every, block_tokens
    yield 0, block_tokens
    for size in sizes:
        if size < block_tokens and block_tokens % size == 0:
            yield size, block_tokens
    for size in sizes:
        yield 0, size


def _name(scheme: Scheme, every: int, *, low64: bool) -> str:
    return scheme.name + (f"@{every}" if every else "") + (LOW64 if low64 else "")


def _advice(ours: _Way, theirs: _Way) -> str:
    fixes, lines = [], []
    if theirs.block_tokens != ours.block_tokens:
        fixes.append(f"give it blocks of {ours.block_tokens} tokens")
        lines.append(f"block_tokens = {theirs.block_tokens}")
    if theirs.scheme != ours.scheme:
        fixes.append(_scheme_fix(ours.scheme, theirs.scheme))
        lines.append(f'hash_scheme = "{theirs.scheme}"')
    if theirs.seed != ours.seed:
        fixes += _seed_fixes(ours)
        lines.append(f'hash_seed = "{theirs.seed}"')
    return (
        f"It is what {theirs.scheme} with hash_seed {theirs.seed!r} and {theirs.block_tokens} tokens a block gives. For the "
        f"engine: {' and '.join(fixes)}. Or write {', '.join(lines)} into the namespace of every node"
    )


def _seed_fixes(ours: _Way) -> list[str]:
    scheme = parse(ours.scheme).scheme
    if scheme.seeding is Seeding.NONE:
        return []
    if not scheme.name.startswith("vllm:"):
        return [f"give it the hash seed {scheme.builtin_seed if ours.seed == BUILTIN else ours.seed!r}"]
    return ["start it without PYTHONHASHSEED" if ours.seed == BUILTIN else f"start it with PYTHONHASHSEED={ours.seed}"]


def _scheme_fix(ours: str, theirs: str) -> str:
    mine, other = parse(ours), parse(theirs)
    if mine.scheme is not other.scheme:
        return f"let it use {mine.scheme.setting}"
    if mine.low64 != other.low64:
        return f"let it tell {'64 bits of' if mine.low64 else 'whole'} hashes (vLLM: VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES)"
    return f"let it make hashes after every {mine.every_tokens} tokens" if mine.every_tokens else "let it make one hash a block"


def _no_advice(width: int) -> str:
    if width == 16:
        return (
            "16 bytes are an xxhash of vLLM, whose seed is another one in each process unless PYTHONHASHSEED is set: set "
            "PYTHONHASHSEED to the same value for every engine and write it as hash_seed into the namespace"
        )
    return (
        "No other known scheme, usual seed or block size gives it. Is PYTHONHASHSEED the same for all engines, and set where "
        "vLLM is so old that it draws a seed for each process? Hashes of a kind that nobody here knows are of scheme opaque"
    )


def _short(fingerprint: bytes) -> str:
    return f"{fingerprint[:8].hex()}{'...' if len(fingerprint) > 8 else ''} ({len(fingerprint)} bytes)"
