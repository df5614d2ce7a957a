"""Figures of the hash schemes: tokens a second, beside the bare hash function over the very bytes that a scheme hashes.

Owns the measuring; `kvdir bench hash` prints it. Two yardsticks in the same rounds: all messages in one piece, made beforehand
(what the hash itself costs at best), and a block at a time in Python, as vLLM does it (with cbor2 where it is installed).
Medians. Does not: judge a figure.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from kvdir.hashing import SCHEMES, Scheme, _native, fingerprints
from kvdir.hashing.blake3_chain import blake3_once, is_available
from kvdir.hashing.schemes import Chain

__all__ = ["run_hash_bench"]

TOKENS = 131_072
VOCABULARY = 152_000
BLOCK_TOKENS = (16, 64)
ROUNDS = 15

Advance = Callable[..., None]
Hash = Callable[[bytes], object]
Message = Callable[[list[int]], bytes]
"""Of one block: as long as what the scheme hashes. The parent is made of zeros, for none of the hashes cares."""


def run_hash_bench(*, advance: Advance = lambda n=1.0, text=None: None) -> dict[str, Any]:
    """One prompt of TOKENS tokens under every scheme whose package is installed."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, TOKENS, np.uint32)
    cases = [(scheme, size) for scheme in SCHEMES.values() for size in BLOCK_TOKENS]
    rows = []
    for scheme, size in cases:
        if scheme.chain is not None or is_available():
            rows.append(_row(scheme, tokens, size))
        advance(1 / len(cases), scheme.name)
    return {"tokens": TOKENS, "sha_instructions": _native.sha256_is_accelerated(), "rows": rows}


def _row(scheme: Scheme, tokens: np.ndarray[Any, Any], size: int) -> dict[str, Any]:
    hashed, message = _hash_of(scheme), _message_of(scheme)
    ids: list[int] = tokens.tolist()
    seed = "0" if scheme.builtin_seed is None else "builtin"

    def ours() -> None:
        fingerprints(tokens, scheme=scheme.name, block_tokens=size, seed=seed, model="m")

    def in_python() -> None:
        for start in range(0, TOKENS, size):
            hashed(message(ids[start : start + size]))

    together = b"".join(message(ids[start : start + size]) for start in range(0, TOKENS, size))
    ours_s, python_s, bare_s = _medians(ours, in_python, lambda: hashed(together))
    return {
        "scheme": scheme.name,
        "block_tokens": size,
        "tokens_per_s": TOKENS / ours_s,
        "python_tokens_per_s": TOKENS / python_s,
        "bare_hash_tokens_per_s": TOKENS / bare_s,
        "to_python_ratio": python_s / ours_s,
        "to_bare_hash_ratio": bare_s / ours_s,
    }


def _medians(*works: Callable[[], object]) -> list[float]:
    """Seconds of each, in turns, so that a busy machine slows all alike."""
    took: list[list[float]] = [[] for _ in works]
    for _ in range(ROUNDS):
        for work, times in zip(works, took, strict=True):
            began = perf_counter()
            work()
            times.append(perf_counter() - began)
    return [median(times) for times in took]


def _hash_of(scheme: Scheme) -> Hash:
    match scheme.chain:
        case Chain.SHA256_PICKLE | Chain.SHA256_CBOR | Chain.SHA256_RAW:
            return lambda data: hashlib.sha256(data).digest()
        case Chain.XXH3_PICKLE | Chain.XXH3_CBOR:
            return _native.xxh3_128
        case Chain.XXH3_SEEDED:
            return lambda data: _native.xxh3_64(data, 1337)
        case Chain.FNV_CBOR:
            return _native.fnv1a_64
    return blake3_once


def _message_of(scheme: Scheme) -> Message:
    parent = bytes(scheme.width)
    match scheme.chain:
        case Chain.SHA256_PICKLE | Chain.XXH3_PICKLE:
            return lambda block: pickle.dumps((parent, tuple(block), None), protocol=5)
        case Chain.SHA256_CBOR | Chain.XXH3_CBOR:
            encode = _cbor_encoder()
            return lambda block: encode((parent, block, None))
        case Chain.FNV_CBOR:
            encode = _cbor_encoder()
            return lambda block: encode((2**63, block, None))
    extra = bytes(2 * scheme.width if scheme.chain is Chain.XXH3_SEEDED else scheme.width)
    return lambda block: extra + np.array(block, "<u4").tobytes()


def _cbor_encoder() -> Callable[[Any], bytes]:
    try:
        import cbor2
    except ImportError:
        from kvdir.hashing.extra import cbor

        return cbor
    return lambda value: cbor2.dumps(value, canonical=True)
