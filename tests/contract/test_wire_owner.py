"""The owner of the tcp plane against readers that speak nonsense, too little, too much, or too slowly."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peer_agent import _native
from peer_agent.core.capability import CapabilityMint
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES, SizeClass
from peer_agent.transport.base import BLOCK_RECORD_BYTES, ReadStatus
from peer_agent.transport.check_rig import KEY
from peer_agent.transport.check_wire import (
    BLOCK,
    DIGEST,
    EPOCH,
    EXPIRES_S,
    GOOD_HELLO,
    LOCK,
    PATIENCE_S,
    PAYLOADS,
    SLOTS,
    Bed,
    answer_of,
    capability,
    receive,
    wait_until,
)
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


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    made = Bed(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 32,
        HELLO.pack(REQUEST_MAGIC, VERSION, 0, 0),
        GOOD_HELLO + b"nonsense" * 4,
        GOOD_HELLO + HELLO.pack(HELLO_MAGIC, VERSION, 0, 0),
        GOOD_HELLO + REQUEST.pack(REQUEST_MAGIC, 0, 1, bytes(64)),
        GOOD_HELLO + REQUEST.pack(REQUEST_MAGIC, MAX_REQUEST_BLOCKS + 1, 1, bytes(64)),
        GOOD_HELLO + REQUEST.pack(REQUEST_MAGIC, 0xFFFFFFFF, 1, bytes(64)),
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


EXPIRED = capability(LOCK + 1, b"", expires_s=time.monotonic() - 1)


@pytest.mark.parametrize(
    ("shown", "status", "reason"),
    [
        (bytes(64), ReadStatus.ABSENT, "malformed"),
        (b"\xff" * 64, ReadStatus.ABSENT, "malformed"),
        (CapabilityMint(KEY, epoch=EPOCH - 1).capability(LOCK, b"", reader="", expires_s=1e6), ReadStatus.STALE, "epoch"),
        (EXPIRED, ReadStatus.ABSENT, "expired"),
        (capability(LOCK + 1, b""), ReadStatus.ABSENT, "ended"),
        (capability(LOCK, b"other blocks"), ReadStatus.ABSENT, "forged"),
        (CapabilityMint(bytes(32), epoch=EPOCH).capability(LOCK, b"", reader="", expires_s=1e6), ReadStatus.ABSENT, "forged"),
    ],
    ids=["zeros", "ones", "epoch", "expired", "ended", "blocks", "key"],
)
def test_request_is_served_nothing_and_counted_by_reason_when_its_capability_is_not_the_grants(
    bed: Bed, shown: bytes, status: ReadStatus, reason: str
) -> None:
    with bed.dial() as sock:
        sock.sendall(GOOD_HELLO + bed.request(bed.refs, shown=shown) + bed.request([bed.refs[0]], tag=2))
        receive(sock, HELLO.size)
        assert GROUP.unpack(receive(sock, GROUP.size)) == (GROUP_MAGIC, 1, 0, SLOTS)
        assert receive(sock, 16)[:SLOTS] == bytes([status] * SLOTS)
        assert answer_of(sock, 2, 1) == [PAYLOADS[0]], "the connection goes on, and who shows the right one is served"
    counted = {name: count for name, count in bed.server.stats().items() if name.startswith("capability_") and count}
    assert counted == {f"capability_{reason}": 1}


def test_capability_ends_with_its_lock_when_it_is_shown_again(bed: Bed) -> None:
    """Replay: as often as one likes while the lock lives, never after Unlock, nor under a later lock of the same number."""
    connection = bed.connect()
    assert [bed.read(connection) for _ in range(3)] == [bytes(SLOTS)] * 3
    bed.server.revoke(LOCK)
    assert bed.read(connection) == bytes([ReadStatus.ABSENT] * SLOTS)
    bed.server.grant(capability(LOCK, bed.records, expires_s=EXPIRES_S + 1), bed.records)
    assert bed.read(connection) == bytes([ReadStatus.ABSENT] * SLOTS)
    stats = bed.server.stats()
    assert (stats["capability_ended"], stats["capability_forged"]) == (1, 1)


def test_grant_is_refused_when_its_capability_is_not_of_this_owner(bed: Bed) -> None:
    other = CapabilityMint(KEY, epoch=EPOCH + 1).capability(9, bed.records, reader="", expires_s=1e6)
    for wrong in (other, bytes(64), other[:-1], b""):
        with pytest.raises(ValueError, match=r"another epoch or version|a capability of"):
            bed.server.grant(wrong, bed.records)


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


def test_grant_is_refused_when_it_names_other_memory(bed: Bed) -> None:
    for offset, length in ((0, 10), (bed.refs[0][0] + 128, 10), (bed.refs[0][0], BLOCK + 1), (1 << 50, 1)):
        with pytest.raises(ValueError, match=r"no slot begins|do not fit"):
            bed.server.grant(capability(9, b""), struct.pack("<QQQII", offset, 2, 0, length, 1))


def test_closed_server_answers_nobody_and_close_is_idempotent(bed: Bed) -> None:
    connection = bed.connect()
    bed.server.close()
    bed.server.close()
    assert bed.read(connection) == bytes([ReadStatus.PEER_LOST] * SLOTS)
    with pytest.raises(ConnectionError):
        bed.connect()
    bed.owner.close()  # no grant looks at memory that is gone
    bed.server.grant(capability(LOCK, bed.records), bed.records)
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
        shown = capability(LOCK, records)
        server.grant(shown, records)
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
            refs = b"".join(SLOT_REF.pack(r[0], r[1], r[3]) for r in struct.iter_unpack("<QQQII", records))
            sock.sendall(GOOD_HELLO + REQUEST.pack(REQUEST_MAGIC, slots, 1, shown) + refs)
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


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_owner_sends_nothing_that_the_lock_does_not_cover_whatever_is_asked(bed: Bed, data: st.DataObject) -> None:
    """Half of the slots are under the lock. Whatever requests say, cut, flipped or made up: no byte of the other half."""
    half = SLOTS // 2
    records = bed.records[: half * BLOCK_RECORD_BYTES]
    shown = capability(LOCK + 1, records)
    bed.server.grant(shown, records)
    number = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([ref[0] for ref in bed.refs]))
    refs = data.draw(
        st.lists(
            st.one_of(
                st.sampled_from(bed.refs),
                st.tuples(number, st.integers(0, 8), st.sampled_from([BLOCK, BLOCK - 1, 0, 2**32 - 1])),
            ),
            min_size=1,
            max_size=12,
        )
    )
    never = capability(LOCK + 2, records)
    request = bytearray(bed.request(refs, shown=data.draw(st.sampled_from([shown, shown, never]))))
    for _ in range(data.draw(st.integers(0, 3), label="flips")):
        request[data.draw(st.integers(0, len(request) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with bed.dial() as sock:
        sock.sendall(GOOD_HELLO + bytes(request[: data.draw(st.integers(0, len(request)), label="cut")]))
        sock.shutdown(socket.SHUT_WR)
        received = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(65536):
                received += part
    for payload in PAYLOADS[half:]:
        assert not any(payload[at : at + 16] in received for at in range(0, BLOCK - 16, 500))
    bed.still_serves()
