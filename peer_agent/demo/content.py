"""The bytes of the demo's blocks: derived from the fingerprint, so that every load can be checked byte for byte.

word i of a block = splitmix64(i) XOR word (i mod 4) of the fingerprint (64-bit words, little endian). A byte from another place
or from another block is wrong with probability 255/256 each, so no shift, mix-up or tear of more than a few bytes passes.
Source of splitmix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
Not thread-safe: one scratch block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FINGERPRINT_WORDS = 4
Bytes = npt.NDArray[np.uint8]


class Content:
    """Makes and checks blocks of `block_bytes` bytes for 32-byte fingerprints."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        words = -(-block_bytes // (8 * FINGERPRINT_WORDS)) * FINGERPRINT_WORDS
        self._pattern = _splitmix64(words).reshape(-1, FINGERPRINT_WORDS)
        self._scratch = np.empty_like(self._pattern)

    def fill(self, fingerprint: bytes, into: Bytes) -> None:
        """Writes the block into `into` (uint8, block_bytes)."""
        into[:] = self._expected(fingerprint)

    def make(self, fingerprint: bytes) -> Bytes:
        """A new array with the block."""
        return self._expected(fingerprint).copy()

    def matches(self, fingerprint: bytes, block: Bytes) -> bool:
        """Whether every byte is right."""
        return block.shape == (self.block_bytes,) and bool(np.array_equal(block, self._expected(fingerprint)))

    def _expected(self, fingerprint: bytes) -> Bytes:
        np.bitwise_xor(self._pattern, np.frombuffer(fingerprint, dtype="<u8"), out=self._scratch)
        return self._scratch.reshape(-1).view(np.uint8)[: self.block_bytes]


def _splitmix64(count: int) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        out: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return out
