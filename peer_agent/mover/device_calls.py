"""What agent and mover tell each other about device memory: bodies of `Call`s to device.py, msgpack arrays.

open_pool   OpenPool -> nothing           makes a pool known; DeviceError's words as ConnectionError
close_pool  ClosePool -> nothing          once nothing of it is being copied
stage       Stage -> Staged               copies blocks from a pool into reserved slots of the arena
settle      Settle -> nothing             answers when nothing of that stage writes to the arena any more
"""

from __future__ import annotations

import msgspec

MAX_STAGE_BLOCKS = 1024
"""Blocks of one Stage: at most 76 bytes each."""


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all bodies."""


class OpenPool(Body, frozen=True):
    """table_path, table_id: the pool's generation table, see RegisterPoolResponse. handle: of Device.export_handle."""

    pool: int
    handle: bytes
    slots: int
    block_bytes: int
    table_path: str
    table_id: bytes


class ClosePool(Body, frozen=True):
    pool: int


class Stage(Body, frozen=True):
    """records: BLOCK_RECORDs of the generation table, as the blocks were published. slots: u32 LE, of the pool. destinations:
    u64 LE, offsets of reserved slots' headers in our arena. deadline_ns: CLOCK_MONOTONIC.
    """

    stage: int
    pool: int
    namespace_digest: bytes
    fingerprints: bytes
    width: int
    records: bytes
    slots: bytes
    destinations: bytes
    deadline_ns: int


class Staged(Body, frozen=True):
    """statuses: one ReadStatus a block: OK, LATE for all when the copy was not done by the deadline (then `settle` is due), or
    why the slot does not hold that block. checksums: u64 LE of what is in the arena; of blocks that are OK.
    """

    statuses: bytes
    checksums: bytes


class Settle(Body, frozen=True):
    stage: int


def encode(body: Body) -> bytes:
    return msgspec.msgpack.encode(body)
