"""No read that is OK was ever torn, while another process rewrites the slots as fast as it can.

Every payload is filled with the generation it is committed under, so a mixture of two writes, or a write under another
generation than the record says, shows in the bytes themselves.
"""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES, SizeClass
from peer_agent.testing.certificates import shared_certificates
from peer_agent.transport.base import ReadList, ReadStatus
from peer_agent.transport.mover import MoverTransport

T = TypeVar("T")

DIGEST = b"torn".ljust(32, b".")
FINGERPRINT = b"f" * 8
BLOCK = 64 << 10
SLOTS = 8
BLOCK_READS = 40_000
PATIENCE_S = 40.0

WRITER = """
import struct, sys, time
import numpy as np
from peer_agent import _native
from peer_agent.memory.arena import Arena

arena = Arena.open(sys.argv[1], writable=True)
length, until, pause_s = int(sys.argv[2]), time.monotonic() + float(sys.argv[3]), float(sys.argv[4])
digest = arena.classes[0].namespace_digest
offsets = [struct.pack("<Q", arena.classes[0].offset(i)) for i in range(arena.classes[0].slots)]
payload = np.empty(length // 8, np.uint64)
address = struct.pack("<Q", payload.ctypes.data)
print("writing", flush=True)
while time.monotonic() < until:
    for offset in offsets:
        (odd,) = struct.unpack("<Q", _native.begin_write(arena.region, offset))
        payload.fill(odd + 1)
        sums = _native.write_blocks(arena.region, offset, address, length)
        _native.commit(arena.region, offset, digest, b"f" * 8, 8, length, sums)
        time.sleep(pause_s)
"""


@pytest.fixture
def owner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """The arena that another process keeps rewriting. Parameter: its pause after each slot, seconds; else none."""
    pause_s = str(getattr(request, "param", 0))
    with Arena.create(tmp_path / "owner", [SizeClass(DIGEST, BLOCK, SLOTS)], epoch=1, prefault=True) as arena:
        command = [sys.executable, "-c", WRITER, arena.path, str(BLOCK), str(PATIENCE_S * 2), pause_s]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
            yield arena
        finally:
            writer.kill()
            writer.communicate()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "reader", [SizeClass(DIGEST, BLOCK, SLOTS)], epoch=2, prefault=True) as arena:
        yield arena


def offsets(arena: Arena) -> bytes:
    return struct.pack(f"<{SLOTS}Q", *(arena.classes[0].offset(slot) for slot in range(SLOTS)))


def payload(arena: Arena, slot: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    start = arena.classes[0].offset(slot) + HEADER_BYTES
    return np.frombuffer(arena.region[start : start + BLOCK], np.uint64)


def read_until_done(
    read: Callable[[bytes], bytes], owner: Arena, reader: Arena, *, block_reads: int = BLOCK_READS
) -> dict[ReadStatus, int]:
    """Reads what the headers say now, again and again; fails at the first OK block that is not whole."""
    _native.begin_write(reader.region, offsets(reader))
    seen = dict.fromkeys(ReadStatus, 0)
    until = time.monotonic() + PATIENCE_S
    while sum(seen.values()) < block_reads and time.monotonic() < until:
        records = _native.records(owner.region, offsets(owner))
        statuses = read(records)
        for slot, (_, generation, _, _, _) in enumerate(struct.iter_unpack("<QQQII", records)):
            status = ReadStatus(statuses[slot])
            seen[status] += 1
            if status is ReadStatus.OK:
                words = payload(reader, slot)
                assert words[0] == generation, "another generation than the record says"
                assert (words == generation).all(), "torn"
    return seen


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_shm_read_is_never_torn_when_another_process_rewrites_the_slots(owner: Arena, reader: Arena) -> None:
    with Arena.open(owner.path, writable=False) as mapped:

        def read(records: bytes) -> bytes:
            deadline_ns = time.monotonic_ns() + 10**10
            arguments = (records, DIGEST, FINGERPRINT * SLOTS, 8, reader.region, offsets(reader), False, deadline_ns)
            return _native.read_slots(mapped.region, *arguments)

        seen = read_until_done(read, owner, reader)
    assert seen[ReadStatus.OK] > BLOCK_READS // 20, seen
    assert seen[ReadStatus.TORN] + seen[ReadStatus.STALE] > 0, "the writer was in the way"
    assert seen[ReadStatus.CORRUPT] == 0, "a race with the writer is never taken for rot"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("check", "secured"), [(False, False), (True, False), (False, True)])
def test_tcp_read_is_never_torn_when_another_process_rewrites_the_slots(
    owner: Arena, reader: Arena, check: bool, secured: bool
) -> None:
    tls = shared_certificates().files("node").load() if secured else None
    server = _native.TcpServer(owner.region, 1, "127.0.0.1", 0, tls=tls)
    connection = _native.TcpConnection("127.0.0.1", server.port, time.monotonic_ns() + 10**10, tls=tls)

    def read(records: bytes) -> bytes:
        deadline_ns = time.monotonic_ns() + 10**10
        server.grant(1, records, deadline_ns)
        arguments = (records, DIGEST, FINGERPRINT * SLOTS, 8, reader.region, offsets(reader), check, deadline_ns)
        return connection.read(1, 1, *arguments)

    block_reads = BLOCK_READS // 5 if secured else BLOCK_READS
    seen = read_until_done(read, owner, reader, block_reads=block_reads)
    server.close()
    assert seen[ReadStatus.OK] > block_reads // 50, seen
    assert seen[ReadStatus.TORN] + seen[ReadStatus.STALE] > 0, "the writer was in the way"
    assert seen[ReadStatus.CORRUPT] == 0, "a race with the writer is never taken for rot"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("owner", [0.0003], indirect=True)  # a read takes longer here: without pauses hardly one is whole
def test_ucx_read_is_never_torn_when_another_process_rewrites_the_slots(owner: Arena, reader: Arena) -> None:
    """Gets look at nothing while they copy; one look at the header afterwards decides (csrc/gets.hpp)."""
    with asyncio.Runner() as runner:
        planes = [MoverTransport(arena, backend="ucx", settings={"emulated": "tcp"}) for arena in (owner, reader)]
        descriptor, _ = runner.run(_together([plane.export() for plane in planes]))
        connection = runner.run(planes[1].connect(descriptor, deadline_s=10))

        def read(records: bytes) -> bytes:
            blocks = ReadList(1, owner.epoch, DIGEST, FINGERPRINT * SLOTS, 8, records, offsets(reader))
            return runner.run(connection.read(blocks, deadline_s=10)).statuses

        try:
            seen = read_until_done(read, owner, reader, block_reads=BLOCK_READS // 4)
        finally:
            runner.run(_together([plane.close() for plane in planes]))
    assert seen[ReadStatus.OK] > BLOCK_READS // 100, seen
    assert seen[ReadStatus.TORN] + seen[ReadStatus.STALE] > BLOCK_READS // 100, "the writer was in the way"
    assert seen[ReadStatus.CORRUPT] == 0, "a race with the writer is never taken for rot"


async def _together(calls: list[Coroutine[Any, Any, T]]) -> list[T]:
    return await asyncio.gather(*calls)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_plain_copy_is_torn_when_nobody_looks_at_generations(owner: Arena) -> None:
    """The control: without the protocol this writer does tear reads, so the tests above can fail."""
    into = bytearray(BLOCK * SLOTS)
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        _native.copy_scattered(owner.region, offsets(owner), BLOCK, into)
        blocks = np.frombuffer(into, np.uint64).reshape(SLOTS, -1)
        if (blocks != blocks[:, :1]).any():
            return
    pytest.fail("no torn copy seen")
