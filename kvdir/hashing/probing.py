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
from kvdir.hashing.schemes import BUILTIN, LOW64, SCHEMES, Seeding, parse
from kvdir.hashing.tokens import Tokens

_SEEDS = (BUILTIN, "0", "1", "42", "123", "1234", "random")
"""PYTHONHASHSEED as people set it."""

_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Block sizes that engines have."""


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
    Costs up to a millisecond or two when they differ.
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
    """Of fingerprints with this width, likely ones first: what differs in one thing, then in all."""
    schemes = sorted(
        (name if known.width == width else name + LOW64)
        for name, known in SCHEMES.items()
        if known.width == width or (width == 8 < known.width)
    )
    schemes.sort(key=lambda name: name.removesuffix(LOW64) != ours.scheme.removesuffix(LOW64))
    seeds = dict.fromkeys((ours.seed, *_SEEDS))
    for size in dict.fromkeys((ours.block_tokens, *sizes)):
        for scheme in schemes:
            seeded = parse(scheme)[0].seeding is not Seeding.NONE
            for seed in seeds if seeded else (BUILTIN,):
                yield _Way(scheme, seed, size)


def _advice(ours: _Way, theirs: _Way) -> str:
    fixes, lines = [], []
    if theirs.block_tokens != ours.block_tokens:
        fixes.append(f"give the engine blocks of {ours.block_tokens} tokens")
        lines.append(f"block_tokens = {theirs.block_tokens}")
    if theirs.scheme != ours.scheme:
        fixes.append(_scheme_fix(ours.scheme, theirs.scheme))
        lines.append(f'hash_scheme = "{theirs.scheme}"')
    if theirs.seed != ours.seed:
        fixes.append("start it without PYTHONHASHSEED" if ours.seed == BUILTIN else f"start it with PYTHONHASHSEED={ours.seed}")
        lines.append(f'hash_seed = "{theirs.seed}"')
    return (
        f"It is what {theirs.scheme} with hash_seed {theirs.seed!r} and {theirs.block_tokens} tokens a block gives. Either "
        f"{' and '.join(fixes)}, or write {', '.join(lines)} into the namespace of every node"
    )


def _scheme_fix(ours: str, theirs: str) -> str:
    if theirs == ours + LOW64:
        return "let the engine tell whole hashes (vLLM: VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0)"
    return f"let the engine use {parse(ours)[0].setting}"


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
