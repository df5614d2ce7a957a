"""Descriptors that are old, of another version, damaged or made up: a reason in time, and nobody's agent or mover suffers."""

from __future__ import annotations

import os
import random
import signal
import struct
from functools import partial
from pathlib import Path

import pytest

from peer_agent import _native
from peer_agent.transport.base import ReadStatus
from peer_agent.transport.check_movers import MoverRig, eventually, mover_rig
from peer_agent.transport.check_rig import DEADLINE_S, Stored, with_record
from peer_agent.transport.mover_descriptor import HEAD
from peer_agent.transport.mover_descriptor import seal as seal_for

EMULATED = {"emulated": "tcp"}
CONNECT_S = 1.0
seal = partial(seal_for, plane="ucx")


def unsealed(descriptor: bytes) -> bytes:
    return descriptor[:-8]


async def refusal(rig: MoverRig, descriptor: bytes) -> str:
    """Why `connect` refused it. What counts is that it does, by its deadline, with ValueError or ConnectionError."""
    with pytest.raises((ValueError, ConnectionError)) as refused:
        await rig.reader.connect(descriptor, deadline_s=CONNECT_S)
    return str(refused.value)


async def works(rig: MoverRig, stored: Stored) -> bool:
    connection = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S)
    blocks = rig.request(stored)
    outcome = await connection.read(blocks, deadline_s=DEADLINE_S)
    await connection.close()
    return set(rig.expect(outcome, blocks, stored)) == {ReadStatus.OK}


async def restart_owner(rig: MoverRig) -> int:
    os.kill(rig.owner.pid, signal.SIGKILL)
    await eventually(lambda: rig.owner.pid == 0)
    await eventually(lambda: rig.owner.pid != 0)
    return rig.owner.pid


async def test_old_descriptor_is_refused_when_the_owners_mover_was_restarted(tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "ucx", EMULATED) as rig:
        stored, old = rig.store(range(4)), await rig.owner.export()
        pid = await restart_owner(rig)
        assert await refusal(rig, old)
        assert await works(rig, stored)
        assert rig.owner.pid == pid


async def test_successor_is_not_read_when_it_answers_at_the_old_address(tmp_path: Path) -> None:
    """Gets to a dead mover's memory would end its successor (SIGSEGV, emulated lanes): it is asked who it is first."""
    async with mover_rig(tmp_path, "ucx", EMULATED) as rig:
        stored, old = rig.store(range(4)), await rig.owner.export()
        pid = await restart_owner(rig)
        fresh = unsealed(await rig.owner.export())
        mixed = old[: HEAD.size] + fresh[HEAD.size :]  # the old incarnation, at the new address
        assert "it may have restarted" in await refusal(rig, seal(mixed))
        assert await works(rig, stored)
        assert rig.owner.pid == pid, "the owner's mover has survived"


@pytest.mark.parametrize(
    ("major", "minor", "words"),
    [
        (1, 18, "UCX 1.18, we have .*; upgrade the peer's"),
        (2, 0, "UCX 2.0, we have .*; upgrade this node's"),
        (0, 9, "upgrade the peer's"),
    ],
)
async def test_versions_are_compared_before_anything_reaches_ucx(major: int, minor: int, words: str, tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "ucx", EMULATED) as rig:
        descriptor = bytearray(unsealed(await rig.owner.export()))
        descriptor[HEAD.size + 1 : HEAD.size + 3] = bytes([major, minor])
        with pytest.raises(ConnectionError, match=words):
            await rig.reader.connect(seal(bytes(descriptor)), deadline_s=CONNECT_S)


async def test_agent_lives_when_descriptors_are_garbage(tmp_path: Path) -> None:
    """Sealed garbage, so that it reaches the mover and, where it looks like an address, UCX itself."""
    rng = random.Random(5)
    async with mover_rig(tmp_path, "ucx", EMULATED) as rig:
        stored = rig.store(range(4))
        good = unsealed(await rig.owner.export())
        candidates = [good[: rng.randrange(HEAD.size + 1, len(good))] for _ in range(4)]
        candidates += [good + rng.randbytes(rng.randrange(1, 2000)) for _ in range(2)]
        candidates += [good[: HEAD.size] + rng.randbytes(rng.randrange(1, 400)) for _ in range(4)]
        for _ in range(10):
            flipped = bytearray(good)
            flipped[rng.randrange(HEAD.size, len(good))] ^= 1 << rng.randrange(8)
            candidates.append(bytes(flipped))
        for number, candidate in enumerate(candidates):
            try:
                connection = await rig.reader.connect(seal(candidate), deadline_s=CONNECT_S)
            except (ValueError, ConnectionError, TimeoutError):
                continue
            blocks = rig.request(stored)  # a bit that did not matter, or one that did
            outcome = await connection.read(blocks, deadline_s=CONNECT_S)
            rig.expect(outcome, blocks, stored)
            await connection.close()
            assert outcome.settled.done(), number
        assert await works(rig, stored)


async def test_unsealed_garbage_never_reaches_the_mover(tmp_path: Path) -> None:
    rng = random.Random(6)
    async with mover_rig(tmp_path, "ucx", EMULATED) as rig:
        good = await rig.owner.export()
        for size in (0, 1, 40, 41, 100, len(good), 40_000):
            with pytest.raises(ValueError, match="not a ucx descriptor"):
                await rig.reader.connect(b"\x01" + rng.randbytes(size), deadline_s=CONNECT_S)
        flipped = bytearray(good)
        flipped[-20] ^= 1
        with pytest.raises(ValueError, match="its checksum is wrong"):
            await rig.reader.connect(bytes(flipped), deadline_s=CONNECT_S)
        assert rig.reader.stats()["mover_starts"] == 1


async def test_nothing_outside_the_owners_arena_is_asked_for(tmp_path: Path) -> None:
    """Also just beyond its end, where an emulated get would answer with whatever the mover's memory holds there."""
    async with mover_rig(tmp_path, "ucx", EMULATED) as rig:
        connection, stored = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S), rig.store(range(4))
        pid, end = rig.owner.pid, rig.owner_arena.arena_bytes
        blocks = rig.request(stored)
        for offset in (end - 128, end, end + 4096, 1 << 40, (1 << 64) - 4096, 0):
            outcome = await connection.read(with_record(blocks, 1, offset=offset), deadline_s=DEADLINE_S)
            statuses = rig.expect(outcome, blocks, stored)
            assert statuses == [ReadStatus.OK, ReadStatus.ABSENT, ReadStatus.OK, ReadStatus.OK]
        assert rig.owner.pid == pid


def test_gets_are_planned_only_inside_both_arenas_when_records_lie(tmp_path: Path) -> None:
    from peer_agent.memory.arena import Arena
    from peer_agent.memory.layout import HEADER_BYTES, SizeClass

    with Arena.create(tmp_path / "arena", [SizeClass(bytes(32), 1000, 8)], epoch=1) as arena:
        slots = struct.pack("<8Q", *(arena.classes[0].offset(index) for index in range(8)))
        _native.begin_write(arena.region, slots)
        source_bytes = 100_000
        records = [
            (4096, 2, 0, 1000, 1),
            (source_bytes - 1024, 2, 0, 896, 1),  # ends exactly at the end
            (source_bytes - 1024, 2, 0, 897, 1),
            (0, 2, 0, 1000, 1),  # the superblock
            (4097, 2, 0, 1000, 1),  # misaligned
            ((1 << 64) - 128, 2, 0, 1000, 1),
            (4096, 2, 0, 1001, 1),  # longer than our slot
            (4096, 2, 0, 1000, 0),
        ]
        packed = b"".join(struct.pack("<QQQII", *record) for record in records)
        statuses, headers, remote, _, lengths = _native.plan_gets(arena.region, packed, slots, source_bytes)
        due = [index for index, status in enumerate(statuses) if status == 255]
        assert due == [0]  # 100,000 - 1,024 is no multiple of 128, so nothing begins there either
        assert struct.unpack("<Q", headers) == (4096,)
        assert struct.unpack("<Q", remote) == (4096 + HEADER_BYTES,)
        assert struct.unpack("<Q", lengths) == (1000,)
        assert [ReadStatus(status) for status in statuses[1:]] == [ReadStatus.ABSENT] * 5 + [
            ReadStatus.CORRUPT,
            ReadStatus.ABSENT,
        ]
