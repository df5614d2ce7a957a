"""The edge: errors as statuses and back, codecs there and back, what travels when this release does not know it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvdir import errors
from kvdir.core.answer import Lookup
from kvdir.core.event import Batch, Event, EventKind, Heartbeat, HeartbeatFigures, OwnerCount, SnapshotChunk
from kvdir.core.feedback import StaleReport
from kvdir.core.trust import Cumulative
from kvdir.errors import KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, StreamState, Tier
from kvdir.rpc import admin_codec, event_codec, lookup_codec
from kvdir.rpc.status import from_rpc_error, grpc_code, trailing
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints
from kvdir.v1 import common_pb2, directory_pb2

ALL_ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, KvdirError)]
DIGEST = EXAMPLE_NAMESPACE.digest


class FailedCall(grpc.RpcError):
    """What a client sees of a failed call."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata


@pytest.mark.parametrize("cls", ALL_ERRORS, ids=lambda cls: cls.__name__)
def test_error_arrives_as_what_it_was_when_it_crossed_the_wire(cls: type[KvdirError]) -> None:
    sent = cls(["one", "two"]) if cls in (errors.ConfigError, errors.NamespaceError) else cls("words")
    seen = from_rpc_error(FailedCall(grpc_code(sent), str(sent), trailing(sent)), target="h:1")
    assert (type(seen), str(seen), seen.retriable) == (cls, str(sent), sent.retriable)


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.TooLarge),
        (grpc.StatusCode.UNIMPLEMENTED, errors.RemoteProtocolError),
        (grpc.StatusCode.DATA_LOSS, KvdirError),
    ],
)
def test_plain_status_becomes_an_error_of_ours_when_the_other_side_is_not(code: Any, cls: type[KvdirError]) -> None:
    seen = from_rpc_error(FailedCall(code, ""), target="h:1")
    assert type(seen) is cls
    assert str(seen) == f"h:1: {code.name}"


def test_events_are_the_same_when_decoded() -> None:
    blocks = some_fingerprints(3)
    events = (Event.stored(Tier.CPU, DIGEST, blocks), Event.removed(Tier.GPU, DIGEST, blocks), Event.cleared(Tier.DISK))
    message = event_codec.encode_batch(5, Batch(9, events, replay=True)).batch
    assert (message.epoch, message.first_seq, message.replay) == (5, 9, True)
    assert tuple(event_codec.decode_events(message.events)) == events


def test_unknown_kind_and_tier_arrive_as_numbers_when_newer_than_we_are() -> None:
    odd = Event(77, 99, DIGEST, b"x" * 5, 5)
    assert event_codec.decode_events([event_codec.encode_event(odd)]) == [odd]


def test_heartbeat_and_chunk_are_the_same_when_decoded() -> None:
    for counts in (None, (), (OwnerCount(DIGEST, Tier.CPU, 4),)):
        heartbeat = Heartbeat(9, HeartbeatFigures(1, 2, counts, 7, 8), 3)
        assert event_codec.decode_heartbeat(event_codec.encode_heartbeat(5, heartbeat).heartbeat) == heartbeat
    entry = Event(EventKind.STORED, Tier.CPU, DIGEST, bytes(16), 16)
    chunk = SnapshotChunk(1, 2, 3, (entry,), last=True, total_blocks=1)
    assert event_codec.decode_chunk(event_codec.encode_chunk(5, chunk).snapshot) == chunk
    report = StaleReport("n", 1, 2, DIGEST, Tier.CPU, some_fingerprints(2), "r")
    assert event_codec.decode_stale_report(event_codec.encode_stale_report(report)) == report


def test_trust_is_taken_for_a_gap_when_its_state_is_unknown() -> None:
    trust = NodeTrust("n", 1, StreamState.SYNCED, "", 1.5, 2, "h:1")
    message = lookup_codec.encode_trust(trust)
    assert lookup_codec.decode_trust(message) == trust
    message.state = 42
    assert lookup_codec.decode_trust(message).state is StreamState.GAP


def test_answer_is_refused_when_it_points_outside() -> None:
    response = directory_pb2.LookupResponse(protocol_version=1, runs=bytes([0, 0, 0, 0, 9, 0, 0, 0, 7, 0, 0, 0]), asked=9)
    with pytest.raises(errors.RemoteProtocolError, match="does not fit together"):
        lookup_codec.decode_lookup(response)


def test_answer_never_looks_fresher_behind_the_wire_when_it_lags() -> None:
    behind = Lookup(b"", (), (), 0, 4, lag_s=0.0123, incomplete=True)
    read = lookup_codec.decode_lookup(lookup_codec.encode_lookup(behind))
    assert (read.lag_s, read.incomplete, read.source) == (0.013, True, "coordinator")
    fresh = lookup_codec.decode_lookup(lookup_codec.encode_lookup(Lookup(b"", (), (), 0, 4)))
    assert (fresh.lag_s, fresh.incomplete) == (0.0, False)


def test_width_is_checked_when_fingerprints_are_decoded() -> None:
    with pytest.raises(errors.InvalidInput, match="must be one of 8, 16, 32"):
        lookup_codec.decode_fingerprints(common_pb2.Fingerprints(packed=b"x" * 12, width=12))
    packed = common_pb2.Fingerprints(packed=b"x" * 16, width=8)
    assert lookup_codec.decode_fingerprints(packed) == Fingerprints(b"x" * 16, 8)


def test_ages_are_kept_when_clocks_differ() -> None:
    figure = Cumulative(4, False, as_of_s=90.0, untrusted_since_s=95.0, reason="gap")
    seen = admin_codec.decode_cumulative(admin_codec.encode_cumulative(figure, now_s=100.0), now_s=1000.0)
    assert seen == Cumulative(4, False, as_of_s=990.0, untrusted_since_s=995.0, reason="gap")
