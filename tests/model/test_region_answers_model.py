"""A region's answers are the directory's: random lives of nodes, mirrored into a roster, and every kind of lookup compared."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvdir.core.answer import Lookup
from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.event import Event, Heartbeat, HeartbeatFigures, SnapshotChunk
from kvdir.core.feedback import StaleReport
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.core.region_directory import RegionDirectory
from kvdir.core.region_roster import CONFIRMED_STEP, HEARD_EVERY_S, RegionRoster
from kvdir.core.roster import Beat
from kvdir.fingerprint import Fingerprints
from kvdir.index import RegionReader, Sketch, create_region
from kvdir.location import MinTrust, NodeTrust, StreamState, Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints
from kvdir.testing.fake_region import FakeReader, FakeRegion

DIGEST = EXAMPLE_NAMESPACE.digest
ANNOUNCED = Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes)
BLOCKS = some_fingerprints(24)
LIMITS = Limits(stale_after_s=3.0, expire_after_s=9.0, forget_after_s=30.0, forget=True)
NAMES = ("a", "b", "c", "d")
STEPS = 120


class World:
    """A directory whose index lies in a region (path: in a file; None: a fake), and a reader of that."""

    def __init__(self, seed: int, path: Path | None = None) -> None:
        self.rng = random.Random(seed)
        self.now_s = 100.0
        self.region = FakeRegion(seed=1) if path is None else create_region(path, seed=1)
        index = self.region.index if isinstance(self.region, FakeRegion) else self.region
        self.directory = Directory(index, Sketch, LIMITS, now_s=self.now_s)
        self.directory.add_mirror(RegionRoster(self.region), now_s=self.now_s)
        self.lookup = RegionDirectory(
            FakeReader(self.region) if isinstance(self.region, FakeRegion) else RegionReader(str(path))
        )
        self.streams: dict[str, Stream] = {}
        self.seqs: dict[str, int] = {}
        self.epochs = iter(range(1, 10_000))

    def step(self) -> None:
        name = self.rng.choice(NAMES)
        stream = self.streams.get(name)
        if stream is None or stream.fenced or self.directory.nodes.get(name) is None:
            self._hello(name)
            return
        choices = [self._batch, self._batch, self._batch, self._heartbeat, self._snapshot, self._feedback, self._leave]
        self.rng.choice(choices)(name, stream)

    def pass_time(self) -> None:
        self.now_s += self.rng.choice((0.02, 0.3, 1.1, 4.0))
        self.directory.tick(now_s=self.now_s)

    def _hello(self, name: str) -> None:
        outcome = self.directory.hello(
            Hello(name, next(self.epochs), self.rng.choice((0, 3)), f"{name}:1", 0, (ANNOUNCED,)), now_s=self.now_s
        )
        assert isinstance(outcome, Welcomed)
        self.streams[name], self.seqs[name] = outcome.stream, outcome.stream.cursor.top_seq

    def _batch(self, name: str, stream: Stream) -> None:
        first = self.seqs[name] + 1 + (self.rng.random() < 0.2)
        start, count = self.rng.randrange(24), self.rng.randrange(1, 9)
        blocks, tier = BLOCKS.slice(start, count), self.rng.choice((Tier.CPU, Tier.GPU))
        kind = self.rng.random()
        if kind < 0.7:
            event = Event.stored(tier, DIGEST, blocks)
        else:
            event = Event.removed(tier, DIGEST, blocks) if kind < 0.95 else Event.cleared(tier, DIGEST)
        self.directory.batch(stream, first, [event], now_s=self.now_s)
        self.seqs[name] = first

    def _heartbeat(self, name: str, stream: Stream) -> None:
        self.directory.heartbeat(stream, Heartbeat(self.seqs[name], HeartbeatFigures()), now_s=self.now_s)

    def _snapshot(self, name: str, stream: Stream) -> None:
        if stream.intake is None:
            stream.cursor.want_snapshot()
            self.directory.tick(now_s=self.now_s)
        if stream.intake is None:
            return
        last = self.rng.random() < 0.7
        chunk = SnapshotChunk(
            stream.intake.snapshot_id, self.seqs[name], 0, (Event.stored(Tier.CPU, DIGEST, BLOCKS.slice(0, 12)),),
            last=last, total_blocks=12 if last else 0,
        )  # fmt: skip
        self.directory.snapshot_chunk(stream, chunk, now_s=self.now_s)

    def _feedback(self, name: str, stream: Stream) -> None:
        report = StaleReport(name, stream.epoch, self.seqs[name], DIGEST, Tier.CPU, BLOCKS.slice(3, 4), "somebody")
        self.directory.report_stale(report, now_s=self.now_s)

    def _leave(self, name: str, stream: Stream) -> None:
        if self.rng.random() < 0.3:
            self.directory.goodbye(stream, now_s=self.now_s)
        else:
            self.directory.disconnected(stream, stream.connection, now_s=self.now_s)


def pairs(answer: Lookup) -> dict[int, set[tuple[str, Tier]]]:
    return {
        position: {(answer.nodes[node].node, tier) for node, tier in run.holders}
        for run in answer
        for position in range(run.start, run.start + run.count)
    }


def same_trust(left: NodeTrust, right: NodeTrust) -> bool:
    return (
        (left.node, left.epoch, left.state, left.reason, left.missing_events, left.peer_address)
        == (right.node, right.epoch, right.state, right.reason, right.missing_events, right.peer_address)
        and abs(left.age_s - right.age_s) <= HEARD_EVERY_S + 0.02
        and abs(left.confirmed - right.confirmed) < CONFIRMED_STEP
    )


@pytest.mark.parametrize("kind", ["fake", "file"])
@pytest.mark.parametrize("seed", range(8))
def test_a_region_answers_as_its_directory_whatever_happened(seed: int, kind: str, tmp_path: Path) -> None:
    world = World(seed, tmp_path / "region" if kind == "file" else None)
    seen: set[StreamState] = set()
    for _ in range(STEPS):
        world.step()
        world.pass_time()
        now_ns = round(world.now_s * 1e9)
        beat = Beat(
            beat_ns=now_ns, as_of_ns=now_ns, direct=True, warming=world.directory.warming,
            stale_after_s=LIMITS.stale_after_s, expire_after_s=LIMITS.expire_after_s,
        )  # fmt: skip
        known = world.lookup.scope(DIGEST, now_ns)
        assert (known is not None) == (world.directory.namespaces.get(DIGEST) is not None)
        if known is None:
            continue
        asked = Fingerprints(BLOCKS.packed + bytes(32), 32)
        for prefix in (False, True):
            for min_trust in MinTrust:
                truth = world.directory.lookup(DIGEST, asked, prefix=prefix, min_trust=min_trust, now_s=world.now_s)
                answer, torn = world.lookup.lookup(known, asked, beat=beat, now_ns=now_ns, prefix=prefix, min_trust=min_trust)
                assert not torn
                assert not answer.fault()
                assert pairs(answer) == pairs(truth)
                assert (answer.hits, answer.asked, answer.warming) == (truth.hits, truth.asked, truth.warming)
                if not prefix:
                    assert answer.below_trust == truth.below_trust
                by_name = {node.node: node for node in truth.nodes}
                named = {answer.nodes[node].node for run in answer for node, _ in run.holders}
                for node in answer.nodes:
                    assert node.node not in named or same_trust(node, by_name[node.node]), (node, by_name[node.node])
                seen |= {node.state for node in answer.nodes}
    assert {StreamState.SYNCED, StreamState.STALE} <= seen


def test_a_node_that_is_merely_heard_again_is_written_a_few_times_a_second() -> None:
    world = World(1)
    world._hello("a")
    world.directory.tick(now_s=world.now_s)
    assert isinstance(world.region, FakeRegion)
    written = world.region.writes
    for _ in range(100):
        world.now_s += 0.01
        world.directory.heartbeat(world.streams["a"], Heartbeat(world.seqs["a"], HeartbeatFigures()), now_s=world.now_s)
        world.directory.tick(now_s=world.now_s)
    assert 1 <= world.region.writes - written <= 6
