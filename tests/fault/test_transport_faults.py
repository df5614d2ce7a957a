"""Owners that are killed, stopped or restarted while they are read, and shared memory that is full. Real processes."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from peer_agent import _native
from peer_agent.memory.arena import Arena, ArenaTooLarge
from peer_agent.memory.layout import HEADER_BYTES, SizeClass
from peer_agent.testing.timing import DEADLINE_SLACK_S, PROMPT_S, expect_within, took
from peer_agent.transport.base import Connection, ReadList, ReadOutcome, ReadStatus
from peer_agent.transport.check_rig import LOCK, WIDTH, pack
from peer_agent.transport.shm import ShmTransport
from peer_agent.transport.tcp import TcpTransport

ROOT = Path(__file__).parents[2]
DIGEST = b"faults".ljust(32, b".")
BLOCK = 1 << 20
SLOTS = 32
PATIENCE_S = 20.0

OWNER = """
import asyncio, json, random, sys, time
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.transport.check_rig import Rig
from peer_agent.transport.shm import ShmTransport
from peer_agent.transport.tcp import TcpTransport

async def main(path, epoch, block, slots, port):
    arena = Arena.create(path, [SizeClass(b"faults".ljust(32, b"."), block, slots)], epoch=epoch)
    shm, tcp = ShmTransport(arena), TcpTransport(arena, port=port)
    descriptors = {"shm": (await shm.export()).hex(), "tcp": (await tcp.export()).hex()}
    rig = Rig(tcp, arena, tcp, arena, seed=random.Random(epoch))
    stored = rig.store(range(slots))
    print(json.dumps({"descriptors": descriptors, "records": stored.records.hex(),
                      "fingerprints": stored.fingerprints.hex(), "port": tcp._server.port,
                      "capability": rig.capabilities[7].hex()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the test closes it
    await tcp.close()
    await shm.close()
    arena.close()

asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
"""


class Owner:
    """An owner process with SLOTS committed blocks, granted under LOCK."""

    def __init__(self, path: Path, *, epoch: int, port: int = 0) -> None:
        command = [sys.executable, "-c", OWNER, str(path), str(epoch), str(BLOCK), str(SLOTS), str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.epoch = epoch
        self.port = int(said["port"])
        self.descriptors = {name: bytes.fromhex(value) for name, value in said["descriptors"].items()}
        self.records = bytes.fromhex(said["records"])
        self.fingerprints = bytes.fromhex(said["fingerprints"])
        self.capability = bytes.fromhex(said["capability"])

    def request(self, reader: Arena) -> ReadList:
        destinations = pack([reader.classes[0].offset(slot) for slot in range(SLOTS)])
        _native.begin_write(reader.region, destinations)
        return ReadList(LOCK, self.epoch, DIGEST, self.fingerprints, WIDTH, self.records, destinations, self.capability)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait(PATIENCE_S)
        if number is signal.SIGSTOP:
            self._wait_until_stopped()

    def _wait_until_stopped(self) -> None:
        """Each thread stops when it next leaves the kernel or is interrupted; until then it may serve."""
        until_s = time.monotonic() + PATIENCE_S
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
            assert time.monotonic() < until_s, "the owner did not stop"
            time.sleep(0.001)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    started = Owner(tmp_path / "owner", epoch=31)
    yield started
    started.end()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "reader", [SizeClass(DIGEST, BLOCK, SLOTS)], epoch=2) as arena:
        yield arena


@pytest.fixture
async def tcp(reader: Arena) -> AsyncIterator[TcpTransport]:
    transport = TcpTransport(reader)
    yield transport
    await transport.close()


@pytest.fixture
async def shm(reader: Arena) -> AsyncIterator[ShmTransport]:
    transport = ShmTransport(reader)
    yield transport
    await transport.close()


def checked(outcome: ReadOutcome, blocks: ReadList, reader: Arena) -> list[ReadStatus]:
    """OK blocks have the checksum that the owner gave when it locked them."""
    statuses = [ReadStatus(status) for status in outcome.statuses]
    for slot, status in enumerate(statuses):
        if status is ReadStatus.OK:
            checksum = int.from_bytes(blocks.records[slot * 32 + 16 : slot * 32 + 24], "little")
            assert _native.xxh3_64(payload(reader, slot)) == checksum
    return statuses


def payload(arena: Arena, slot: int) -> memoryview:
    start = arena.classes[0].offset(slot) + HEADER_BYTES
    return arena.region[start : start + BLOCK]


async def test_tcp_read_is_lost_at_once_when_the_owner_is_killed_during_it(
    owner: Owner, reader: Arena, tcp: TcpTransport
) -> None:
    connection = await tcp.connect(owner.descriptors["tcp"], deadline_s=PATIENCE_S)
    blocks = owner.request(reader)
    owner.signal(signal.SIGSTOP)  # so that the read is certainly unfinished when the kill comes
    read = asyncio.create_task(connection.read(blocks, deadline_s=60))
    await asyncio.sleep(0)
    os.kill(owner.process.pid, signal.SIGKILL)
    outcome, seconds = await took(asyncio.wait_for(read, PATIENCE_S))
    statuses = checked(outcome, blocks, reader)
    assert set(statuses) == {ReadStatus.PEER_LOST}
    assert outcome.settled.done()
    assert seconds <= PROMPT_S

    async def again() -> ReadOutcome:
        return await connection.read(blocks, deadline_s=60)

    for outcome in await expect_within(PROMPT_S, again, what="a read of a dead peer"):
        assert set(outcome.statuses) == {ReadStatus.PEER_LOST}, "it costs a refused connection, not a deadline"


async def test_tcp_reads_are_whole_or_lost_when_the_owner_is_killed_among_them(
    owner: Owner, reader: Arena, tcp: TcpTransport
) -> None:
    connection = await tcp.connect(owner.descriptors["tcp"], deadline_s=PATIENCE_S)
    blocks = owner.request(reader)
    outcome = await connection.read(blocks, deadline_s=PATIENCE_S)
    assert set(checked(outcome, blocks, reader)) == {ReadStatus.OK}
    os.kill(owner.process.pid, signal.SIGKILL)  # not waited for: it dies somewhere in the reads that follow
    while set(statuses := checked(await connection.read(blocks, deadline_s=60), blocks, reader)) == {ReadStatus.OK}:
        pass
    assert set(statuses) <= {ReadStatus.OK, ReadStatus.PEER_LOST}


async def test_tcp_read_is_late_and_nothing_is_written_later_when_the_owner_is_stopped(
    owner: Owner, reader: Arena, tcp: TcpTransport
) -> None:
    connection = await tcp.connect(owner.descriptors["tcp"], deadline_s=PATIENCE_S)
    blocks = owner.request(reader)
    owner.signal(signal.SIGSTOP)
    outcome, seconds = await took(connection.read(blocks, deadline_s=0.3))
    assert set(checked(outcome, blocks, reader)) == {ReadStatus.LATE}
    assert seconds <= 0.3 + DEADLINE_SLACK_S
    assert outcome.settled.done(), "the destinations may be used again"
    for slot in range(SLOTS):
        payload(reader, slot)[:] = b"\x55" * BLOCK
    owner.signal(signal.SIGCONT)
    part = ReadList(**{name: getattr(blocks, name) for name in ReadList.__slots__} | _first_block(blocks))
    outcome = await connection.read(part, deadline_s=PATIENCE_S)
    assert checked(outcome, part, reader) == [ReadStatus.OK], "a new connection serves"
    for slot in range(1, SLOTS):
        assert payload(reader, slot) == b"\x55" * BLOCK


def _first_block(blocks: ReadList) -> dict[str, bytes]:
    return {
        "fingerprints": blocks.fingerprints[:WIDTH],
        "records": blocks.records[:32],
        "destinations": blocks.destinations[:8],
    }


async def test_tcp_pool_recovers_when_the_owner_restarts_on_its_port(
    owner: Owner, reader: Arena, tcp: TcpTransport, tmp_path: Path
) -> None:
    connection = await tcp.connect(owner.descriptors["tcp"], deadline_s=PATIENCE_S)
    old = owner.request(reader)
    assert set((await connection.read(old, deadline_s=PATIENCE_S)).statuses) == {ReadStatus.OK}
    owner.signal(signal.SIGKILL)
    reborn = Owner(tmp_path / "owner", epoch=32, port=owner.port)
    try:
        outcome = await connection.read(old, deadline_s=PATIENCE_S)
        assert set(outcome.statuses) == {ReadStatus.STALE}, "the old life's lock means nothing in the new one"
        new = reborn.request(reader)
        outcome = await connection.read(new, deadline_s=PATIENCE_S)
        assert set(checked(outcome, new, reader)) == {ReadStatus.OK}
    finally:
        reborn.end()


async def test_shm_read_needs_no_owner_when_it_is_stopped_or_dead(owner: Owner, reader: Arena, shm: ShmTransport) -> None:
    """One-sided for real: the bytes are there, verified, whether the process runs or not."""
    connection = await shm.connect(owner.descriptors["shm"], deadline_s=PATIENCE_S)
    blocks = owner.request(reader)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        owner.signal(number)
        outcome = await connection.read(blocks, deadline_s=PATIENCE_S)
        assert set(checked(outcome, blocks, reader)) == {ReadStatus.OK}


async def test_shm_read_is_lost_when_the_owner_was_replaced(
    owner: Owner, reader: Arena, shm: ShmTransport, tmp_path: Path
) -> None:
    connection = await shm.connect(owner.descriptors["shm"], deadline_s=PATIENCE_S)
    blocks = owner.request(reader)
    owner.signal(signal.SIGKILL)
    reborn = Owner(tmp_path / "owner", epoch=32)
    try:
        outcome = await connection.read(blocks, deadline_s=PATIENCE_S)
        assert set(outcome.statuses) == {ReadStatus.PEER_LOST}
        with pytest.raises(ConnectionError, match="restarted"):
            await shm.connect(owner.descriptors["shm"], deadline_s=PATIENCE_S)
        fresh: Connection = await shm.connect(reborn.descriptors["shm"], deadline_s=PATIENCE_S)
        assert set((await fresh.read(blocks, deadline_s=PATIENCE_S)).statuses) == {ReadStatus.STALE}
        new = reborn.request(reader)
        assert set(checked(await fresh.read(new, deadline_s=PATIENCE_S), new, reader)) == {ReadStatus.OK}
    finally:
        reborn.end()


async def test_shm_connect_says_so_when_the_peer_is_elsewhere(owner: Owner, shm: ShmTransport, tmp_path: Path) -> None:
    here = owner.descriptors["shm"]
    with pytest.raises(ConnectionError, match="another host"):
        await shm.connect(here[:1] + bytes(16) + here[17:], deadline_s=PATIENCE_S)
    with pytest.raises(ConnectionError, match="share its /dev/shm or use tcp"):
        await shm.connect(here + b"-not-there", deadline_s=PATIENCE_S)
    with pytest.raises(ConnectionError, match="is another file here"):
        await shm.connect(here[:17] + bytes(16) + here[33:], deadline_s=PATIENCE_S)


# ---- full shared memory ----


@contextmanager
def small_tmpfs(directory: Path, size: int) -> Iterator[Path]:
    """A tmpfs of `size` bytes; the test is skipped where mounting is not allowed."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE_S)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("prefault", [False, True])
def test_arena_is_refused_at_start_and_never_faults_when_shared_memory_is_full(tmp_path: Path, prefault: bool) -> None:
    with small_tmpfs(tmp_path / "shm", 4 << 20) as directory:
        with pytest.raises(ArenaTooLarge, match=r"[\d,]+ bytes are free in "):
            Arena.create(directory / "arena", [SizeClass(DIGEST, BLOCK, 8)], epoch=1, prefault=prefault)
        with Arena.create(directory / "arena", [SizeClass(DIGEST, BLOCK, 3)], epoch=1, prefault=prefault) as arena:
            _fill_the_rest(directory)
            offsets = pack([arena.classes[0].offset(slot) for slot in range(3)])
            source = ctypes.create_string_buffer(b"x" * BLOCK, BLOCK)
            _native.begin_write(arena.region, offsets)
            _native.write_blocks(arena.region, offsets, pack([ctypes.addressof(source)] * 3), BLOCK)  # no SIGBUS
            with pytest.raises(ArenaTooLarge):
                Arena.create(directory / "second", [SizeClass(DIGEST, BLOCK, 1)], epoch=1)


def test_arena_is_refused_when_memory_vanishes_after_it_was_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes the memory between statvfs and the allocation."""
    with small_tmpfs(tmp_path / "shm", 4 << 20) as directory:
        before = os.statvfs(directory)
        _fill_the_rest(directory)
        monkeypatch.setattr(os, "statvfs", lambda _: before)
        for prefault in (False, True):
            with pytest.raises(ArenaTooLarge, match="does not fit"):
                Arena.create(directory / "arena", [SizeClass(DIGEST, BLOCK, 3)], epoch=1, prefault=prefault)
        assert [path.name for path in directory.iterdir()] == ["filler"]


def _fill_the_rest(directory: Path) -> None:
    with open(directory / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            pass
