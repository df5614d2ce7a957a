"""Packed fingerprints: the content identities of consecutive blocks, in one bytes object.

Rules: never a list of ints across a boundary; width is 8, 16 or 32 bytes; standard library only, but for `from_tokens`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdir.errors import InvalidInput

if TYPE_CHECKING:
    from kvdir.hashing.tokens import Tokens

WIDTHS = (8, 16, 32)


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """n fingerprints of `width` bytes each, packed without separators; immutable and hashable.

    Raises InvalidInput if the width is not 8, 16 or 32 or the buffer is not a multiple of it.
    """

    packed: bytes
    width: int

    def __post_init__(self) -> None:
        if self.width not in WIDTHS:
            raise InvalidInput(f"fingerprint width is {self.width}, must be one of 8, 16, 32 bytes")
        if len(self.packed) % self.width:
            raise InvalidInput(
                f"fingerprint buffer has {len(self.packed)} bytes, not a multiple of the width {self.width}: "
                "pass whole fingerprints, packed without separators"
            )

    @classmethod
    def of(cls, items: Sequence[bytes]) -> Fingerprints:
        """From separate fingerprints of one width. An empty list has width 32."""
        width = len(items[0]) if items else 32
        if any(len(item) != width for item in items):
            raise InvalidInput("fingerprints of different widths in one list")
        return cls(b"".join(items), width)

    @classmethod
    def chain(cls, parts: Iterable[bytes], *, root: bytes = b"") -> Fingerprints:
        """32-byte chained fingerprints: item i = BLAKE2b-256(item i-1 || part i), so equal item = equal prefix (RFC 7693)."""
        previous, out = root, []
        for part in parts:
            previous = hashlib.blake2b(previous + part, digest_size=32, person=b"kvdir-chain").digest()
            out.append(previous)
        return cls(b"".join(out), 32)

    @classmethod
    def from_tokens(
        cls,
        tokens: Tokens,
        *,
        scheme: str,
        block_tokens: int,
        seed: str = "builtin",
        extra: Sequence[Any] | None = None,
        root: bytes | None = None,
        model: str = "",
    ) -> Fingerprints:
        """Of the whole blocks of a prompt, as the engine of that scheme computes them; see kvdir.hashing.fingerprints."""
        from kvdir.hashing import fingerprints

        return fingerprints(tokens, scheme=scheme, block_tokens=block_tokens, seed=seed, extra=extra, root=root, model=model)

    def __len__(self) -> int:
        return len(self.packed) // self.width

    def __getitem__(self, position: int) -> bytes:
        if not 0 <= position < len(self):
            raise IndexError(position)
        return self.packed[position * self.width : (position + 1) * self.width]

    def __iter__(self) -> Iterator[bytes]:
        width = self.width
        return (self.packed[at : at + width] for at in range(0, len(self.packed), width))

    def narrowed(self, width: int) -> Fingerprints:
        """The first `width` bytes of each; itself if they are no wider."""
        if width >= self.width:
            return self
        if width not in WIDTHS:
            raise InvalidInput(f"fingerprint width is {width}, must be one of 8, 16, 32 bytes")
        words, wide = width // 8, self.width // 8
        narrow = bytearray(len(self) * width)
        source, target = memoryview(self.packed).cast("Q"), memoryview(narrow).cast("Q")
        for word in range(words):
            target[word::words] = source[word::wide]
        return Fingerprints(bytes(narrow), width)

    def slice(self, start: int, count: int) -> Fingerprints:
        """Positions [start, start + count)."""
        return Fingerprints(self.packed[start * self.width : (start + count) * self.width], self.width)

    def select(self, positions: Iterable[int]) -> Fingerprints:
        """The given positions, in the given order. IndexError if one does not exist."""
        packed, width = self.packed, self.width
        parts = [packed[position * width : (position + 1) * width] for position in positions]
        chosen = b"".join(parts)
        if len(chosen) != width * len(parts):
            raise IndexError(f"a position is outside 0..{len(self) - 1}")
        return Fingerprints(chosen, width)
