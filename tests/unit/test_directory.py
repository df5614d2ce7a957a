"""The directory: epochs and fences, visibility of holders, snapshots beside what is known, feedback, ageing, warming."""

from __future__ import annotations

import pytest

from kvdir.core.answer import Lookup
from kvdir.core.directory import Directory, Hello, Limits, Refused, Welcomed
from kvdir.core.effects import Fence, RequestReplay, RequestSnapshot, SnapshotApplied, StateChanged
from kvdir.core.event import Event, Heartbeat, HeartbeatFigures, OwnerCount, SnapshotChunk
from kvdir.core.feedback import StaleReport
from kvdir.core.inspect import dump_part, faults, node_views, status_view
from kvdir.core.namespaces import Announced
from kvdir.core.node import REMEMBERED_FENCES, REMEMBERED_STORES, Stream
from kvdir.errors import InvalidInput, Overloaded, TooLarge, UnknownNamespace, UntrustedView
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch, open_index
from kvdir.location import StreamState, Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints

DIGEST = EXAMPLE_NAMESPACE.digest
ANNOUNCED = Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes)
BLOCKS = some_fingerprints(8, width=8)


def new_directory(**limits: object) -> Directory:
    return Directory(open_index(seed=1), Sketch, Limits(**limits), now_s=0.0)  # type: ignore[arg-type]


def hello(directory: Directory, node: str = "n1", epoch: int = 1, last_seq: int = 0, now_s: float = 0.0) -> Stream:
    outcome = directory.hello(Hello(node, epoch, last_seq, f"{node}:1", 0, (ANNOUNCED,)), now_s=now_s)
    assert isinstance(outcome, Welcomed)
    return outcome.stream


def stored(blocks: Fingerprints = BLOCKS, tier: Tier = Tier.CPU) -> Event:
    return Event.stored(tier, DIGEST, blocks)


def ask(directory: Directory, blocks: Fingerprints = BLOCKS, *, now_s: float = 1.0, prefix: bool = False) -> Lookup:
    return directory.lookup(DIGEST, blocks, prefix=prefix, now_s=now_s)


def runs(answer: Lookup) -> list[tuple[int, int, list[str]]]:
    names = [node.node for node in answer.nodes]
    return [(run.start, run.count, sorted(f"{names[at]}/{tier.name.lower()}" for at, tier in run.holders)) for run in answer]


def counted(blocks: int, last_seq: int) -> Heartbeat:
    return Heartbeat(last_seq, HeartbeatFigures(used_bytes=5, counts=(OwnerCount(DIGEST, Tier.CPU, blocks),)))


# -- epochs --------------------------------------------------------------------------------------------------------------


def test_old_blocks_vanish_at_once_when_a_newer_epoch_registers() -> None:
    directory = new_directory()
    old = hello(directory, epoch=9)
    directory.batch(old, 1, [stored()], now_s=0.0)
    hello(directory, epoch=3)  # a smaller number, started earlier by its own clock: order is by registration
    (fence,) = directory.take_effects()
    assert isinstance(fence, Fence)
    assert (fence.epoch, fence.newer_epoch) == (9, 3)
    assert ask(directory).hits == 0
    directory.batch(old, 2, [stored()], now_s=1.0)
    directory.snapshot_chunk(old, SnapshotChunk(1, 2, 0, (stored(),), last=True, total_blocks=8), now_s=1.0)
    assert ask(directory).hits == 0
    assert directory.ingest.rejected["fenced"] == 1
    assert not list(faults(directory))


def test_fenced_epoch_is_refused_when_it_says_hello_again() -> None:
    directory = new_directory()
    for epoch in range(1, 4):
        hello(directory, epoch=epoch)
    outcome = directory.hello(Hello("n1", 1, 0), now_s=1.0)
    assert isinstance(outcome, Refused)
    assert outcome.newer_epoch == 2
    assert "its own node name" in outcome.reason


def test_memory_of_fences_is_bounded_when_a_node_restarts_for_ever() -> None:
    directory = new_directory()
    for epoch in range(1, 3 * REMEMBERED_FENCES):
        hello(directory, epoch=epoch)
    assert len(directory.nodes["n1"].fenced) == REMEMBERED_FENCES
    assert directory.index.stats().holders == 0


def test_hello_is_refused_when_it_names_nobody() -> None:
    for bad in (Hello("", 1, 0), Hello("n1", 0, 0)):
        with pytest.raises(InvalidInput, match="node name and an epoch"):
            new_directory().hello(bad, now_s=0.0)


def test_hello_is_refused_when_there_is_no_room() -> None:
    directory = new_directory(max_streams=1)
    hello(directory, "n1")
    hello(directory, "n1", epoch=2)
    with pytest.raises(Overloaded, match="max_streams"):
        hello(directory, "n2")


def test_only_the_newest_call_speaks_for_the_stream_when_an_older_ends_late() -> None:
    directory = new_directory()
    stream = hello(directory)
    first = stream.connection
    hello(directory)
    directory.disconnected(stream, first, now_s=1.0)
    assert stream.cursor.connected
    directory.disconnected(stream, stream.connection, now_s=1.0)
    assert not stream.cursor.connected


def test_blocks_vanish_when_the_node_says_goodbye() -> None:
    directory = new_directory()
    stream = hello(directory)
    directory.batch(stream, 1, [stored()], now_s=0.0)
    directory.goodbye(stream, now_s=1.0)
    assert ask(directory).hits == 0
    assert isinstance(directory.hello(Hello("n1", 1, 1), now_s=2.0), Refused)
    assert status_view(directory, version="", coordinator="", now_s=2.0).streams_total == 0
    hello(directory, epoch=2, now_s=2.0)
    assert status_view(directory, version="", coordinator="", now_s=2.0).streams_total == 1


# -- lookups -------------------------------------------------------------------------------------------------------------


def test_runs_name_every_holder_and_tier_when_several_have_blocks() -> None:
    directory = new_directory()
    one, two = hello(directory, "n1"), hello(directory, "n2")
    directory.batch(one, 1, [stored(), stored(BLOCKS.slice(0, 2), Tier.DISK)], now_s=0.0)
    directory.batch(two, 1, [stored(BLOCKS.slice(1, 3))], now_s=0.0)
    assert runs(ask(directory)) == [
        (0, 1, ["n1/cpu", "n1/disk"]),
        (1, 1, ["n1/cpu", "n1/disk", "n2/cpu"]),
        (2, 2, ["n1/cpu", "n2/cpu"]),
        (4, 4, ["n1/cpu"]),
    ]


def test_repeated_lookup_sees_the_change_when_holders_change() -> None:
    directory = new_directory()
    one, two = hello(directory, "n1"), hello(directory, "n2")
    for stream in (one, two):
        directory.batch(stream, 1, [stored()], now_s=0.0)
    assert runs(ask(directory)) == [(0, 8, ["n1/cpu", "n2/cpu"])]
    directory.goodbye(one, now_s=1.0)
    assert runs(ask(directory)) == [(0, 8, ["n2/cpu"])]
    three = hello(directory, "n3")
    directory.batch(three, 1, [stored()], now_s=1.0)
    assert runs(ask(directory)) == [(0, 8, ["n2/cpu", "n3/cpu"])]


def test_errors_say_what_to_do_when_a_lookup_cannot_work() -> None:
    directory = new_directory(max_fingerprints=4)
    with pytest.raises(UnknownNamespace, match="none yet"):
        ask(directory)
    hello(directory)
    with pytest.raises(UnknownNamespace, match=EXAMPLE_NAMESPACE.short):
        directory.lookup(bytes(32), BLOCKS, now_s=0.0)
    with pytest.raises(TooLarge, match="max_fingerprints is 4"):
        ask(directory)


def test_node_is_flagged_then_left_out_then_forgotten_when_silent() -> None:
    directory = new_directory(stale_after_s=5.0, expire_after_s=20.0, forget_after_s=100.0)
    stream = hello(directory)
    directory.batch(stream, 1, [stored()], now_s=0.0)
    directory.disconnected(stream, stream.connection, now_s=0.0)
    directory.tick(now_s=6.0)
    (trust,) = ask(directory, now_s=6.0).nodes
    assert (trust.state, trust.age_s) == (StreamState.STALE, 6.0)
    directory.tick(now_s=21.0)
    assert ask(directory, now_s=21.0).hits == 0
    assert ask(directory, now_s=21.0, prefix=True).hits == 0
    hello(directory, last_seq=1, now_s=22.0)
    assert ask(directory, now_s=22.0).hits == 8
    directory.disconnected(stream, stream.connection, now_s=22.0)
    for second in range(22, 200, 4):  # a long step would mean that we stood still, not the node
        directory.tick(now_s=float(second))
    assert (len(directory.nodes), len(directory.namespaces), directory.index.stats().holders) == (0, 0, 0)


def test_prefix_ends_where_only_silent_nodes_go_on() -> None:
    directory = new_directory(stale_after_s=5.0, expire_after_s=20.0, forget_after_s=100.0)
    silent, lively = hello(directory, "n1"), hello(directory, "n2")
    directory.batch(silent, 1, [stored()], now_s=0.0)
    directory.batch(lively, 1, [stored(BLOCKS.slice(0, 3))], now_s=20.0)
    directory.tick(now_s=21.0)
    assert runs(ask(directory, now_s=21.0)) == [(0, 3, ["n2/cpu"])]
    assert runs(ask(directory, now_s=21.0, prefix=True)) == [(0, 3, ["n2/cpu"])]


# -- repair --------------------------------------------------------------------------------------------------------------


def test_replayed_store_does_not_bring_back_what_was_removed_later() -> None:
    directory = new_directory()
    stream = hello(directory)
    one = BLOCKS.slice(0, 1)
    removed = Event.removed(Tier.CPU, DIGEST, one)
    directory.batch(stream, 2, [removed], now_s=0.0)  # 1, the store, is missing
    directory.batch(stream, 1, [stored(one)], now_s=0.0)
    assert not stream.cursor.state.trusted  # for a moment it is back, flagged
    directory.batch(stream, 2, [removed], now_s=0.0)
    assert (ask(directory, one).hits, stream.cursor.state) == (0, StreamState.SYNCED)


def test_replay_request_covers_everything_from_the_first_hole_when_events_are_missing() -> None:
    directory = new_directory()
    stream = hello(directory)
    directory.batch(stream, 3, [stored()], now_s=0.0)
    directory.heartbeat(stream, counted(8, last_seq=5), now_s=0.0)
    asked = [effect for effect in directory.tick(now_s=0.1) if isinstance(effect, RequestReplay)]
    assert [(effect.first_seq, effect.last_seq) for effect in asked] == [(1, 5)]


def test_known_blocks_stay_when_a_snapshot_does_not_end() -> None:
    directory = new_directory()
    stream = hello(directory)
    directory.batch(stream, 1, [stored(BLOCKS.slice(0, 2))], now_s=0.0)
    directory.want_snapshot("n1")
    (request,) = [effect for effect in directory.tick(now_s=0.1) if isinstance(effect, RequestSnapshot)]
    part = SnapshotChunk(request.snapshot_id, 1, 0, (stored(BLOCKS.slice(2, 3)),))
    directory.snapshot_chunk(stream, part, now_s=0.2)
    assert runs(ask(directory)) == [(0, 2, ["n1/cpu"])]
    assert ask(directory, prefix=True).hits == 2
    hello(directory, last_seq=1, now_s=0.3)  # the call broke and came back
    directory.snapshot_chunk(stream, SnapshotChunk(request.snapshot_id, 1, 1, (), last=True, total_blocks=3), now_s=0.4)
    assert runs(ask(directory)) == [(0, 2, ["n1/cpu"])]
    assert not list(faults(directory))


def test_snapshot_replaces_everything_when_whole() -> None:
    directory = new_directory()
    stream = hello(directory)
    directory.batch(stream, 1, [stored(), stored(tier=Tier.DISK)], now_s=0.0)
    directory.want_snapshot("n1")
    (request,) = [effect for effect in directory.tick(now_s=0.1) if isinstance(effect, RequestSnapshot)]
    whole = SnapshotChunk(request.snapshot_id, 2, 0, (stored(BLOCKS.slice(7, 1)),), last=True, total_blocks=1)
    directory.snapshot_chunk(stream, whole, now_s=0.2)
    assert runs(ask(directory)) == [(7, 1, ["n1/cpu"])]
    assert [type(effect) for effect in directory.take_effects()] == [SnapshotApplied]
    assert stream.cursor.state is StreamState.SYNCED


def test_snapshots_wait_when_many_streams_need_one() -> None:
    directory = new_directory(max_snapshots=2)
    for number in range(5):
        hello(directory, f"n{number}", last_seq=9)
    assert sum(isinstance(effect, RequestSnapshot) for effect in directory.tick(now_s=0.1)) == 2
    assert sum(isinstance(effect, RequestSnapshot) for effect in directory.tick(now_s=0.2)) == 0


def test_figures_lose_trust_when_the_owner_counts_otherwise() -> None:
    directory = new_directory()
    stream = hello(directory)
    directory.batch(stream, 1, [stored()], now_s=0.0)
    directory.heartbeat(stream, counted(8, last_seq=1), now_s=1.0)
    (view,) = node_views(directory, now_s=1.0)
    assert view.holdings[0].blocks.require_trusted() == 8
    assert view.holdings[0].bytes.value == 8 * EXAMPLE_NAMESPACE.block_bytes
    directory.heartbeat(stream, counted(9, last_seq=1), now_s=2.0)
    (view,) = node_views(directory, now_s=3.0)
    with pytest.raises(UntrustedView, match="owner counts 9"):
        view.holdings[0].blocks.require_trusted()
    assert view.holdings[0].blocks.untrusted_since_s == 2.0
    assert view.used_bytes.require_trusted() == 5


def test_state_changes_are_told_once_when_they_happen() -> None:
    directory = new_directory()
    stream = hello(directory)
    changes = [effect for effect in directory.tick(now_s=0.1) if isinstance(effect, StateChanged)]
    assert [(change.before, change.after) for change in changes] == [(None, StreamState.SYNCED)]
    directory.batch(stream, 2, [stored()], now_s=0.2)
    changes = [effect for effect in directory.tick(now_s=0.3) if isinstance(effect, StateChanged)]
    assert [(change.before, change.after) for change in changes] == [(StreamState.SYNCED, StreamState.REPAIRING)]
    assert not [effect for effect in directory.tick(now_s=0.4) if isinstance(effect, StateChanged)]


# -- feedback ------------------------------------------------------------------------------------------------------------


def report(owner_seq: int, blocks: Fingerprints = BLOCKS, epoch: int = 1) -> StaleReport:
    return StaleReport("n1", epoch, owner_seq, DIGEST, Tier.CPU, blocks)


def test_newer_store_survives_when_feedback_is_older() -> None:
    directory = new_directory()
    stream = hello(directory)
    directory.batch(stream, 1, [stored(BLOCKS.slice(0, 4)), stored(BLOCKS.slice(4, 4))], now_s=0.0)
    assert directory.report_stale(report(1), now_s=1.0).removed == 4
    assert runs(ask(directory)) == [(4, 4, ["n1/cpu"])]
    assert directory.report_stale(report(1, BLOCKS.slice(4, 2)), now_s=1.0).ignored_reason == "a newer store was heard"


def test_feedback_is_ignored_when_it_is_older_than_what_is_remembered() -> None:
    directory = new_directory()
    stream = hello(directory)
    for seq in range(1, REMEMBERED_STORES + 3):
        directory.batch(stream, seq, [stored(BLOCKS.slice(0, 1))], now_s=0.0)
    assert "too old" in directory.report_stale(report(1, BLOCKS.slice(5, 1)), now_s=1.0).ignored_reason
    assert directory.report_stale(report(2, BLOCKS.slice(5, 1)), now_s=1.0).ignored_reason == ""


def test_feedback_is_ignored_when_a_snapshot_came_after_the_owner_said_absent() -> None:
    directory = new_directory()
    stream = hello(directory)
    directory.batch(stream, 1, [Event.cleared(Tier.CPU)] * 3, now_s=0.0)
    directory.want_snapshot("n1")
    (request,) = [effect for effect in directory.tick(now_s=0.1) if isinstance(effect, RequestSnapshot)]
    whole = SnapshotChunk(request.snapshot_id, 3, 0, (stored(),), last=True, total_blocks=8)
    directory.snapshot_chunk(stream, whole, now_s=0.2)
    assert "too old" in directory.report_stale(report(2), now_s=1.0).ignored_reason
    assert ask(directory).hits == 8


@pytest.mark.parametrize(("epoch", "node", "why"), [(2, "n1", "old epoch"), (1, "n9", "unknown node")])
def test_feedback_is_ignored_when_it_is_about_another_stream(epoch: int, node: str, why: str) -> None:
    directory = new_directory()
    directory.batch(hello(directory), 1, [stored()], now_s=0.0)
    wrong = StaleReport(node, epoch, 9, DIGEST, Tier.CPU, BLOCKS)
    assert directory.report_stale(wrong, now_s=1.0).ignored_reason == why
    assert ask(directory).hits == 8
    assert (directory.counters.stale_reports, directory.counters.stale_reports_ignored) == (1, 1)


def test_figure_is_in_doubt_when_a_reader_changed_it_until_the_owner_agrees() -> None:
    directory = new_directory()
    stream = hello(directory)
    directory.batch(stream, 1, [stored()], now_s=0.0)
    directory.report_stale(report(2, BLOCKS.slice(0, 1)), now_s=1.0)
    assert not node_views(directory, now_s=1.0)[0].holdings[0].blocks.trusted
    directory.heartbeat(stream, counted(7, last_seq=1), now_s=1.5)  # before the owner said "absent": proves nothing
    assert not node_views(directory, now_s=1.5)[0].holdings[0].blocks.trusted
    directory.batch(stream, 2, [Event.removed(Tier.CPU, DIGEST, BLOCKS.slice(0, 1))], now_s=2.0)
    directory.heartbeat(stream, counted(7, last_seq=2), now_s=2.5)
    assert node_views(directory, now_s=2.5)[0].holdings[0].blocks.require_trusted() == 7


# -- the whole -----------------------------------------------------------------------------------------------------------


def test_warming_ends_when_every_stream_was_restated() -> None:
    directory = new_directory(warm_up_s=1.0, warm_limit_s=30.0)
    stream = hello(directory, last_seq=5)
    (request,) = [effect for effect in directory.tick(now_s=2.0) if isinstance(effect, RequestSnapshot)]
    assert ask(directory).warming
    directory.snapshot_chunk(stream, SnapshotChunk(request.snapshot_id, 5, 0, (), last=True), now_s=2.5)
    directory.tick(now_s=2.6)
    assert not directory.warming


def test_warming_ends_at_its_limit_when_a_stream_is_never_restated() -> None:
    directory = new_directory(warm_limit_s=3.0)
    hello(directory, last_seq=5)
    directory.tick(now_s=2.9)
    assert directory.warming
    directory.tick(now_s=3.1)
    assert not directory.warming


def test_dump_is_narrowed_when_a_node_is_named() -> None:
    directory = new_directory()
    one, two = hello(directory, "n1"), hello(directory, "n2")
    directory.batch(one, 1, [stored()], now_s=0.0)
    directory.batch(two, 1, [stored(BLOCKS.slice(0, 3))], now_s=0.0)
    cursor, part = dump_part(directory, 0, max_blocks=100)
    assert (cursor, len(part.keys) // 8, part.nodes) == (0, 8, ("n1", "n2"))
    _, part = dump_part(directory, 0, max_blocks=100, node="n2")
    assert (len(part.keys) // 8, part.nodes) == (3, ("n2",))
    _, part = dump_part(directory, 0, max_blocks=100, namespace_digest=bytes(32))
    assert part.keys == b""


def test_namespaces_are_refused_when_they_cannot_be_believed() -> None:
    directory = new_directory(max_namespaces=1)
    good = ANNOUNCED
    bad = [
        Announced(bytes(32), good.canonical, good.block_bytes),
        Announced(good.digest, b"{}", good.block_bytes),
        Announced(good.digest, good.canonical, good.block_bytes + 1),
    ]
    outcome = directory.hello(Hello("n1", 1, 0, namespaces=(*bad, good)), now_s=0.0)
    assert isinstance(outcome, Welcomed)
    assert len(outcome.refused_namespaces) == 3
    assert len(directory.namespaces) == 1
    other = Announced(b"1" * 32, good.canonical, good.block_bytes)
    assert "max_namespaces" in directory.announce(outcome.stream, Hello("n1", 1, 0, namespaces=(other,)), now_s=0.0)[0]
