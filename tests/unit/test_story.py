"""Stories: bounded, found by node or by block, and without cost per block."""

from __future__ import annotations

from kvdir.core.effects import Fence, RequestReplay, StateChanged
from kvdir.core.event import Event
from kvdir.core.feedback import Feedback, StaleReport
from kvdir.core.story import Kind, Story
from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState, Tier
from kvdir.testing.fake_node import some_fingerprints

DIGEST = bytes(32)
BLOCKS = some_fingerprints(50)


def kinds(entries: list) -> list[str]:  # type: ignore[type-arg]
    return [str(entry.kind) for entry in entries]


def test_block_has_its_own_events_when_asked_by_fingerprint() -> None:
    story = Story()
    story.note(0.0, "a", 1, Kind.REGISTERED, "at h:1")
    story.batch(
        1.0, "a", 1, 1, [Event.stored(Tier.CPU, DIGEST, BLOCKS), Event.stored(Tier.DISK, DIGEST, BLOCKS.slice(0, 1))], 0
    )
    story.batch(2.0, "b", 5, 7, [Event.stored(Tier.CPU, DIGEST, BLOCKS.slice(1, 9))], 0)
    story.batch(3.0, "a", 1, 3, [Event.removed(Tier.CPU, DIGEST, BLOCKS.slice(0, 2))], 1)
    story.effect(4.0, Fence("a", 1, 2, "replaced"))
    entries = story.pages().of_block(BLOCKS[0], max_entries=100)
    assert kinds(entries) == ["registered", "stored", "stored", "removed", "fenced"]
    assert [entry.seq for entry in entries] == [0, 1, 2, 3, 0]
    assert "known already" in entries[3].words
    assert kinds(story.pages().of_block(BLOCKS[5][:8], max_entries=100)) == ["registered", "stored", "stored", "fenced"]
    assert story.pages().of_block(some_fingerprints(1, seed=9)[0], max_entries=100) == []


def test_bytes_that_lie_across_two_fingerprints_are_no_block() -> None:
    story = Story()
    story.batch(1.0, "a", 1, 1, [Event(1, 2, DIGEST, BLOCKS.packed, 32)], 0)
    assert story.pages().of_block(BLOCKS.packed[16:48], max_entries=10) == []


def test_node_has_notes_and_batches_in_order_when_asked_by_name() -> None:
    story = Story()
    story.batch(1.0, "a", 1, 1, [Event.stored(Tier.CPU, DIGEST, BLOCKS)] * 2, 0)
    story.effect(2.0, StateChanged("a", 1, StreamState.SYNCED, StreamState.GAP, "2 events missing"))
    story.effect(2.5, RequestReplay("a", 1, 3, 4))
    story.note(3.0, "b", 1, Kind.REGISTERED, "")
    entries = story.pages().of_node("a", max_entries=10)
    assert kinds(entries) == ["events", "state", "repair"]
    assert entries[0].words == "events 1 to 2: stored 100"
    assert kinds(story.pages().of_node("a", max_entries=1)) == ["repair"]
    assert story.pages().of_node("nobody", max_entries=10) == []


def test_feedback_is_in_the_story_of_the_blocks_it_names() -> None:
    story = Story()
    report = StaleReport("a", 1, 5, DIGEST, 2, BLOCKS.slice(0, 2), "reader")
    story.feedback(1.0, report, Feedback(0, "old epoch"))
    (entry,) = story.pages().of_block(BLOCKS[1], max_entries=10)
    assert (entry.kind, "old epoch" in entry.words) == ("feedback", True)


def test_log_stays_within_its_bounds_and_says_how_far_it_reaches() -> None:
    story = Story(max_notes=10, max_batches=10, max_bytes=4 * 16 * len(BLOCKS))
    assert story.reaches_back_s(100.0) == 0.0
    for number in range(50):
        story.batch(float(number), "a", 1, number + 1, [Event.stored(Tier.CPU, DIGEST, BLOCKS)], 0)
    assert len(story.pages().of_node("a", max_entries=100)) == 4
    assert story.reaches_back_s(100.0) == 100.0 - 45.0
    for number in range(50):
        story.batch(float(number + 50), "a", 1, number + 51, [Event.removed(Tier.CPU, DIGEST, Fingerprints(b"", 32))], 0)
    assert len(story.pages().of_node("a", max_entries=100)) == 10
