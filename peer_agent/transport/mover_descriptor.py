"""What a plane in a mover tells its peers in Peer.Hello. Little endian:

    u8 layout version (1) | 16 B incarnation | u64 epoch | u64 arena_bytes | backend's part | u64 XXH3-64 of it and the name

The checksum keeps garbage from libraries that crash on it; it does not stop who wants to deceive. The backend's part is checked
by the backend of the mover that connects.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from peer_agent import _native

DESCRIPTOR_VERSION = 1
MAX_DESCRIPTOR_BYTES = 32 << 10
HEAD = struct.Struct("<B16sQQ")
_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class MoverDescriptor:
    """incarnation: of the owner's mover. epoch, arena_bytes: of its arena."""

    incarnation: bytes
    epoch: int
    arena_bytes: int
    backend_part: bytes

    def pack(self, plane: str) -> bytes:
        head = HEAD.pack(DESCRIPTOR_VERSION, self.incarnation, self.epoch, self.arena_bytes)
        return seal(head + self.backend_part, plane)

    @classmethod
    def parse(cls, descriptor: bytes, plane: str) -> MoverDescriptor:
        """ValueError for garbage."""
        if not HEAD.size + _SUM.size < len(descriptor) <= MAX_DESCRIPTOR_BYTES or descriptor[0] != DESCRIPTOR_VERSION:
            raise ValueError(f"not a {plane} descriptor of version {DESCRIPTOR_VERSION}: {len(descriptor)} bytes")
        body = descriptor[: -_SUM.size]
        if seal(body, plane) != descriptor:
            raise ValueError(f"not a {plane} descriptor: its checksum is wrong")
        _, incarnation, epoch, arena_bytes = HEAD.unpack_from(body)
        return cls(incarnation, epoch, arena_bytes, body[HEAD.size :])


def seal(body: bytes, plane: str) -> bytes:
    """The descriptor with this body."""
    return body + _SUM.pack(_native.xxh3_64(body + plane.encode()))
