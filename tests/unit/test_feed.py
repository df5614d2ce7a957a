"""The feed's log, its items, a watcher's bounds, and the credit that a copy's age follows from."""

from __future__ import annotations

import math
import os

import pytest

from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.event import Event
from kvdir.core.feed import ITEM_BLOCKS, Feed, narrow
from kvdir.core.feed_items import Item, NodeItem, Page, Removed, SnapshotEnd, Start, Stored, Welcome
from kvdir.core.feed_log import ENTRY_BYTES, FeedLog
from kvdir.core.namespaces import Announced, KnownNamespace
from kvdir.core.node import Stream
from kvdir.core.policy import Grant
from kvdir.core.replica import CreditLine
from kvdir.core.sight import Sight
from kvdir.core.watcher import MESSAGE_BYTES, MIN_CREDIT_BYTES, Watcher
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch, open_index
from kvdir.location import Tier
from kvdir.rpc.watch_codec import decode_response, encode_item, encode_response
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints

DIGEST = EXAMPLE_NAMESPACE.digest
ANNOUNCED = Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes)
NO_FILTER: frozenset[bytes] = frozenset()

# -- the log -------------------------------------------------------------------------------------------------------------


def new_log(entries: int, *, limit_bytes: int = 10**6) -> FeedLog:
    """Items b"1", b"2", ..., each under its position."""
    log = FeedLog(limit_bytes=limit_bytes, now_s=0.0)
    for number in range(1, entries + 1):
        log.append(str(number).encode())
    return log


def test_log_gives_what_follows_a_position_as_far_as_it_fits() -> None:
    log = new_log(5)
    assert log.take(0, 3) == (3, b"123")
    assert log.take(3, 100) == (5, b"45")
    assert log.take(5, 100) == (5, b"")
    assert log.take(0, 0) == (1, b"1"), "an item larger than a message would stop the feed for good"


def test_position_is_lost_when_the_log_has_let_go_of_what_follows_it() -> None:
    log = new_log(20_000, limit_bytes=10 * (ENTRY_BYTES + 5))
    assert log.head == 20_000
    assert log.bytes <= 10 * (ENTRY_BYTES + 5)
    assert log.take(19_000, 100) is None
    assert log.take(20_001, 100) is None
    assert log.take(19_998, 100) == (20_000, b"1999920000")
    assert not log.reaches(0)


def test_newest_item_stays_when_it_alone_is_beyond_the_limit() -> None:
    log = FeedLog(limit_bytes=1, now_s=0.0)
    log.append(b"a" * 100)
    log.append(b"b" * 100)
    assert log.take(1, 1000) == (2, b"b" * 100)


def test_items_of_other_namespaces_are_skipped_when_some_are_named() -> None:
    log = FeedLog(limit_bytes=10**6, now_s=0.0)
    for data, digest in ((b"1", b"x"), (b"2", b"y"), (b"3", None), (b"4", b"x")):
        log.append(data, digest)
    assert log.take(0, 100, frozenset([b"x"])) == (4, b"134")
    assert log.take(0, 100, frozenset([b"z"])) == (4, b"3")
    assert log.take(0, 100) == (4, b"1234")


def test_wait_counts_from_the_clock_before_an_item_came() -> None:
    log = FeedLog(limit_bytes=10**6, now_s=5.0)
    log.append(b"1")
    log.clock(6.0)
    log.append(b"2")
    assert log.waited_s(0, 7.0) == 2.0
    assert log.waited_s(1, 7.0) == 1.0
    assert log.waited_s(2, 7.0) == 0.0


def test_wait_is_infinite_when_the_item_was_let_go() -> None:
    assert math.isinf(new_log(100, limit_bytes=2 * (ENTRY_BYTES + 5)).waited_s(5, 1.0))


def test_no_page_is_sent_before_the_log_that_explains_it() -> None:
    told = Told()
    told.say(stored(some_fingerprints(50, width=16)))
    watcher = watch(told, message_bytes=1_000, page_blocks=1)
    assert not [item for item in one_message(watcher) if isinstance(item, Page)], "the roster goes first"
    for seed in range(1, 40):  # more than a message, about a holder that the watcher has not heard of
        told.say(stored(some_fingerprints(5, width=16, seed=seed), Tier.DISK if seed % 2 else Tier.CPU))
    messages = 0
    while watcher.position < told.feed.head:
        items, messages = one_message(watcher), messages + 1
        assert any(isinstance(item, Page) for item in items) == (watcher.position == told.feed.head)
    assert messages > 1


def test_run_that_is_still_open_waits_since_it_began() -> None:
    told = Told()
    told.say(stored(some_fingerprints(5, width=16)))
    position = told.feed.head
    told.say(stored(some_fingerprints(5, width=16, seed=1)))
    told.feed.settled(9.0)
    assert told.feed.head == position + 1
    assert told.feed.waited_s(position, 9.0) == 9.0


def test_watcher_is_told_that_it_fell_off_by_what_is_still_open() -> None:
    told = Told(limit_bytes=2_000)
    told.say(stored(some_fingerprints(5, width=16)))
    watcher = watch(told)
    everything(watcher, now_s=1.0)
    for seed in range(1, 5):  # in one run: nothing of it is in the log before somebody asks
        told.say(stored(some_fingerprints(200, width=16, seed=seed)))
    told.say(stored(some_fingerprints(5, width=16), Tier.DISK))
    told.say(stored(some_fingerprints(200, width=16, seed=9)))
    said = decode_response(watcher.next(warming=False, incomplete=False, now_s=200.0))
    assert said.end is not None
    assert said.beat is None, "a beat here would claim that nothing waits"


# -- items ---------------------------------------------------------------------------------------------------------------


class Told:
    """A directory with one node, its feed, and what the feed made of it."""

    def __init__(self, *, limit_bytes: int = 10**7, **limits: object) -> None:
        self.directory = Directory(open_index(seed=1), Sketch, Limits(**limits), now_s=0.0)  # type: ignore[arg-type]
        self.items: list[Item] = []
        self.feed = Feed(7, self._encode, limit_bytes=limit_bytes, now_s=0.0)
        self.directory.add_mirror(self.feed, now_s=0.0)
        outcome = self.directory.hello(Hello("a", 1, 0, "a:1", 0, (ANNOUNCED,)), now_s=0.0)
        assert isinstance(outcome, Welcomed)
        self.stream: Stream = outcome.stream
        self.seq = 0

    def _encode(self, item: Item) -> bytes:
        self.items.append(item)
        return encode_item(item)

    def say(self, *events: Event, now_s: float = 1.0) -> None:
        self.directory.batch(self.stream, self.seq + 1, events, now_s=now_s)
        self.seq += len(events)

    def since(self) -> list[Item]:
        """Items since the last call, with what was still open."""
        assert self.feed.head >= 0
        items, self.items = self.items, []
        return items


def stored(blocks: Fingerprints, tier: Tier = Tier.CPU) -> Event:
    return Event.stored(tier, DIGEST, blocks)


def test_the_tenant_of_a_namespace_is_known_as_long_as_the_log_speaks_of_it() -> None:
    told = Told(limit_bytes=20 * ENTRY_BYTES)
    spaces = [KnownNamespace(bytes([number]) * 32, EXAMPLE_NAMESPACE, number, 1) for number in range(1, 60)]
    for space in spaces:
        told.feed.namespace(space)
        told.feed.namespace_gone(space.digest)
    sight = Sight(Grant(frozenset(("none",))), frozenset(), told.feed.tenant_of)
    assert spaces[-1].digest in sight
    assert spaces[-9].digest in sight, "the log reaches back so far"
    assert spaces[0].digest not in sight, "what has left the log is of nobody"
    assert DIGEST in sight
    assert DIGEST not in Sight(Grant(frozenset(("salt:x",))), frozenset(), told.feed.tenant_of)
    assert DIGEST not in Sight(Grant(every=True), frozenset((bytes(32),)), told.feed.tenant_of)


def test_events_of_one_holder_become_one_item_when_they_follow_each_other() -> None:
    told = Told()
    told.say(stored(some_fingerprints(1, width=16)))
    told.since()
    for seed in range(1, 6):
        told.say(stored(some_fingerprints(10, width=16, seed=seed)))
    (item,) = told.since()
    assert isinstance(item, Stored)
    assert item.packed[:8] == some_fingerprints(10, width=16, seed=1)[0][:8]
    assert len(item.packed) == 50 * 8


def test_large_event_is_cut_into_items_that_keep_their_order() -> None:
    told, blocks = Told(), some_fingerprints(2 * ITEM_BLOCKS + 5, width=16)
    told.say(stored(blocks))
    items = [item for item in told.since() if isinstance(item, Stored)]
    assert [len(item.packed) // 8 for item in items] == [ITEM_BLOCKS, ITEM_BLOCKS, 5]
    assert b"".join(item.packed for item in items) == narrow(blocks.packed, 16)


def test_nothing_is_told_when_nothing_changes() -> None:
    told, blocks = Told(), some_fingerprints(3, width=16)
    told.say(stored(blocks))
    told.since()
    told.say(stored(blocks))
    told.say(Event.removed(Tier.CPU, DIGEST, some_fingerprints(3, width=16, seed=9)))
    assert told.since() == []
    told.say(Event.removed(Tier.CPU, DIGEST, blocks))
    assert [type(item) for item in told.since()] == [Removed]


def test_loss_of_trust_is_told_before_the_blocks_and_its_return_behind_them() -> None:
    told = Told()
    told.say(stored(some_fingerprints(1, width=16)))
    told.since()
    told.seq += 1  # an event is lost
    told.say(stored(some_fingerprints(1, width=16, seed=2)))
    assert [type(item) for item in told.since()] == [NodeItem, Stored]
    told.seq = 1
    told.say(stored(some_fingerprints(1, width=16, seed=1)), stored(some_fingerprints(1, width=16, seed=3)))
    assert [type(item) for item in told.since()] == [Stored, NodeItem]


def test_node_that_was_merely_heard_is_told_in_one_packed_item() -> None:
    told = Told()
    told.directory.tick(now_s=1.0)
    told.feed.tick(1.0)
    told.since()
    for tenth in range(1, 30):
        told.say(stored(some_fingerprints(1, width=16, seed=0)), now_s=1.0 + tenth / 10)
        told.directory.tick(now_s=1.0 + tenth / 10)
        told.feed.tick(1.0 + tenth / 10)
    kinds = [type(item).__name__ for item in told.since()]
    assert kinds.count("NodeItem") <= 1  # of the first block, what is confirmed is another share
    assert 8 <= kinds.count("Heard") <= 12


@pytest.mark.parametrize("width", [8, 16, 32])
def test_narrowing_keeps_the_first_8_bytes_of_each(width: int) -> None:
    packed = os.urandom(5 * width)
    assert narrow(packed, width) == b"".join(packed[at : at + 8] for at in range(0, len(packed), width))


# -- a watcher -----------------------------------------------------------------------------------------------------------


def watch(
    told: Told, *, credit_bytes: int = MIN_CREDIT_BYTES, stall_s: float = 5.0, now_s: float = 1.0, **sizes: int
) -> Watcher:
    welcome = Welcome(
        coordinator="c", log_id=7, seed=1, blocks=0, beat_interval_s=100.0, stale_after_s=5.0, expire_after_s=60.0
    )
    start = Start("w", credit_bytes=credit_bytes)
    index = told.directory.index
    return Watcher(told.feed, index, start, welcome, encode_response, stall_s=stall_s, now_s=now_s, **sizes)


def one_message(watcher: Watcher) -> tuple[Item, ...]:
    return decode_response(watcher.next(warming=False, incomplete=False, now_s=1.0)).items


def everything(watcher: Watcher, *, now_s: float) -> list[Item]:
    """What it says until it has nothing more to say."""
    items: list[Item] = []
    while message := watcher.next(warming=False, incomplete=False, now_s=now_s):
        items += decode_response(message).items
        if watcher.said_end:
            break
    return items


def test_watcher_stops_at_its_credit_and_is_cut_off_when_it_grants_no_more() -> None:
    told = Told()
    told.say(stored(some_fingerprints(200_000, width=16)))
    watcher = watch(told)
    items = everything(watcher, now_s=1.0)
    assert not any(isinstance(item, SnapshotEnd) for item in items)
    assert MIN_CREDIT_BYTES - MESSAGE_BYTES <= watcher.sent_bytes <= MIN_CREDIT_BYTES
    watcher.judge(5.9)
    assert watcher.ended is None
    watcher.judge(6.1)
    assert watcher.ended is not None
    assert "no credit" in watcher.ended.reason
    assert not watcher.ended.begin_anew


def test_watcher_goes_on_when_it_grants_more() -> None:
    told = Told()
    told.say(stored(some_fingerprints(200_000, width=16)))
    watcher = watch(told)
    items = everything(watcher, now_s=1.0)
    for second in range(2, 8):
        watcher.credit(watcher.sent_bytes + MIN_CREDIT_BYTES, now_s=float(second))
        items += everything(watcher, now_s=float(second))
    assert isinstance(items[-1], SnapshotEnd)
    assert items[-1].blocks == 200_000
    watcher.judge(1000.0)
    assert watcher.ended is None, "nothing waits for it, so its silence is nobody's loss"


def test_credit_that_goes_back_is_ignored() -> None:
    told = Told()
    watcher = watch(told, credit_bytes=2 * MIN_CREDIT_BYTES)
    watcher.credit(5, now_s=1.0)
    assert everything(watcher, now_s=1.0)


# -- the age of a copy ---------------------------------------------------------------------------------------------------


def test_credit_that_is_echoed_tells_when_it_was_sent() -> None:
    credit = CreditLine(1000, now_s=1.0)
    assert credit.sent_s(0) == 1.0
    credit.received(100)
    second = credit.grant(now_s=2.0)
    third = credit.grant(now_s=3.0)
    assert (second, third) == (1100, 1101)
    assert credit.sent_s(1000) == 1.0
    assert credit.sent_s(third - 1) == 2.0
    assert credit.sent_s(third) == 3.0
    assert credit.sent_s(10**9) == 3.0, "an echo of what was never granted flatters nobody"


def test_credit_is_due_when_half_of_the_window_is_used() -> None:
    credit = CreditLine(1000, now_s=1.0)
    credit.received(499)
    assert not credit.due
    credit.received(1)
    assert credit.due
    credit.grant(now_s=2.0)
    assert not credit.due


def test_beats_claim_nothing_newer_than_the_roster_while_that_is_under_way() -> None:
    told = Told(max_streams=4096)
    for number in range(3_000):
        told.directory.hello(Hello(f"node-{number}" + "x" * 80, 1, 0, "a:1", 0, (ANNOUNCED,)), now_s=1.0)
    watcher = watch(told, now_s=1.0)
    watcher.next(warming=False, incomplete=False, now_s=1.0)
    assert watcher.waited_s(4.0) == 3.0, "ages in the roster are of the moment when the watch began"
    everything(watcher, now_s=4.0)
    assert watcher.waited_s(5.0) == 0.0


def test_position_0_is_no_copy_to_go_on_from() -> None:
    told = Told()
    told.say(stored(some_fingerprints(5, width=16)))
    start = Start("w", log_id=7, position=0, credit_bytes=MIN_CREDIT_BYTES)
    welcome = Welcome(coordinator="c", log_id=7, seed=1, blocks=0, beat_interval_s=1.0, stale_after_s=5.0, expire_after_s=60.0)
    watcher = Watcher(told.feed, told.directory.index, start, welcome, encode_response, stall_s=5.0, now_s=1.0)
    assert watcher.snapshot
