"""Builds `ReadOutcome`s from native statuses."""

from __future__ import annotations

import asyncio

import numpy as np

from peer_agent import _native
from peer_agent.transport.base import BLOCK_RECORD_BYTES, ReadList, ReadOutcome, ReadStatus

RECORD = np.dtype([("offset", "<u8"), ("generation", "<u8"), ("checksum", "<u8"), ("length", "<u4"), ("state", "<u4")])
"""One LockResponse.blocks record."""
assert RECORD.itemsize == BLOCK_RECORD_BYTES


def settled_outcome(blocks: ReadList, statuses: bytes, *, settled: asyncio.Future[None] | None = None) -> ReadOutcome:
    """settled: of a transfer that may still write; None: nothing writes to the destinations any more."""
    return ReadOutcome(statuses, settled or settled_now(), _native.ok_bytes(blocks.records, statuses))


_done: asyncio.Future[None] | None = None


def settled_now() -> asyncio.Future[None]:
    """A future that is done, the same for all outcomes of a loop: making one costs a read that is small 3 % of its time."""
    global _done
    loop = asyncio.get_running_loop()
    if _done is None or _done.get_loop() is not loop:
        _done = loop.create_future()
        _done.set_result(None)
    return _done


def uniform_outcome(blocks: ReadList, status: ReadStatus) -> ReadOutcome:
    """Every block has the same status, except that blocks the owner called absent stay ABSENT. ValueError: bad shape."""
    check_shape(blocks)
    return settled_outcome(blocks, uniform_statuses(blocks, status))


def uniform_statuses(blocks: ReadList, status: ReadStatus) -> bytes:
    """One byte a block: `status`, or ABSENT where the owner said so. The list's shape has been checked."""
    present = np.frombuffer(blocks.records, RECORD)["state"] == 1
    return np.where(present, status, ReadStatus.ABSENT).astype(np.uint8).tobytes()


def check_shape(blocks: ReadList) -> None:
    """ValueError unless records, fingerprints and destinations describe the same number of blocks."""
    count = len(blocks)
    if len(blocks.destinations) % 8 or len(blocks.records) != count * BLOCK_RECORD_BYTES:
        raise ValueError(f"{len(blocks.records)} bytes of records for {len(blocks.destinations)} bytes of destinations")
    if blocks.width not in (8, 16, 32) or len(blocks.fingerprints) != count * blocks.width:
        raise ValueError(f"{len(blocks.fingerprints)} bytes of fingerprints of width {blocks.width} for {count} blocks")
    if len(blocks.namespace_digest) != 32:
        raise ValueError(f"namespace digest has {len(blocks.namespace_digest)} bytes instead of 32")
