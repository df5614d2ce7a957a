"""The tcp plane's frames against peers that speak nonsense, too little, too much, or too slowly."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    SizeClass,
    Superblock,
    lay_out,
    pack_superblock,
)
from peer_agent.transport.base import ReadStatus
from peer_agent.transport.check_rig import write
from peer_agent.transport.faulty_owner import (
    GROUP,
    GROUP_MAGIC,
    HELLO,
    HELLO_MAGIC,
    MAX_REQUEST_BLOCKS,
    REQUEST,
    REQUEST_MAGIC,
    SLOT_REF,
    TRAILER,
    VERSION,
)

DIGEST = b"wire".ljust(32, b".")
BLOCK = 3000
SLOTS = 8
EPOCH = 21
LOCK = 5
PATIENCE_S = 10.0
GOOD_HELLO = HELLO.pack(HELLO_MAGIC, VERSION, 0, 0)
FINGERPRINTS = random.Random(1).randbytes(16 * SLOTS)
PAYLOADS = [random.Random(slot).randbytes(BLOCK) for slot in range(SLOTS)]


class Bed:
    """A served arena, its granted records, and a second arena to read into."""

    def __init__(self, directory: Path, *, max_connections: int = 64) -> None:
        self.owner = Arena.create(directory / "owner", [SizeClass(DIGEST, BLOCK, SLOTS)], epoch=EPOCH)
        self.reader = Arena.create(directory / "reader", [SizeClass(DIGEST, BLOCK, SLOTS)], epoch=1)
        _native.begin_write(self.owner.region, self.offsets)
        _native.begin_write(self.reader.region, self.offsets)
        self.records = write(self.owner, self.offsets, DIGEST, FINGERPRINTS, PAYLOADS)
        self.server = _native.TcpServer(self.owner.region, EPOCH, "127.0.0.1", 0, max_connections=max_connections)
        self.server.grant(LOCK, self.records, time.monotonic_ns() + 10**12)

    @property
    def offsets(self) -> bytes:
        return struct.pack(f"<{SLOTS}Q", *(self.owner.classes[0].offset(slot) for slot in range(SLOTS)))

    @property
    def refs(self) -> list[tuple[int, int, int]]:
        return [(record[0], record[1], record[3]) for record in struct.iter_unpack("<QQQII", self.records)]

    def request(self, refs: list[tuple[int, int, int]], *, tag: int = 1, lock: int = LOCK) -> bytes:
        head = REQUEST.pack(REQUEST_MAGIC, len(refs), lock, EPOCH, tag)
        return head + b"".join(SLOT_REF.pack(*ref) for ref in refs)

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE_S)

    def connect(self, port: int | None = None) -> _native.TcpConnection:
        return _native.TcpConnection("127.0.0.1", port or self.server.port, deadline())

    def read(self, connection: _native.TcpConnection, *, check: bool = True, seconds: float = PATIENCE_S) -> bytes:
        return connection.read(
            LOCK,
            EPOCH,
            self.records,
            DIGEST,
            FINGERPRINTS,
            16,
            self.reader.region,
            self.offsets,
            check,
            deadline(seconds),
        )

    def landed(self, slot: int) -> bytes:
        start = self.reader.classes[0].offset(slot) + HEADER_BYTES
        return bytes(self.reader.region[start : start + BLOCK])

    def still_serves(self) -> None:
        assert self.read(self.connect()) == bytes(SLOTS)
        assert [self.landed(slot) for slot in range(SLOTS)] == PAYLOADS

    def close(self) -> None:
        self.server.close()
        self.owner.close()
        self.reader.close()


def deadline(seconds: float = PATIENCE_S) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := sock.recv(size - len(data))):
        data += part
    return data


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "condition not reached in time"
        time.sleep(0.001)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    made = Bed(tmp_path)
    yield made
    made.close()


def answer_of(sock: socket.socket, tag: int, count: int) -> list[bytes]:
    """Reads one answer of a single group, checking every frame; returns the payloads."""
    magic, got_tag, first, got_count = GROUP.unpack(receive(sock, GROUP.size))
    assert (magic, got_tag, first, got_count) == (GROUP_MAGIC, tag, 0, count)
    statuses = receive(sock, (count + 15) // 16 * 16)[:count]
    payloads, generations = [], []
    for _ in range(statuses.count(0)):
        header = receive(sock, HEADER_BYTES)
        generations.append(struct.unpack_from("<Q", header, 8)[0])
        payloads.append(receive(sock, struct.unpack_from("<I", header, 24)[0]))
    accepted = [position for position, status in enumerate(statuses) if status == 0]
    for position, generation in zip(accepted, generations, strict=True):
        assert TRAILER.unpack(receive(sock, TRAILER.size)) == (generation, position)
    return payloads


@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 32,
        HELLO.pack(REQUEST_MAGIC, VERSION, 0, 0),
        GOOD_HELLO + b"nonsense" * 4,
        GOOD_HELLO + HELLO.pack(HELLO_MAGIC, VERSION, 0, 0),
        GOOD_HELLO + REQUEST.pack(REQUEST_MAGIC, 0, LOCK, EPOCH, 1),
        GOOD_HELLO + REQUEST.pack(REQUEST_MAGIC, MAX_REQUEST_BLOCKS + 1, LOCK, EPOCH, 1),
        GOOD_HELLO + REQUEST.pack(REQUEST_MAGIC, 0xFFFFFFFF, LOCK, EPOCH, 1),
        HELLO.pack(HELLO_MAGIC, VERSION + 1, 0, 0),
    ],
    ids=["http", "zeros", "other-magic", "noise", "second-hello", "no-blocks", "one-too-many", "huge", "version"],
)
def test_connection_is_closed_and_counted_when_frames_are_wrong(bed: Bed, opening: bytes) -> None:
    with bed.dial() as sock:
        sock.sendall(opening)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
    assert bed.server.stats()["protocol_errors"] == 1
    bed.still_serves()


def test_hello_names_our_version_when_the_peer_has_another(bed: Bed) -> None:
    with bed.dial() as sock:
        sock.sendall(HELLO.pack(HELLO_MAGIC, VERSION + 1, 0, 0))
        magic, version, epoch, limit = HELLO.unpack(receive(sock, HELLO.size))
    assert (magic, version, epoch, limit) == (HELLO_MAGIC, VERSION, EPOCH, MAX_REQUEST_BLOCKS)


@pytest.mark.parametrize("cut", [0, 3, HELLO.size - 1, HELLO.size + 5, HELLO.size + REQUEST.size + 10])
def test_truncated_frames_cost_nothing_when_the_peer_leaves(bed: Bed, cut: int) -> None:
    with bed.dial() as sock:
        sock.sendall((GOOD_HELLO + bed.request(bed.refs))[:cut])
    wait_until(lambda: bed.server.stats()["connections"] == 0)
    assert bed.server.stats()["protocol_errors"] == 0
    bed.still_serves()


def test_request_is_answered_when_it_arrives_byte_by_byte(bed: Bed) -> None:
    with bed.dial() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in GOOD_HELLO + bed.request(bed.refs):
            sock.sendall(bytes([byte]))
        receive(sock, HELLO.size)
        assert answer_of(sock, 1, SLOTS) == PAYLOADS


def test_requests_are_answered_in_order_when_pipelined(bed: Bed) -> None:
    orders = [[slot] for slot in range(SLOTS)] + [[3, 1, 3, 0]]
    with bed.dial() as sock:
        requests = [bed.request([bed.refs[slot] for slot in order], tag=tag) for tag, order in enumerate(orders)]
        sock.sendall(GOOD_HELLO + b"".join(requests))
        receive(sock, HELLO.size)
        for tag, order in enumerate(orders):
            assert answer_of(sock, tag, len(order)) == [PAYLOADS[slot] for slot in order]
    assert bed.server.stats()["reads"] == len(orders)


def test_blocks_are_refused_one_by_one_when_the_grant_does_not_cover_them(bed: Bed) -> None:
    (offset, generation, length) = bed.refs[0]
    asked = [
        (offset, generation, length),
        (offset, generation + 2, length),
        (offset, generation, length - 1),
        (offset + 128, generation, length),
        (0, generation, length),
        ((1 << 64) - 128, generation, (1 << 32) - 1),
    ]
    with bed.dial() as sock:
        sock.sendall(GOOD_HELLO + bed.request(asked) + bed.request([bed.refs[1]], tag=2))
        receive(sock, HELLO.size + GROUP.size)
        statuses = list(receive(sock, 16))
        assert statuses[:1] == [ReadStatus.OK]
        receive(sock, HEADER_BYTES + BLOCK + TRAILER.size)
        # The last one asks for 4 GiB: by the rule of group_end it is a group of its own.
        assert statuses[1:5] == [ReadStatus.STALE, ReadStatus.ABSENT, ReadStatus.ABSENT, ReadStatus.ABSENT]
        assert GROUP.unpack(receive(sock, GROUP.size)) == (GROUP_MAGIC, 1, 5, 1)
        assert receive(sock, 16)[0] == ReadStatus.ABSENT
        assert answer_of(sock, 2, 1) == [PAYLOADS[1]]
    assert bed.server.stats()["refused"] == 5


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.booleans(), st.data())
def test_server_survives_when_it_is_sent_noise(bed: Bed, noise: bytes, greet: bool, data: st.DataObject) -> None:
    valid = bytearray(bed.request(bed.refs[:3]))
    if data.draw(st.booleans(), label="mutate a valid request"):
        for _ in range(data.draw(st.integers(1, 4))):
            valid[data.draw(st.integers(0, len(valid) - 1))] = data.draw(st.integers(0, 255))
        noise = bytes(valid) + noise
    with bed.dial() as sock:
        sock.sendall((GOOD_HELLO if greet else b"") + noise)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(65536):
                pass
    bed.still_serves()


class Liar:
    """A server that greets, takes one request and then sends what it is told."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.answer = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                sock.settimeout(PATIENCE_S)
                receive(sock, HELLO.size)
                sock.sendall(HELLO.pack(HELLO_MAGIC, VERSION, EPOCH, MAX_REQUEST_BLOCKS))
                _, count, *_ = REQUEST.unpack(receive(sock, REQUEST.size))
                receive(sock, count * SLOT_REF.size)
                sock.sendall(self.answer)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(1)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE_S)


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.close()


def honest_answer(bed: Bed) -> bytes:
    with bed.dial() as sock:
        sock.sendall(GOOD_HELLO + bed.request(bed.refs))
        receive(sock, HELLO.size)
        return receive(sock, GROUP.size + 16 + SLOTS * (HEADER_BYTES + BLOCK + TRAILER.size))


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
        (HELLO.pack(HELLO_MAGIC, 9, EPOCH, 1), "speaks version 9 .* we speak 1; upgrade"),
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


def test_port_in_use_is_named_when_listening(bed: Bed) -> None:
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {bed.server.port}: .*; choose another port"):
        _native.TcpServer(bed.owner.region, EPOCH, "127.0.0.1", bed.server.port)


def test_connections_are_refused_and_counted_when_there_are_too_many(tmp_path: Path) -> None:
    bed = Bed(tmp_path, max_connections=2)
    first, second = bed.connect(), bed.connect()
    with pytest.raises(ConnectionError, match="too many connections"):
        bed.connect()
    assert bed.server.stats()["connections_refused"] == 1
    assert bed.read(first) == bytes(SLOTS)
    second.close()
    wait_until(lambda: bed.server.stats()["connections"] == 1)
    bed.still_serves()
    bed.close()


def test_slow_reader_hurts_only_itself_when_it_takes_nothing(bed: Bed) -> None:
    """A peer asks for far more than socket buffers hold and never reads; others are served meanwhile."""
    with bed.dial() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        many = bed.request(bed.refs * (MAX_REQUEST_BLOCKS // SLOTS))
        slow.sendall(GOOD_HELLO + many)
        for _ in range(20):
            bed.still_serves()
        assert bed.server.stats()["connections"] >= 1


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
        statuses = connection.read(1, EPOCH, record, DIGEST, b"f" * 8, 8, region, struct.pack("<Q", 4096), True, deadline(60))
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


def test_grant_is_refused_when_it_names_other_memory(bed: Bed) -> None:
    for offset, length in ((0, 10), (bed.refs[0][0] + 128, 10), (bed.refs[0][0], BLOCK + 1), (1 << 50, 1)):
        with pytest.raises(ValueError, match=r"no slot begins|do not fit"):
            bed.server.grant(9, struct.pack("<QQQII", offset, 2, 0, length, 1), deadline())


def test_closed_server_answers_nobody_and_close_is_idempotent(bed: Bed) -> None:
    connection = bed.connect()
    bed.server.close()
    bed.server.close()
    assert bed.read(connection) == bytes([ReadStatus.PEER_LOST] * SLOTS)
    with pytest.raises(ConnectionError):
        bed.connect()
    bed.server.grant(LOCK, bed.records, deadline())
    bed.server.revoke(LOCK)
    assert bed.server.stats()["connections"] == 0


def test_revoked_grant_stops_an_answer_when_it_is_under_way(tmp_path: Path) -> None:
    """Groups that have not begun are ABSENT: what is on its way after a revoke is bounded."""
    block, slots = 1 << 20, 64
    classes = [SizeClass(DIGEST, block, slots)]
    with (
        Arena.create(tmp_path / "owner", classes, epoch=EPOCH) as owner,
        Arena.create(tmp_path / "reader", classes, epoch=1) as reader,
    ):
        offsets = struct.pack(f"<{slots}Q", *(owner.classes[0].offset(slot) for slot in range(slots)))
        _native.begin_write(owner.region, offsets)
        records = _native.commit(owner.region, offsets, DIGEST, b"f" * 8 * slots, 8, block, None)
        _native.begin_write(reader.region, offsets)
        server = _native.TcpServer(owner.region, EPOCH, "127.0.0.1", 0)
        server.grant(LOCK, records, deadline())
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
            refs = b"".join(SLOT_REF.pack(r[0], r[1], r[3]) for r in struct.iter_unpack("<QQQII", records))
            sock.sendall(GOOD_HELLO + REQUEST.pack(REQUEST_MAGIC, slots, LOCK, EPOCH, 1) + refs)
            receive(sock, HELLO.size)
            server.revoke(LOCK)
            served = 0
            for _ in range(slots):
                _, _, _, count = GROUP.unpack(receive(sock, GROUP.size))
                status = receive(sock, 16)[0]
                assert count == 1
                if status == ReadStatus.OK:
                    receive(sock, HEADER_BYTES + block + TRAILER.size)
                    served += 1
        server.close()
    assert served < slots
