"""What tests of the tcp plane's frames work with: a served arena, raw sockets, and an owner that sends what it is told.

Never used by an agent. The frames themselves: csrc/wire.hpp, and once more in faulty_owner.py.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from peer_agent import _native
from peer_agent.core.capability import CapabilityMint
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES, SizeClass
from peer_agent.transport.check_rig import KEY, write
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
        self.server.grant(capability(LOCK, self.records), self.records)

    @property
    def offsets(self) -> bytes:
        return struct.pack(f"<{SLOTS}Q", *(self.owner.classes[0].offset(slot) for slot in range(SLOTS)))

    @property
    def refs(self) -> list[tuple[int, int, int]]:
        return [(record[0], record[1], record[3]) for record in struct.iter_unpack("<QQQII", self.records)]

    def request(self, refs: list[tuple[int, int, int]], *, tag: int = 1, shown: bytes = b"") -> bytes:
        """shown: another capability than that of LOCK."""
        head = REQUEST.pack(REQUEST_MAGIC, len(refs), tag, shown or capability(LOCK, self.records))
        return head + b"".join(SLOT_REF.pack(*ref) for ref in refs)

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE_S)

    def connect(self, port: int | None = None) -> _native.TcpConnection:
        return _native.TcpConnection("127.0.0.1", port or self.server.port, deadline())

    def read(self, connection: _native.TcpConnection, *, check: bool = True, seconds: float = PATIENCE_S) -> bytes:
        return connection.read(
            capability(LOCK, self.records),
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


EXPIRES_S = time.monotonic() + 3600


def capability(lock: int, records: bytes, *, expires_s: float = EXPIRES_S) -> bytes:
    return CapabilityMint(KEY, epoch=EPOCH).capability(lock, records, reader="wire", expires_s=expires_s)


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


def honest_answer(bed: Bed) -> bytes:
    with bed.dial() as sock:
        sock.sendall(GOOD_HELLO + bed.request(bed.refs))
        receive(sock, HELLO.size)
        return receive(sock, GROUP.size + 16 + SLOTS * (HEADER_BYTES + BLOCK + TRAILER.size))
