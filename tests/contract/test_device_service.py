"""What the mover does with a staging, step by step of a fake device: overwritten at any moment, deadlines, garbage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from peer_agent import _native
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.memory.arena import Arena
from peer_agent.memory.device import DeviceError, DevicePool
from peer_agent.memory.device_fake import PIECE_BYTES, FakeDevice, FakeEvent
from peer_agent.memory.layout import SizeClass
from peer_agent.mover import device as service_module
from peer_agent.mover.backend import Memory
from peer_agent.mover.device import DeviceService
from peer_agent.mover.device_calls import ClosePool, OpenPool, Settle, Stage, Staged, encode
from peer_agent.transport.base import ReadStatus

DIGEST = b"d" * 32
BLOCKS = 3
BLOCK_BYTES = 2 * PIECE_BYTES
POOL = 7
NAMES = b"".join(bytes([value]) * 32 for value in (1, 2, 3))


@dataclass
class Rig:
    """A service over an arena with reserved slots, and a pool with published blocks: block i is full of bytes i + 1."""

    device: FakeDevice
    arena: Arena
    table: Arena
    memory: DevicePool
    service: DeviceService
    handle: bytes

    def offsets(self, arena: Arena) -> bytes:
        return b"".join(arena.classes[0].offset(at).to_bytes(8, "little") for at in range(BLOCKS))

    async def open(self, **changes: object) -> None:
        region = memoryview(self.arena.region)
        await self.service.open(Memory(region, self.arena.fd, memoryview(bytearray(8)), bytes(16)))
        wanted = OpenPool(POOL, self.handle, BLOCKS, BLOCK_BYTES, self.table.path, self.table.arena_id)
        await self.service.call("open_pool", encode(msgspec.structs.replace(wanted, **changes)))

    def question(self, *, number: int = 1, deadline_s: float = 10.0, **changes: object) -> Stage:
        records = np.frombuffer(_native.records(self.table.region, self.offsets(self.table)), BLOCK_RECORD)
        return msgspec.structs.replace(
            Stage(
                stage=number, pool=POOL, namespace_digest=DIGEST, fingerprints=NAMES, width=32, records=records.tobytes(),
                slots=np.arange(BLOCKS, dtype="<u4").tobytes(), destinations=self.offsets(self.arena),
                deadline_ns=int((time.monotonic() + deadline_s) * 1e9),
            ),
            **changes,
        )  # fmt: skip

    async def stage(self, wanted: Stage) -> Staged:
        return msgspec.msgpack.decode(await self.service.call("stage", encode(wanted)), type=Staged)

    def arrived(self, at: int) -> bytes:
        start = self.arena.classes[0].offset(at) + 128
        return bytes(self.arena.region[start : start + BLOCK_BYTES])

    def overwrite(self, slot: int) -> FakeEvent:
        """As an engine does: odd first, then a kernel, on a stream of its own."""
        _native.begin_write(self.table.region, self.table.classes[0].offset(slot).to_bytes(8, "little"))
        other = np.full((1, BLOCK_BYTES), 0xEE, np.uint8)
        return self.device.fill(self.memory, [slot], other, stream=self.device.stream())


def make_rig(path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Rig:
    device = FakeDevice(seed=seed, stepped=True)
    monkeypatch.setattr(service_module, "make_device", lambda identity: device)
    arena = Arena.create(path / f"arena{seed}", [SizeClass(DIGEST, BLOCK_BYTES, BLOCKS)], epoch=1)
    table = Arena.create(path / f"table{seed}", [SizeClass(DIGEST, 1, BLOCKS)], epoch=1)
    memory = device.allocate(slots=BLOCKS, segment_bytes=[BLOCK_BYTES])
    rig = Rig(device, arena, table, memory, DeviceService({"device": "fake:0"}), device.export_handle(memory))
    _native.begin_write(arena.region, rig.offsets(arena))
    _native.begin_write(table.region, rig.offsets(table))
    data = np.repeat(np.arange(1, BLOCKS + 1, dtype=np.uint8), BLOCK_BYTES).reshape(BLOCKS, BLOCK_BYTES)
    device.fill(memory, range(BLOCKS), data, stream=device.stream())
    device.drain()
    _native.commit(table.region, rig.offsets(table), DIGEST, NAMES, 32, 1, bytes(8 * BLOCKS))
    return rig


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = make_rig(tmp_path, 1, monkeypatch)
    yield rig
    rig.device.close()


async def test_bytes_and_checksums_are_the_blocks(rig: Rig):
    await rig.open()
    staging = asyncio.ensure_future(rig.stage(rig.question()))
    await run(rig, staging)
    staged = await staging
    assert staged.statuses == bytes([ReadStatus.OK]) * BLOCKS
    for at in range(BLOCKS):
        assert rig.arrived(at) == bytes([at + 1]) * BLOCK_BYTES
        assert staged.checksums[8 * at : 8 * at + 8] == _native.xxh3_64(rig.arrived(at)).to_bytes(8, "little")


async def test_overwritten_block_is_never_ok_whenever_the_engine_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The overwrite is begun after every number of the copy's steps, in turn; the two then race in the device."""
    torn = 0
    for seed in range(40):
        rig = make_rig(tmp_path, 100 + seed, monkeypatch)
        await rig.open()
        staging = asyncio.ensure_future(rig.stage(rig.question()))
        await asyncio.sleep(0)
        for _ in range(seed % (BLOCKS * BLOCK_BYTES // PIECE_BYTES + 2)):
            rig.device.step()
        finished = staging.done()
        rig.overwrite(1)
        await run(rig, staging)
        staged = await staging
        for at in range(BLOCKS):
            if staged.statuses[at] == ReadStatus.OK:
                assert rig.arrived(at) == bytes([at + 1]) * BLOCK_BYTES, f"wrong bytes accepted, seed {seed}"
        assert not finished
        assert (staged.statuses[0], staged.statuses[2]) == (ReadStatus.OK, ReadStatus.OK), "the others are not concerned"
        assert staged.statuses[1] in (ReadStatus.TORN, ReadStatus.STALE)
        torn += 0xEE in rig.arrived(1) and 2 in rig.arrived(1)
        rig.device.close()
    assert torn, "the race was never lost in the middle of a block: the test shows nothing"


async def test_block_that_was_never_published_or_is_another_is_not_copied(rig: Rig):
    await rig.open()
    wrong = rig.question(fingerprints=bytes(32) + NAMES[32:])
    staging = asyncio.ensure_future(rig.stage(wrong))
    await run(rig, staging)
    assert (await staging).statuses == bytes([ReadStatus.STALE, ReadStatus.OK, ReadStatus.OK])
    assert rig.arrived(0) == bytes(BLOCK_BYTES)


async def test_stage_is_late_at_its_deadline_and_settled_when_the_copy_has_ended(rig: Rig):
    await rig.open()
    rig.device.hold()
    began_s = time.monotonic()
    staged = await rig.stage(rig.question(deadline_s=0.05))
    assert staged.statuses == bytes([ReadStatus.LATE]) * BLOCKS
    assert time.monotonic() - began_s < 1.0
    settling = asyncio.ensure_future(rig.service.call("settle", encode(Settle(1))))
    closing = asyncio.ensure_future(rig.service.call("close_pool", encode(ClosePool(POOL))))
    done, _ = await asyncio.wait({settling}, timeout=0.05)
    assert not done
    assert await closing == b""
    with pytest.raises(ConnectionError, match="not open"):
        await rig.stage(rig.question(number=2))
    rig.device.resume()
    await run(rig, settling)
    assert await settling == b""
    assert rig.service._pools == {}, "the pool went with its last copy"
    assert await rig.service.call("settle", encode(Settle(99))) == b""


async def test_copy_that_failed_ends_the_mover(rig: Rig):
    """By an exception that main.py does not answer."""
    await rig.open()
    rig.device.fail_next_copy()
    with pytest.raises(DeviceError, match="illegal address"):
        await rig.stage(rig.question())


async def test_what_is_outside_of_pool_table_or_arena_is_refused(rig: Rig):
    await rig.open()
    last = rig.arena.arena_bytes.to_bytes(8, "little")
    for wrong in (
        {"destinations": rig.offsets(rig.arena)[:16] + last},
        {"destinations": rig.offsets(rig.arena)[:8] * 3},
        {"slots": np.array([0, 1, BLOCKS], "<u4").tobytes()},
        {"slots": np.array([0, 1, 1], "<u4").tobytes()},
        {"slots": b"123"},
        {"records": b"123"},
        {"fingerprints": NAMES[:-1]},
        {"width": 7},
    ):
        with pytest.raises(ValueError, match=r"."):
            await rig.stage(rig.question(**wrong))
    _native.commit(rig.arena.region, rig.offsets(rig.arena), DIGEST, NAMES, 32, 1, bytes(24))
    with pytest.raises(ValueError, match="not reserved"):
        await rig.stage(rig.question())
    assert all(rig.arrived(at) == bytes(BLOCK_BYTES) for at in range(BLOCKS))


async def test_garbage_calls_are_refused(rig: Rig):
    with pytest.raises(ConnectionError):
        await rig.open(handle=b"garbage")
    with pytest.raises(ConnectionError):
        await rig.service.call("open_pool", encode(OpenPool(8, rig.handle, BLOCKS, BLOCK_BYTES, "/nowhere", b"")))
    with pytest.raises(ValueError, match="no call"):
        await rig.service.call("dance", b"")
    for garbage in (b"", b"\xc1", b"\x90", encode(Settle(1))):
        with pytest.raises(ValueError, match=r"."):
            await rig.service.call("stage", garbage)


async def run(rig: Rig, waiting: asyncio.Future[object]) -> None:
    """Steps the device until what waits for it has ended."""
    until_s = time.monotonic() + 10
    while not waiting.done():
        assert time.monotonic() < until_s, "does not end"
        rig.device.step()
        await asyncio.sleep(0)
