"""An owner that cannot vouch for itself: untrusted for as long as that lasts, whatever is repaired; nothing is asked for."""

from __future__ import annotations

import pytest

from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.effects import StateChanged
from kvdir.core.event import NO_DOUBT, Doubt, Event, Heartbeat, HeartbeatFigures, OwnerCount
from kvdir.core.inspect import faults, node_views
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sender import StreamSender
from kvdir.errors import UntrustedView
from kvdir.index import Sketch, open_index
from kvdir.location import MinTrust, StreamState, Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints

DIGEST = EXAMPLE_NAMESPACE.digest
ANNOUNCED = Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes)
BLOCKS = some_fingerprints(8, width=8)
WORDS = "the engine lost events 5 to 9"
DOUBT = NO_DOUBT.begun(WORDS)


def _directory(doubt: Doubt = NO_DOUBT) -> tuple[Directory, Stream]:
    directory = Directory(open_index(seed=1), Sketch, Limits(), now_s=0.0)
    outcome = directory.hello(Hello("n1/vllm-0", 1, 0, "", 0, (ANNOUNCED,), doubt), now_s=0.0)
    assert isinstance(outcome, Welcomed)
    directory.batch(outcome.stream, 1, [Event.stored(Tier.GPU, DIGEST, BLOCKS)], now_s=0.0)
    return directory, outcome.stream


def _beat(directory: Directory, stream: Stream, doubt: Doubt, *, now_s: float, blocks: int = 8, last_seq: int = 1) -> None:
    figures = HeartbeatFigures(counts=(OwnerCount(DIGEST, Tier.GPU, blocks),))
    directory.heartbeat(stream, Heartbeat(last_seq, figures, doubt=doubt), now_s=now_s)


def test_figures_are_untrusted_with_the_reason_when_the_owner_is_in_doubt() -> None:
    directory, stream = _directory()
    _beat(directory, stream, DOUBT, now_s=1.0)
    (view,) = node_views(directory, now_s=1.0)
    assert (view.trust.state, view.trust.reason) == (StreamState.GAP, WORDS)
    with pytest.raises(UntrustedView, match=WORDS):
        view.holdings[0].blocks.require_trusted()
    assert directory.lookup(DIGEST, BLOCKS, now_s=1.0).hits == 8
    assert directory.lookup(DIGEST, BLOCKS, min_trust=MinTrust.SYNCED, now_s=1.0).hits == 0


def test_nothing_is_asked_for_when_only_a_doubt_stands_in_the_way() -> None:
    directory, stream = _directory()
    _beat(directory, stream, DOUBT, now_s=0.0)
    effects = []
    for step in range(100):
        now_s = 0.1 * step
        _beat(directory, stream, DOUBT, now_s=now_s)
        effects += directory.tick(now_s=now_s)
    assert [type(effect) for effect in effects] == [StateChanged]
    assert not directory.warming
    assert not list(faults(directory))


def test_doubt_stands_when_the_stream_is_proved_and_restated() -> None:
    _, stream = _directory(DOUBT)
    assert stream.state is StreamState.GAP
    stream.cursor.damage("an event was skipped", now_s=1.0)
    stream.cursor.proved(1, now_s=1.0)
    assert (stream.state, stream.cursor.reason) == (StreamState.GAP, WORDS)
    stream.cursor.snapshot_done(1, now_s=2.0)
    assert (stream.state, stream.cursor.complete) == (StreamState.GAP, True)


def test_trust_returns_when_the_doubt_has_ended() -> None:
    directory, stream = _directory(DOUBT)
    _beat(directory, stream, DOUBT.ended(), now_s=1.0)
    assert stream.state is StreamState.SYNCED
    assert node_views(directory, now_s=1.0)[0].holdings[0].blocks.require_trusted() == 8


def test_newer_doubt_stands_when_an_older_statement_comes_late() -> None:
    directory, stream = _directory(DOUBT)
    again = DOUBT.ended().begun("the engine lost events 20 to 21")
    for doubt in (again, DOUBT.ended(), NO_DOUBT):
        _beat(directory, stream, doubt, now_s=1.0)
    assert stream.cursor.reason == again.words


def test_contradiction_is_found_when_the_owner_is_in_doubt() -> None:
    directory, stream = _directory(DOUBT)
    _beat(directory, stream, DOUBT, now_s=1.0, blocks=7)
    assert stream.cursor.damaged
    assert directory.reconciler.contradictions == 1
    assert stream.cursor.reason.startswith(WORDS)


def test_hole_is_repaired_when_the_owner_is_in_doubt() -> None:
    directory, stream = _directory(DOUBT)
    directory.batch(stream, 3, [Event.removed(Tier.GPU, DIGEST, BLOCKS)], now_s=1.0)
    asked = [type(effect).__name__ for effect in directory.tick(now_s=1.0)]
    assert "RequestReplay" in asked
    assert stream.state is StreamState.REPAIRING
    directory.batch(stream, 2, [Event.stored(Tier.GPU, DIGEST, BLOCKS)] * 2, now_s=1.1)
    assert (stream.state, stream.cursor.complete) == (StreamState.GAP, True)


# -- the sender ------------------------------------------------------------------------------------------------------------


def _sender(events: int = 2) -> tuple[OwnerOutbox, StreamSender]:
    outbox = OwnerOutbox()
    sender = StreamSender(outbox, max_batch_events=1)
    sender.opened(resume_seq=0, hello_seq=0, credit=100)
    for _ in range(events):
        outbox.append(Event.stored(Tier.GPU, DIGEST, BLOCKS))
    return outbox, sender


def test_doubt_is_told_before_the_next_event() -> None:
    _, sender = _sender()
    assert sender.newly_in(DOUBT)
    assert sender.heartbeat(HeartbeatFigures(), DOUBT).doubt == DOUBT
    assert not sender.newly_in(DOUBT)


def test_end_of_a_doubt_is_told_only_behind_every_event() -> None:
    _, sender = _sender()
    sender.heartbeat(HeartbeatFigures(), DOUBT)
    assert sender.heartbeat(HeartbeatFigures(), DOUBT.ended()).doubt == DOUBT
    while sender.next_batch():
        pass
    assert sender.heartbeat(HeartbeatFigures(), DOUBT.ended()).doubt == DOUBT.ended()


def test_doubt_is_told_although_it_has_ended_when_events_wait_that_are_older_than_its_end() -> None:
    _, sender = _sender()
    over = DOUBT.ended()
    assert sender.newly_in(over)
    assert sender.heartbeat(HeartbeatFigures(), over).doubt == DOUBT
    assert not sender.newly_in(over)


def test_introduction_says_all_of_a_doubt() -> None:
    _, sender = _sender()
    assert sender.introduced(DOUBT.ended()) == DOUBT.ended()
    assert not sender.newly_in(DOUBT.ended())


def test_doubt_is_the_same_one_when_it_begins_again_for_the_same_reason() -> None:
    assert DOUBT.begun(WORDS) is DOUBT
    assert NO_DOUBT.ended() is NO_DOUBT
    assert DOUBT.begun("another").number == 2
