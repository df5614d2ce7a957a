"""What coordinators of one store know of nodes that publish to others: ages, trust, sums; and the bytes they save."""

from __future__ import annotations

from collections import Counter

import pytest

from kvdir.core.fleet import Fleet, SavedNode
from kvdir.core.namespaces import Announced, NamespaceTable
from kvdir.core.repair import RepairPolicy
from kvdir.core.shared_stream import SharedStream
from kvdir.core.store_steps import Held
from kvdir.core.stream import StreamCursor
from kvdir.core.views import ViewScope
from kvdir.location import StreamState, Tier
from kvdir.rpc.saved_codec import decode_saved, encode_saved
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE

DIGEST = EXAMPLE_NAMESPACE.digest


def _namespaces() -> NamespaceTable:
    table = NamespaceTable(limit=4)
    table.announce(Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes))
    return table


def _stream(node: str = "n", epoch: int = 7, *, now_s: float = 0.0, blocks: int = 10) -> SharedStream:
    stream = SharedStream(node, epoch, StreamCursor(RepairPolicy(), now_s=now_s), Counter())
    known = stream.namespaces[DIGEST] = _namespaces().require(DIGEST)
    stream.open(0, position=None, now_s=now_s)
    stream.holders[DIGEST, int(Tier.CPU)] = Held(1, known, int(Tier.CPU), blocks)
    return stream


def _saved(node: str = "n", epoch: int = 7, *, beat: int = 1, blocks: int = 10) -> SavedNode:
    """As another coordinator reads it."""
    stream = _stream(node, epoch, now_s=100.0, blocks=blocks)
    saved = SavedNode(view=stream.view(100.0), beat=beat, coordinator="other", exact=True, resumable=True, namespaces=(DIGEST,))
    decoded = decode_saved(encode_saved(saved, now_s=100.0))
    assert decoded is not None
    return decoded


def _fleet() -> Fleet:
    return Fleet(stale_after_s=5.0, expire_after_s=60.0)


def test_saved_node_is_read_back_as_it_was():
    saved = _saved()
    assert decode_saved(encode_saved(saved, now_s=0.0)) == saved
    assert saved.view.trust.state is StreamState.SYNCED
    assert not saved.left


@pytest.mark.parametrize("record", [b"", b"nonsense", b"\x97\x02", encode_saved(_saved(), now_s=0.0)[:-3]])
def test_record_is_no_node_when_it_is_not_whole(record: bytes):
    assert decode_saved(record) is None


def test_record_is_no_node_when_another_release_wrote_it():
    record = bytearray(encode_saved(_saved(), now_s=0.0))
    assert record[1] == 1  # version, behind the head of the array
    record[1] = 2
    assert decode_saved(bytes(record)) is None


def test_node_ages_and_is_left_out_when_nobody_saves_it_any_more():
    fleet = _fleet()
    fleet.read([(_saved(), 1, 0.5)], now_s=10.0)
    trust = fleet.trust("n", 7, 11.0)
    assert trust is not None
    assert (trust.state, trust.age_s) == (StreamState.SYNCED, 1.5)
    for now_s in (14.0, 15.0, 20.0):
        fleet.read([(_saved(), 1, now_s - 9.5)], now_s=now_s)
    stale = fleet.trust("n", 7, 20.0)
    assert stale is not None
    assert (stale.state, stale.age_s) == (StreamState.STALE, 10.5)
    assert "nor is coordinator other" in stale.reason
    (view,) = fleet.views(20.0)
    assert not view.holdings[0].blocks.trusted
    assert fleet.trust("n", 7, 80.0) is None
    assert list(fleet.orphans(limit_s=60, left_only=False, now_s=80.0)) == [("n", 1)]
    assert list(fleet.orphans(limit_s=60, left_only=True, now_s=80.0)) == []
    assert fleet.longest_gone(80.0) == ("n", 1)
    assert fleet.longest_gone(11.0) is None


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_ages_do_not_jump_when_the_store_fails_over_to_a_server_with_another_clock(skew_s: float):
    fleet = _fleet()
    fleet.read([(_saved(beat=1), 1, 0.2)], now_s=10.0)
    fleet.read([(_saved(beat=1), 1, 0.7 + skew_s)], now_s=10.5)  # not saved since: as old as it was
    trust = fleet.trust("n", 7, 10.5)
    assert trust is not None
    assert trust.age_s == pytest.approx(0.7)
    fleet.read([(_saved(beat=2), 1, 0.1 + skew_s)], now_s=11.0)  # saved since: younger than the last reading
    trust = fleet.trust("n", 7, 11.0)
    assert trust is not None
    assert trust.age_s <= 0.5
    assert trust.state is StreamState.SYNCED


def test_own_stream_counts_when_what_was_saved_is_older():
    fleet, stream = _fleet(), _stream(now_s=20.0)
    fleet.read([(_saved(epoch=6), 1, 300.0)], now_s=20.0)
    fleet.own(stream)
    assert fleet.trust("n", 7, 20.1) is not None
    assert fleet.trust("n", 6, 20.1) is None
    assert [view.trust.epoch for view in fleet.views(20.1)] == [7]
    fleet.disown(stream)
    assert fleet.trust("n", 7, 20.1) is None
    assert len(fleet) == 1
    fleet.own(stream)
    fleet.disown(stream, _saved(), token=2, saved_s=20.0)
    trust = fleet.trust("n", 7, 20.5)  # what was saved is known before it is read
    assert trust is not None
    assert trust.age_s == 0.5


def test_what_we_saved_ourselves_counts_when_the_store_was_read_before():
    fleet, stream = _fleet(), _stream()
    fleet.own(stream)
    stream.cursor.fence("it said goodbye", now_s=0.5)
    left = SavedNode(view=stream.view(0.5), beat=5, coordinator="us", exact=True, resumable=False)
    fleet.disown(stream, left, token=3, saved_s=0.5)
    fleet.read([(_saved(beat=4), 3, 0.2)], now_s=0.4)
    assert fleet.saved("n") == left
    fleet.read([(_saved(beat=1), 4, 0.0)], now_s=0.9)  # another writer's
    assert not fleet.saved("n").left  # type: ignore[union-attr]


def test_own_node_is_not_named_when_it_said_goodbye():
    fleet, stream = _fleet(), _stream()
    fleet.own(stream)
    assert fleet.trust("n", 7, 0.1) is not None
    stream.cursor.fence("it said goodbye", now_s=0.5)
    assert fleet.trust("n", 7, 0.6) is None


def test_own_node_has_to_restate_when_nobody_has_saved_it_yet():
    fleet, stream = _fleet(), SharedStream("n", 7, StreamCursor(RepairPolicy(), now_s=0.0), Counter())
    stream.open(9, position=None, now_s=0.0)
    fleet.own(stream)
    assert not fleet.restated(0.1)
    stream.cursor.snapshot_done(9, now_s=0.2)
    assert fleet.restated(0.3)


def test_sums_are_untrusted_when_one_node_is_silent():
    fleet = _fleet()
    fleet.read([(_saved("a"), 1, 0.0), (_saved("b", blocks=5), 2, 30.0)], now_s=10.0)
    sums = fleet.sums(_namespaces(), now_s=10.0)
    tier, alone = sums.find(ViewScope.TIER, "cpu"), sums.find(ViewScope.NODE, "a")
    assert tier is not None
    assert alone is not None
    assert (tier.blocks.value, tier.blocks.trusted) == (15, False)
    assert (alone.blocks.value, alone.blocks.trusted) == (10, True)
    assert alone.bytes.value == 10 * EXAMPLE_NAMESPACE.block_bytes
