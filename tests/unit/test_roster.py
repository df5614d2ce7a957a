"""The records of a region's roster: what is written is read, what cannot be read is nothing, what does not fit is cut."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvdir.core.roster import (
    BEAT_RECORD_BYTES,
    Beat,
    NamespaceRecord,
    NodeRecord,
    decode_namespaces,
    encode_namespaces,
)
from kvdir.index import NODE_RECORD_BYTES
from kvdir.location import NodeTrust, StreamState

S = 10**9
TRUST = NodeTrust("node-1", 2**63 + 5, StreamState.REPAIRING, "events missing", 0.0, 7, "10.0.0.1:7410", 0.375)


@given(
    st.builds(
        NodeTrust,
        st.text(max_size=80),
        st.integers(0, 2**64 - 1),
        st.sampled_from(StreamState),
        st.text(max_size=40),
        st.just(0.0),
        st.integers(0, 2**64 - 1),
        st.text(max_size=20),
        st.floats(0, 1),
    ),
    st.integers(0, 2**63),
    st.booleans(),
)
def test_a_node_is_read_as_it_was_written_when_it_fits(trust: NodeTrust, heard_ns: int, hidden: bool) -> None:
    record = NodeRecord(trust, heard_ns, hidden)
    packed = record.encode()
    assert NodeRecord.decode(packed + b"\0" * 9) == record
    assert all(NodeRecord.decode(packed[:end]) is None for end in range(len(packed)))


@given(st.text(max_size=900), st.text(max_size=900), st.text(max_size=900))
def test_a_node_record_is_never_too_long_and_never_another_nodes_address_when_texts_are(
    name: str, address: str, reason: str
) -> None:
    record = NodeRecord(replace(TRUST, node=name, peer_address=address, reason=reason), 5)
    packed = record.encode()
    assert len(packed) <= NODE_RECORD_BYTES
    read = NodeRecord.decode(packed)
    assert read is not None
    assert read.trust.peer_address in (address, "")
    assert read.trust.node == name or (read.trust.node.endswith("…") and not read.trust.peer_address)
    assert read.trust.reason == reason or read.trust.reason.endswith("…") or not read.trust.reason
    assert read.trust.epoch == TRUST.epoch


@given(st.binary(max_size=200), st.integers(0, 255))
def test_garbage_is_nothing_or_a_record_and_never_an_error(garbage: bytes, version: int) -> None:
    for packed in (garbage, bytes([1]) + garbage, bytes([version]) + garbage):
        for decoded in (NodeRecord.decode(packed), Beat.decode(packed)):
            assert decoded is None or packed[0] == 1
        assert len(decode_namespaces(packed)) * 46 <= len(packed)


def test_a_record_of_another_version_is_nothing() -> None:
    beat = Beat(beat_ns=1, as_of_ns=1)
    for packed, decode in ((NodeRecord(TRUST, 1).encode(), NodeRecord.decode), (beat.encode(), Beat.decode)):
        assert decode(packed) is not None
        assert decode(b"\x63" + packed[1:]) is None
        assert decode(bytes(len(packed))) is None
    assert decode_namespaces(b"\x63" + encode_namespaces([NamespaceRecord(bytes(32), "a", 1, 1)])[1:]) == ()


def test_a_state_of_a_later_release_is_a_gap() -> None:
    packed = bytearray(NodeRecord(TRUST, 1).encode())
    packed[1] = 99
    read = NodeRecord.decode(bytes(packed))
    assert read is not None
    assert read.trust.state is StreamState.GAP


def test_a_node_grows_old_and_stale_when_nobody_writes() -> None:
    record = NodeRecord(replace(TRUST, state=StreamState.SYNCED, reason=""), 10 * S)
    young = record.as_of(12 * S, stale_after_ns=3 * S)
    assert (young.state, young.age_s, young.reason) == (StreamState.SYNCED, 2.0, "")
    old = record.as_of(14 * S, stale_after_ns=3 * S)
    assert (old.state, old.age_s, old.reason) == (StreamState.STALE, 4.0, "not heard within the limit")
    assert record.as_of(99 * S, stale_after_ns=0).state is StreamState.SYNCED
    fenced = NodeRecord(replace(TRUST, state=StreamState.FENCED), 0)
    assert fenced.as_of(99 * S, stale_after_ns=S).state is StreamState.FENCED


def test_a_beat_is_read_as_it_was_written() -> None:
    beat = Beat(
        beat_ns=5 * S, as_of_ns=4 * S, pid=77, source="h:7400", warming=True, direct=False, incomplete=True,
        stale_after_s=1.5, expire_after_s=30.0,
    )  # fmt: skip
    assert Beat.decode(beat.encode()) == beat
    assert len(replace(beat, source="x" * 900).encode()) == BEAT_RECORD_BYTES
    assert (beat.silent_s(7 * S), beat.lag_s(7 * S)) == (2.0, 3.0)
    assert replace(beat, direct=True).lag_s(7 * S) == 2.0


def test_namespaces_before_the_cut_are_read_when_bytes_are_cut_short() -> None:
    records = tuple(NamespaceRecord(bytes([number]) * 32, f"name-{number}", number * 10, 16) for number in range(3))
    packed = encode_namespaces(records)
    assert decode_namespaces(packed) == records
    for end in range(len(packed)):
        read = decode_namespaces(packed[:end])
        assert read == records[: len(read)]
        assert len(read) < 3
    assert records[1].scope == 0x0101010101010101
