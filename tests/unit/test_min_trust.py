"""Trust in answers: the confirmed share of a node's entries, and callers that want only nodes of a certain trust."""

from __future__ import annotations

import pytest

from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.event import Event, Heartbeat, HeartbeatFigures
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.core.sketches import OwnerSketches
from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch, open_index
from kvdir.location import MinTrust, StreamState, Tier
from kvdir.rpc.lookup_codec import decode_lookup, decode_min_trust, encode_lookup
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints

DIGEST = EXAMPLE_NAMESPACE.digest
ANNOUNCED = Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes)
BLOCKS = some_fingerprints(10)


def world() -> tuple[Directory, dict[str, Stream]]:
    """Three nodes with the same blocks: one synced, one with a hole, one silent."""
    directory = Directory(open_index(seed=1), Sketch, Limits(stale_after_s=5.0), now_s=0.0)
    streams = {}
    for name in ("synced", "holed", "silent"):
        outcome = directory.hello(Hello(name, 7, 0, namespaces=(ANNOUNCED,)), now_s=0.0)
        assert isinstance(outcome, Welcomed)
        streams[name] = outcome.stream
        directory.batch(outcome.stream, 1, [Event.stored(Tier.CPU, DIGEST, BLOCKS)], now_s=0.0)
    directory.heartbeat(streams["synced"], Heartbeat(1, HeartbeatFigures()), now_s=6.0)
    directory.heartbeat(streams["holed"], Heartbeat(3, HeartbeatFigures()), now_s=6.0)
    directory.tick(now_s=6.0)
    assert [s.cursor.state for s in streams.values()] == [StreamState.SYNCED, StreamState.REPAIRING, StreamState.STALE]
    return directory, streams


@pytest.mark.parametrize(
    ("min_trust", "named", "below"),
    [
        (MinTrust.ANY, {"synced", "holed", "silent"}, 0),
        (MinTrust.NOT_STALE, {"synced", "holed"}, 1),
        (MinTrust.SYNCED, {"synced"}, 2),
    ],
)
def test_nodes_are_left_out_and_counted_when_the_caller_wants_more_trust(
    min_trust: MinTrust, named: set[str], below: int
) -> None:
    directory, _ = world()
    answer = directory.lookup(DIGEST, BLOCKS, min_trust=min_trust, now_s=6.0)
    assert ({trust.node for trust in answer.nodes}, answer.below_trust, answer.hits) == (named, below, 10)
    assert directory.counters.lookup_nodes_below_trust == below
    assert decode_lookup(encode_lookup(answer)).below_trust == below


@pytest.mark.parametrize("prefix", [False, True])
def test_blocks_are_misses_when_nobody_left_has_them(prefix: bool) -> None:
    directory, streams = world()
    only = some_fingerprints(3, seed=5)
    directory.batch(streams["holed"], 4, [Event.stored(Tier.CPU, DIGEST, only)], now_s=6.0)
    mixed = Fingerprints(BLOCKS.packed + only.packed, 32)
    assert directory.lookup(DIGEST, mixed, prefix=prefix, now_s=6.0).hits == 13
    assert directory.lookup(DIGEST, mixed, prefix=prefix, min_trust=MinTrust.SYNCED, now_s=6.0).hits == 10
    assert directory.lookup(DIGEST, only, min_trust=MinTrust.SYNCED, now_s=6.0).hits == 0
    assert directory.lookup(DIGEST, only, now_s=6.0).hits == 3


def test_confirmed_share_falls_by_events_and_is_whole_again_when_the_digest_is_equal() -> None:
    directory, streams = world()
    stream = streams["synced"]
    sketches = OwnerSketches(Sketch)
    sketches.restate([Event.stored(Tier.CPU, DIGEST, BLOCKS)])
    assert stream.trust(6.0).confirmed == 0.0
    directory.heartbeat(stream, Heartbeat(1, HeartbeatFigures(counts=sketches.counts())), now_s=7.0)
    assert stream.trust(7.0).confirmed == 1.0
    more = Event.stored(Tier.CPU, DIGEST, some_fingerprints(30, seed=9))
    directory.batch(stream, 2, [more], now_s=8.0)
    assert stream.trust(8.0).confirmed == pytest.approx(0.25)
    sketches.apply(more)
    directory.heartbeat(stream, Heartbeat(2, HeartbeatFigures(counts=sketches.counts())), now_s=9.0)
    (trust,) = decode_lookup(encode_lookup(directory.lookup(DIGEST, BLOCKS, min_trust=MinTrust.SYNCED, now_s=9.0))).nodes
    assert trust.confirmed == 1.0


def test_request_is_refused_when_its_trust_is_unknown_here() -> None:
    assert decode_min_trust(0) is MinTrust.ANY
    assert decode_min_trust(3) is MinTrust.SYNCED
    with pytest.raises(InvalidInput, match="NOT_STALE"):
        decode_min_trust(9)
