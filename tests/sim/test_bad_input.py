"""What cannot be right is refused or skipped with a counted reason, the stream says so, and the other streams go on.

Every step is also checked against the owners' truth by the cluster itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

import kvdir.client.publish_call as publish_call
from kvdir.core.admission import Hello
from kvdir.core.event import Event, SnapshotChunk
from kvdir.core.sender import StreamSender
from kvdir.core.sketches import SketchStatement
from kvdir.core.snapshot import snapshot_chunks
from kvdir.errors import Overloaded
from kvdir.index import Sketch
from kvdir.location import StreamState
from kvdir.rpc.event_codec import encode_hello
from kvdir.server.config import CoordinatorConfig
from kvdir.testing import LocalCluster
from kvdir.testing.sim.steps import garbage


def others_are_well(cluster: LocalCluster) -> None:
    assert cluster.directory.trust(1).state is StreamState.SYNCED
    assert cluster.directory.blocks(1).require_trusted() == 10


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("kind", "unknown-kind"),
        ("width", "bad-fingerprints"),
        ("tier", "unknown-tier"),
        ("namespace", "unknown-namespace"),
        ("epoch", "wrong-epoch"),
        ("zero", "bad-sequence"),
        ("nothing", "unknown-message"),
    ],
)
def test_reason_is_counted_and_the_rest_goes_on_when_a_message_makes_no_sense(kind: str, reason: str) -> None:
    with LocalCluster(nodes=2) as cluster:
        cluster.node(1).store(range(100, 110))
        cluster.settle()
        cluster.node(0).store([2])
        garbage(cluster, "0", kind)
        cluster.node(0).store([3])
        cluster.advance(0.01)
        others_are_well(cluster)
        assert cluster.directory.core.ingest.rejected == {reason: 1}
        assert cluster.directory.holders([2, 3]) == [{"node-0"}] * 2
        cluster.settle(heartbeats=5)


def test_snapshot_is_asked_for_when_a_sketch_has_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StreamSender.sketch

    def odd(self: StreamSender, request_id: int, **options: Any) -> SketchStatement | None:
        statement = real(self, request_id, **options)
        assert statement is not None
        parts = [dataclasses.replace(part, encoded=Sketch(12).encode()) for part in statement.parts]
        return dataclasses.replace(statement, parts=tuple(parts))

    monkeypatch.setattr(StreamSender, "sketch", odd)
    with LocalCluster(nodes=2) as cluster:
        cluster.node(0).store(range(20))
        cluster.node(1).store(range(100, 110))
        cluster.settle()
        cluster.node(0).lose(stored=[50])
        cluster.settle(heartbeats=6)
        failures = cluster.directory.core.reconciler.failures
        assert sum(failures.values()) == cluster.limits.repair.max_sketches
        assert cluster.directory.view(0).snapshots == 2
        others_are_well(cluster)


@pytest.mark.parametrize("lie", ["total", "early", "skipped"])
def test_nothing_changes_when_a_snapshot_contradicts_itself(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lying(snapshot_id: int, at_seq: int, entries: Iterable[Event], *, max_blocks: int) -> Iterator[SnapshotChunk]:
        for chunk in snapshot_chunks(snapshot_id, at_seq, entries, max_blocks=max_blocks):
            match lie:
                case "total":
                    yield dataclasses.replace(chunk, total_blocks=chunk.total_blocks + chunk.last)
                case "early":
                    yield dataclasses.replace(chunk, last=True, total_blocks=20)
                case "skipped" if chunk.index != 1:
                    yield chunk

    with LocalCluster(nodes=2, chunk_blocks=4) as cluster:
        cluster.node(0).store(range(20))
        cluster.node(1).store(range(100, 110))
        cluster.settle()
        monkeypatch.setattr(publish_call, "snapshot_chunks", lying)
        cluster.directory.core.want_snapshot("node-0")
        cluster.advance(10)
        refused = cluster.directory.core.counters.snapshots_refused
        assert 2 <= refused <= 7  # asked for again, ever less often
        assert cluster.directory.holders(range(20)) == [{"node-0"}] * 20
        others_are_well(cluster)
        monkeypatch.setattr(publish_call, "snapshot_chunks", snapshot_chunks)
        cluster.reconcile(0, timeout_s=30)
        cluster.settle()


def test_stream_says_so_and_is_restated_when_its_sequence_goes_backwards() -> None:
    with LocalCluster(nodes=2) as cluster:
        for block in range(5):
            cluster.node(0).store([block])
        cluster.node(1).store(range(100, 110))
        cluster.settle()
        life = cluster.node(0).life
        hello = encode_hello(
            node="node-0", epoch=life.epoch, last_seq=2, peer_address="", started_unix_ms=0, namespaces=cluster.namespaces,
            agent_version="",
        )  # fmt: skip
        cluster.network.begin_call("node-0", life.epoch, [hello])
        cluster.advance(0.01)
        assert "sequence went back to 2 inside one epoch" in cluster.directory.trust(0).reason
        assert not cluster.directory.blocks(0).trusted
        others_are_well(cluster)
        cluster.settle(heartbeats=6)
        assert cluster.directory.blocks(0).require_trusted() == 5


def test_memory_is_bounded_when_10_000_unknown_streams_come_at_once() -> None:
    config = CoordinatorConfig(max_streams=50)
    with LocalCluster(nodes=2, config=config) as cluster:
        cluster.node(1).store(range(100, 110))
        cluster.settle()
        core, refused = cluster.directory.core, 0
        for number in range(10_000):
            try:
                core.hello(Hello(f"stranger-{number}", number + 1, 0), now_s=cluster.now_s)
            except Overloaded:
                refused += 1
        assert (len(core.nodes), refused) == (50, 9_952)
        others_are_well(cluster)


def test_calls_are_refused_when_more_agents_come_than_may() -> None:
    config = CoordinatorConfig(max_streams=5)
    with LocalCluster(nodes=2, config=config, watch=False) as cluster:
        cluster.node(1).store(range(100, 110))
        cluster.settle()
        for number in range(500):
            message = encode_hello(
                node=f"stranger-{number}", epoch=number + 1, last_seq=0, peer_address="", started_unix_ms=0,
                namespaces=cluster.namespaces, agent_version="",
            )  # fmt: skip
            cluster.network.begin_call(f"stranger-{number}", number + 1, [message])
        cluster.advance(5)
        assert len(cluster.directory.core.nodes) == 5
        others_are_well(cluster)
