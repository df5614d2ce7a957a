"""Orphans: judged by silence, spared by every sign of life, and dropped only when that is wanted."""

from __future__ import annotations

import pytest

from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.event import Event, Heartbeat, HeartbeatFigures
from kvdir.core.feedback import StaleReport
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.errors import Overloaded
from kvdir.index import Sketch, open_index
from kvdir.location import Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints

DIGEST = EXAMPLE_NAMESPACE.digest
ANNOUNCED = Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes)
BLOCKS = some_fingerprints(8)
LIMITS = {"stale_after_s": 5.0, "expire_after_s": 20.0, "forget_after_s": 100.0}


def new_directory(**limits: object) -> Directory:
    return Directory(open_index(seed=1), Sketch, Limits(**(LIMITS | limits)), now_s=0.0)  # type: ignore[arg-type]


def join(directory: Directory, name: str, *, now_s: float = 0.0) -> Stream:
    outcome = directory.hello(Hello(name, 1, 0, "h:1", 0, (ANNOUNCED,)), now_s=now_s)
    assert isinstance(outcome, Welcomed)
    directory.batch(outcome.stream, 1, [Event.stored(Tier.CPU, DIGEST, BLOCKS)], now_s=now_s)
    return outcome.stream


def leave(directory: Directory, *streams: Stream) -> None:
    for stream in streams:
        directory.disconnected(stream, stream.connection, now_s=0.0)


def run(directory: Directory, start: int, end: int, *, heard: tuple[Stream, ...] = ()) -> None:
    for second in range(start, end):
        for stream in heard:
            directory.heartbeat(stream, Heartbeat(1, HeartbeatFigures()), now_s=float(second))
        directory.tick(now_s=float(second))


def test_departed_node_is_forgotten_with_its_blocks_when_most_others_are_heard() -> None:
    directory = new_directory()
    gone, *rest = (join(directory, name) for name in "abc")
    leave(directory, gone)
    run(directory, 1, 100, heard=tuple(rest))
    assert set(directory.nodes) == {"a", "b", "c"}
    run(directory, 100, 103, heard=tuple(rest))
    assert set(directory.nodes) == {"b", "c"}
    assert (directory.orphans.dropped_nodes, directory.orphans.dropped_blocks) == (1, 8)
    assert "orphan" in [entry.kind for entry in directory.story.pages().of_node("a", max_entries=10)]


def test_nothing_is_forgotten_when_it_is_a_dry_run() -> None:
    directory = new_directory(forget=False)
    leave(directory, join(directory, "a"))
    run(directory, 1, 200)
    assert [(orphan.node, orphan.blocks, orphan.spared) for orphan in directory.orphans.found] == [("a", 8, "")]
    assert set(directory.nodes) == {"a"}


def test_all_are_spared_when_most_nodes_are_silent() -> None:
    directory = new_directory()
    *gone, left = (join(directory, name) for name in "abcd")
    leave(directory, *gone)
    run(directory, 1, 200, heard=(left,))
    assert len(directory.nodes) == 4
    assert all("cut off" in orphan.spared for orphan in directory.orphans.found)


def test_node_is_spared_when_a_reader_met_its_owner() -> None:
    directory = new_directory()
    gone, *rest = (join(directory, name) for name in "abc")
    leave(directory, gone)
    run(directory, 1, 90, heard=tuple(rest))
    directory.report_stale(StaleReport("a", 1, 1, DIGEST, 2, BLOCKS.slice(0, 1), "b"), now_s=90.0)
    run(directory, 90, 150, heard=tuple(rest))
    assert "a" in directory.nodes
    run(directory, 150, 200, heard=tuple(rest))
    assert "a" not in directory.nodes


def test_time_in_which_we_stood_still_is_nobodys_silence() -> None:
    directory = new_directory()
    leave(directory, join(directory, "a"))
    run(directory, 1, 50)
    directory.tick(now_s=1000.0)
    run(directory, 1001, 1099)
    assert "a" in directory.nodes
    run(directory, 1099, 1105)
    assert "a" not in directory.nodes


def test_partitioned_node_restates_everything_when_it_returns_after_being_forgotten() -> None:
    directory = new_directory()
    gone, *rest = (join(directory, name) for name in "abc")
    leave(directory, gone)
    run(directory, 1, 110, heard=tuple(rest))
    assert "a" not in directory.nodes
    back = directory.hello(Hello("a", 1, 1, "h:1", 0, (ANNOUNCED,)), now_s=110.0)
    assert isinstance(back, Welcomed)
    assert (back.resume_seq, back.stream.cursor.restated) == (0, False)
    directory.tick(now_s=110.1)
    assert back.stream.cursor.running is not None


def test_connected_node_is_never_an_orphan_however_silent() -> None:
    directory = new_directory()
    join(directory, "a")
    run(directory, 1, 300)
    assert (directory.orphans.found, set(directory.nodes)) == ((), {"a"})


def test_those_who_are_gone_make_room_when_the_table_is_full_even_in_a_dry_run() -> None:
    directory = new_directory(forget=False, max_streams=2)
    leave(directory, join(directory, "a"))
    lively = join(directory, "b")
    with pytest.raises(Overloaded):
        join(directory, "c")
    run(directory, 1, 105, heard=(lively,))
    join(directory, "c", now_s=105.0)
    assert set(directory.nodes) == {"b", "c"}
