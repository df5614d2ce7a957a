"""What proves a lock to a data plane: a capability, given with the lock, shown with every read, opaque to its reader.

Layout, 64 bytes little endian (csrc/wire.hpp Capability):
  u8 version | 7 zero | u64 lock | u64 epoch | u64 expires_ns | 32 bytes tag
tag = BLAKE2b-256 (RFC 7693) keyed with a random key of this start, over the 32 bytes before it, the reader's name, and the
records of the blocks that are covered. Nothing of it can be made without the key, and none fits another lock, owner, lease,
reader or list.

The owner's data plane keeps the capability beside the blocks that it covers and compares what is shown with it, whole and in
constant time. So a tag is never computed twice, and Unlock ends it at once. What it stops and what it cannot:
docs/adr/0024-lock-capabilities.md, docs/security.md.
Pure: the key comes from outside. Does not: decide who may lock (policy), or move bytes.
"""

from __future__ import annotations

import hashlib
import struct

from peer_agent.core.effects import BLOCK_RECORD_BYTES

CAPABILITY_VERSION = 1
CAPABILITY = struct.Struct("<B7xQQQ32s")
KEY_BYTES = 32
_PERSON = b"kvdir.lock.cap.1"  # so that the key is of no use for anything else


class CapabilityMint:
    """Makes the capabilities of one life (epoch) of an owner. key: KEY_BYTES of secret random bytes, never written anywhere."""

    def __init__(self, key: bytes, *, epoch: int) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes; use {KEY_BYTES} random ones")
        self._key = key
        self._epoch = epoch

    def capability(self, lock: int, records: bytes, *, reader: str, expires_s: float) -> bytes:
        """For the blocks of these LockResponse.blocks records until CLOCK_MONOTONIC expires_s (expires_ns in csrc)."""
        body = CAPABILITY.pack(CAPABILITY_VERSION, lock, self._epoch, int(expires_s * 1e9), bytes(32))[:32]
        named = reader.encode()
        tag = hashlib.blake2b(body, key=self._key, digest_size=32, person=_PERSON)
        tag.update(struct.pack("<QQ", len(named), len(records) // BLOCK_RECORD_BYTES))
        tag.update(named)
        tag.update(records)
        return body + tag.digest()
