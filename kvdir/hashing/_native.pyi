"""Types of the native chains; what they compute is in csrc/chain.hpp and docs/hashing.md."""

from typing import Any

import numpy.typing as npt

Packed = bytes | bytearray | memoryview | npt.NDArray[Any]
"""Contiguous."""

def hash_blocks(
    chain: int,
    tokens: Packed,
    block_tokens: int,
    *,
    root: Packed | None = None,
    extras: Packed | None = None,
    extra_ends: Packed | None = None,
    seed: int = 0,
) -> bytes: ...
def xxh3_128(data: Packed) -> bytes: ...
def xxh3_64(data: Packed, seed: int) -> int: ...
def fnv1a_64(data: Packed) -> int: ...
def sha256_is_accelerated() -> bool: ...
