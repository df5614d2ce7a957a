"""The reader of the tcp plane against owners that speak nonsense, lie, or say nothing."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peer_agent import _native
from peer_agent.memory.layout import HEADER_BYTES, SUPERBLOCK_BYTES, SizeClass, Superblock, lay_out, pack_superblock
from peer_agent.transport.base import ReadStatus
from peer_agent.transport.check_wire import (
    BLOCK,
    DIGEST,
    EPOCH,
    PATIENCE_S,
    PAYLOADS,
    SLOTS,
    Bed,
    Liar,
    deadline,
    honest_answer,
    receive,
)
from peer_agent.transport.faulty_owner import (
    HELLO,
    HELLO_MAGIC,
    MAX_REQUEST_BLOCKS,
    REQUEST,
    VERSION,
)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    made = Bed(tmp_path)
    yield made
    made.close()


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_reader_never_takes_wrong_bytes_when_the_answer_is_altered(bed: Bed, liar: Liar, data: st.DataObject) -> None:
    """Whatever is flipped, cut or repeated in an honest answer: OK blocks are right, the rest have a status, in time."""
    answer = bytearray(honest_answer(bed))
    for _ in range(data.draw(st.integers(0, 3), label="flips")):
        answer[data.draw(st.integers(0, len(answer) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.one_of(st.just(len(answer)), st.integers(0, len(answer))), label="cut")
    liar.answer = bytes(answer[:cut]) + data.draw(st.binary(max_size=64), label="tail")
    slots = bed.reader.classes[0]
    bed.reader.region[slots.first + HEADER_BYTES : slots.first + HEADER_BYTES + BLOCK] = bytes(BLOCK)
    statuses = bed.read(bed.connect(liar.port))
    assert len(statuses) == SLOTS
    assert ReadStatus.LATE not in statuses
    for slot, status in enumerate(statuses):
        if status == ReadStatus.OK:
            assert bed.landed(slot) == PAYLOADS[slot]


def test_reader_reads_everything_when_the_answer_is_unaltered(bed: Bed, liar: Liar) -> None:
    liar.answer = honest_answer(bed)
    assert bed.read(bed.connect(liar.port)) == bytes(SLOTS)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\nxxxxx", "wrong magic"),
        (HELLO.pack(HELLO_MAGIC, 9, EPOCH, 1), "speaks version 9 .* we speak 2; upgrade"),
        (b"short", "without a hello"),
    ],
)
def test_connect_says_why_when_the_peer_is_something_else(hello: bytes, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            sock, _ = listener.accept()
            with sock:
                receive(sock, HELLO.size)
                sock.sendall(hello)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ConnectionError, match=reason):
            _native.TcpConnection("127.0.0.1", listener.getsockname()[1], deadline())
        thread.join(PATIENCE_S)


def test_connect_ends_by_its_deadline_when_the_peer_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.monotonic()
        with pytest.raises(ConnectionError, match="no hello in time"):
            _native.TcpConnection("127.0.0.1", listener.getsockname()[1], deadline(0.1))
        assert time.monotonic() - begun < 5
    with pytest.raises(ConnectionError, match="Connection refused"):
        _native.TcpConnection("127.0.0.1", 1, deadline(5))
    with pytest.raises(ConnectionError, match="not a numeric address"):
        _native.TcpConnection("localhost", 1, deadline(5))


def test_read_ends_at_once_when_another_thread_closes_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets: list[socket.socket] = []

        def greet() -> None:
            sock, _ = listener.accept()
            sockets.append(sock)
            sock.sendall(HELLO.pack(HELLO_MAGIC, VERSION, EPOCH, MAX_REQUEST_BLOCKS))
            receive(sock, HELLO.size + REQUEST.size)
            connection.close()

        thread = threading.Thread(target=greet)
        thread.start()
        connection = _native.TcpConnection("127.0.0.1", listener.getsockname()[1], deadline())
        region = _region()
        record = struct.pack("<QQQII", 4096, 2, 0, 10, 1)
        begun = time.monotonic()
        statuses = connection.read(
            bytes(64), EPOCH, record, DIGEST, b"f" * 8, 8, region, struct.pack("<Q", 4096), True, deadline(60)
        )
        assert (statuses, connection.broken) == (bytes([ReadStatus.PEER_LOST]), True)
        assert time.monotonic() - begun < PATIENCE_S
        thread.join(PATIENCE_S)
        for sock in sockets:
            sock.close()


def _region() -> bytearray:
    placed, size = lay_out([SizeClass(DIGEST, 10, 1)])
    region = bytearray(size)
    region[:SUPERBLOCK_BYTES] = pack_superblock(Superblock(bytes(16), 1, size, 1, placed))
    _native.begin_write(region, struct.pack("<Q", placed[0].first))
    return region
