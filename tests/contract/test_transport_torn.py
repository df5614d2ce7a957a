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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from kvdir.testing.certificates import shared_certificates
from peer_agent import _native
from peer_agent.core.capability import KEY_BYTES, CapabilityMint
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES, SizeClass
from peer_agent.transport.base import ReadList, ReadStatus
from peer_agent.transport.mover import MoverTransport
from peer_agent.transport.tls import plane_credentials

T = TypeVar("T")

DIGEST = b"torn".ljust(32, b".")
FINGERPRINT = b"f" * 8
BLOCK = 64 << 10
SLOTS = 8
BLOCK_READS = 20_000
SMALL_BLOCK, SMALL_SLOTS, SMALL_READS = 4096, 64, 340_000
"""Three planes together read a million small blocks; large ones, whose copies take longer, are torn more often."""

UCX_READS = 10_000
TLS_READS = 7_000
PAUSE_S = 0.0003
"""After each slot, where a read takes so long that without pauses hardly one would be whole."""
PATIENCE_S = 40.0

WRITER = """
import struct, sys, time
import numpy as np
from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.transport.tls import plane_credentials

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
        if pause_s:
            time.sleep(pause_s)
"""


@contextmanager
def rewritten(path: Path, classes: Sequence[SizeClass], *, pause_s: float) -> Iterator[Arena]:
    """An arena that another process keeps rewriting, with a pause after each slot."""
    with Arena.create(path, classes, epoch=1, prefault=True) as arena:
        length = str(classes[0].block_bytes)
        command = [sys.executable, "-c", WRITER, arena.path, length, str(PATIENCE_S * 2), str(pause_s)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
            yield arena
        finally:
            writer.kill()
            writer.communicate()


@pytest.fixture
def owner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """What is rewritten. Parameter: the pause after each slot, seconds; else none."""
    pause_s = getattr(request, "param", 0.0)
    with rewritten(tmp_path / "owner", [SizeClass(DIGEST, BLOCK, SLOTS)], pause_s=pause_s) as arena:
        yield arena


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "reader", [SizeClass(DIGEST, BLOCK, SLOTS)], epoch=2, prefault=True) as arena:
        yield arena


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Arena, Arena]]:
    """The same with small blocks: the arena that is rewritten, and the reader's."""
    classes = [SizeClass(DIGEST, SMALL_BLOCK, SMALL_SLOTS)]
    with (
        rewritten(tmp_path / "owner", classes, pause_s=0.0) as ours,
        Arena.create(tmp_path / "reader", classes, epoch=2, prefault=True) as theirs,
    ):
        yield ours, theirs


def offsets(arena: Arena) -> bytes:
    size_class = arena.classes[0]
    return struct.pack(f"<{size_class.slots}Q", *map(size_class.offset, range(size_class.slots)))


def payloads(arena: Arena) -> npt.NDArray[np.uint64]:
    """(slots, words) of the arena's own memory."""
    size_class = arena.classes[0]
    flat = np.frombuffer(arena.region, np.uint64)[(size_class.offset(0) + HEADER_BYTES) // 8 :]
    shape = (size_class.slots, size_class.block_bytes // 8)
    return np.lib.stride_tricks.as_strided(flat, shape, (size_class.offset(1) - size_class.offset(0), 8), writeable=False)


def read_until_done(
    read: Callable[[bytes], bytes], owner: Arena, reader: Arena, *, block_reads: int = BLOCK_READS
) -> dict[ReadStatus, int]:
    """Reads what the headers say now, again and again; fails at the first OK block that is not whole."""
    _native.begin_write(reader.region, offsets(reader))
    words, seen = payloads(reader), np.zeros(len(ReadStatus), np.int64)
    until = time.monotonic() + PATIENCE_S
    while seen.sum() < block_reads and time.monotonic() < until:
        records = _native.records(owner.region, offsets(owner))
        statuses = np.frombuffer(read(records), np.uint8)
        generations = np.frombuffer(records, "<u8")[1::4]
        wrong = (words != generations[:, None]).any(axis=1) & (statuses == ReadStatus.OK)
        assert not wrong.any(), f"torn, or of another generation than the record says: slots {np.flatnonzero(wrong)}"
        seen += np.bincount(statuses, minlength=len(seen))
    assert seen.sum() >= block_reads, f"{seen.sum()} of {block_reads} block reads in {PATIENCE_S:g} s"
    return dict(zip(ReadStatus, seen.tolist(), strict=True))


def expect_whole_or_refused(seen: dict[ReadStatus, int], *, least_ok: int) -> None:
    assert seen[ReadStatus.OK] > least_ok, seen
    assert seen[ReadStatus.TORN] + seen[ReadStatus.STALE] > 0, "the writer was in the way"
    assert seen[ReadStatus.CORRUPT] == 0, "a race with the writer is never taken for rot"


def read_shm(owner: Arena, reader: Arena, *, block_reads: int) -> dict[ReadStatus, int]:
    count = owner.classes[0].slots
    with Arena.open(owner.path, writable=False) as mapped:

        def read(records: bytes) -> bytes:
            deadline_ns = time.monotonic_ns() + 10**10
            arguments = (records, DIGEST, FINGERPRINT * count, 8, reader.region, offsets(reader), False, deadline_ns)
            found = _native.read_slots(mapped.region, *arguments, mapped.arena_bytes)
            assert found is not None
            return found[0]

        return read_until_done(read, owner, reader, block_reads=block_reads)


def read_tcp(owner: Arena, reader: Arena, *, check: bool, secured: bool = False, block_reads: int) -> dict[ReadStatus, int]:
    count = owner.classes[0].slots
    tls = plane_credentials(shared_certificates().files("node")) if secured else None
    server = _native.TcpServer(owner.region, 1, "127.0.0.1", 0, tls=tls)
    connection = _native.TcpConnection("127.0.0.1", server.port, time.monotonic_ns() + 10**10, tls=tls)

    mint = CapabilityMint(bytes(KEY_BYTES), epoch=1)

    def read(records: bytes) -> bytes:
        deadline_ns = time.monotonic_ns() + 10**10
        shown = mint.capability(1, records, reader="", expires_s=deadline_ns / 1e9)
        server.grant(shown, records)
        arguments = (records, DIGEST, FINGERPRINT * count, 8, reader.region, offsets(reader), check, deadline_ns)
        return connection.read(shown, 1, *arguments)

    try:
        return read_until_done(read, owner, reader, block_reads=block_reads)
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_shm_read_is_never_torn_when_another_process_rewrites_the_slots(owner: Arena, reader: Arena) -> None:
    seen = read_shm(owner, reader, block_reads=BLOCK_READS)
    expect_whole_or_refused(seen, least_ok=BLOCK_READS // 20)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", [False, True])
def test_tcp_read_is_never_torn_when_another_process_rewrites_the_slots(owner: Arena, reader: Arena, check: bool) -> None:
    seen = read_tcp(owner, reader, check=check, block_reads=BLOCK_READS)
    expect_whole_or_refused(seen, least_ok=BLOCK_READS // 50)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("owner", [PAUSE_S], indirect=True)
def test_tls_read_is_never_torn_when_another_process_rewrites_the_slots(owner: Arena, reader: Arena) -> None:
    seen = read_tcp(owner, reader, check=False, secured=True, block_reads=TLS_READS)
    expect_whole_or_refused(seen, least_ok=TLS_READS // 50)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("plane", ["shm", "tcp", "tcp with checksums"])
def test_none_of_a_million_small_reads_is_torn(small: tuple[Arena, Arena], plane: str) -> None:
    """A third of them each."""
    if plane == "shm":
        seen = read_shm(*small, block_reads=SMALL_READS)
    else:
        seen = read_tcp(*small, check=plane != "tcp", block_reads=SMALL_READS)
    expect_whole_or_refused(seen, least_ok=SMALL_READS // 20)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("owner", [PAUSE_S], indirect=True)
@pytest.mark.parametrize("backend", ["ucx", "nixl"])
def test_one_sided_read_is_never_torn_when_another_process_rewrites_the_slots(
    backend: str, owner: Arena, reader: Arena
) -> None:
    """Gets look at nothing while they copy; one look at the header afterwards decides (csrc/gets.hpp)."""
    with asyncio.Runner() as runner:
        planes = [MoverTransport(arena, backend=backend, settings={"emulated": "tcp"}) for arena in (owner, reader)]
        descriptor, _ = runner.run(_together([plane.export() for plane in planes]))
        connection = runner.run(planes[1].connect(descriptor, deadline_s=10))

        def read(records: bytes) -> bytes:
            blocks = ReadList(1, owner.epoch, DIGEST, FINGERPRINT * SLOTS, 8, records, offsets(reader))
            return runner.run(connection.read(blocks, deadline_s=10)).statuses

        try:
            seen = read_until_done(read, owner, reader, block_reads=UCX_READS)
        finally:
            runner.run(_together([plane.close() for plane in planes]))
    expect_whole_or_refused(seen, least_ok=UCX_READS // 25)


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
