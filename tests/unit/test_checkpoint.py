"""Checkpoints: what comes back is hints, nothing that is damaged is believed, and a cut at any place is noticed."""

from __future__ import annotations

import struct
import zlib

import pytest

from kvdir.core.checkpoint import VERSION, CheckpointRefused, Head, decode_head, frames, parse
from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.event import Event
from kvdir.core.inspect import faults, node_views, status_view
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.core.restore import Restored, restore
from kvdir.errors import UntrustedView
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch, open_index
from kvdir.location import StreamState, Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints

DIGEST = EXAMPLE_NAMESPACE.digest
ANNOUNCED = Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes)
SEED = 77
BLOCKS = some_fingerprints(300)


def new_directory(seed: int = SEED, *, now_s: float = 0.0, **limits: object) -> Directory:
    return Directory(open_index(seed=seed), Sketch, Limits(**limits), now_s=now_s)  # type: ignore[arg-type]


def hello(directory: Directory, node: str, *, epoch: int = 1, last_seq: int = 0, now_s: float = 0.0) -> Stream:
    outcome = directory.hello(Hello(node, epoch, last_seq, f"{node}:1", 5, (ANNOUNCED,)), now_s=now_s)
    assert isinstance(outcome, Welcomed)
    return outcome.stream


def store(directory: Directory, stream: Stream, seq: int, blocks: Fingerprints, *, now_s: float = 0.0) -> None:
    directory.batch(stream, seq, [Event.stored(Tier.CPU, DIGEST, blocks)], now_s=now_s)


def filled() -> Directory:
    """a holds all blocks, b the first hundred, c has left; b's were stored at 40 s, and b replaced an older epoch."""
    directory = new_directory()
    store(directory, hello(directory, "a"), 1, BLOCKS)
    hello(directory, "b", epoch=8)
    store(directory, hello(directory, "b", epoch=9), 1, BLOCKS.slice(0, 100), now_s=40.0)
    gone = hello(directory, "c")
    store(directory, gone, 1, some_fingerprints(10, seed=9))
    directory.goodbye(gone, now_s=1.0)
    return directory


def written(directory: Directory, *, now_s: int = 50, page_blocks: int = 64) -> bytes:
    return b"".join(frames(directory, Head(VERSION, SEED, now_s, 0.0, "test"), page_blocks=page_blocks))


def restored(data: bytes, *, now_s: float = 1000.0, age_s: float = 5.0, **limits: object) -> tuple[Directory, Restored]:
    list(parse([data]))
    parsed = parse([data])
    head = decode_head(next(parsed)[1])
    directory = new_directory(head.seed, now_s=now_s, **limits)
    return directory, restore(directory, head, parsed, now_s=now_s, age_s=age_s)


def found(directory: Directory, blocks: Fingerprints = BLOCKS, *, now_s: float = 1000.0) -> dict[str, int]:
    answer = directory.lookup(DIGEST, blocks, now_s=now_s)
    return {answer.nodes[at].node: count for at, count in answer.coverage().items()}


def test_restored_directory_answers_at_once_and_trusts_nothing() -> None:
    directory, outcome = restored(written(filled()))
    assert (outcome.nodes, outcome.blocks, outcome.left_out) == (2, 400, 0)
    assert found(directory) == {"a": 300, "b": 100}
    directory.tick(now_s=1000.0)
    for view in node_views(directory, now_s=1000.0):
        assert view.trust.state is StreamState.GAP
        assert "checkpoint 5 s old" in view.trust.reason
        with pytest.raises(UntrustedView, match="checkpoint"):
            view.holdings[0].blocks.require_trusted()
    status = status_view(directory, version="", coordinator="", now_s=1000.0)
    assert (status.warming, status.restored_blocks) == (True, 400)
    assert not list(faults(directory))


def test_ages_of_blocks_survive_when_the_clock_starts_anew() -> None:
    directory, _ = restored(written(filled()), now_s=1000.0, age_s=5.0)
    scope = directory.namespaces.require(DIGEST).scope
    access = memoryview(directory.index.last_access(BLOCKS.packed, 32, scope=scope)).cast("I")
    assert set(access[:100]) == {1000 - 5 - 10}  # written at 50, last used at 40
    assert set(access[100:]) == {1000 - 5 - 50}
    early, _ = restored(written(filled()), now_s=3.0, age_s=5.0)
    access = memoryview(early.index.last_access(BLOCKS.packed, 32, scope=scope)).cast("I")
    assert set(access) == {0}


def test_same_epoch_is_asked_for_everything_when_it_returns() -> None:
    directory, _ = restored(written(filled()))
    outcome = directory.hello(Hello("a", 1, 1, "a:1", 5, (ANNOUNCED,)), now_s=1001.0)
    assert isinstance(outcome, Welcomed)
    assert outcome.resume_seq == 0
    directory.tick(now_s=1001.1)
    assert outcome.stream.cursor.repairing_snapshot
    assert found(directory, now_s=1001.1) == {"a": 300, "b": 100}


def test_newer_epoch_fences_what_was_restored_when_it_registers() -> None:
    directory, _ = restored(written(filled()))
    hello(directory, "a", epoch=2, now_s=1001.0)
    assert found(directory, now_s=1001.0) == {"b": 100}


def test_epoch_that_was_fenced_before_stays_fenced() -> None:
    directory, _ = restored(written(filled()))
    refused = directory.hello(Hello("b", 8, 1, "b:1", 5, (ANNOUNCED,)), now_s=1001.0)
    assert not isinstance(refused, Welcomed)
    assert found(directory) == {"a": 300, "b": 100}


def test_epoch_that_says_it_never_sent_anything_is_not_believed() -> None:
    directory, _ = restored(written(filled()))
    stream = hello(directory, "a", now_s=1001.0)
    assert stream.cursor.state is not StreamState.SYNCED
    assert not stream.cursor.restated


def test_removal_reaches_a_restored_block_before_the_node_has_restated() -> None:
    directory, _ = restored(written(filled()))
    stream = hello(directory, "a", last_seq=1, now_s=1001.0)
    directory.batch(stream, 2, [Event.removed(Tier.CPU, DIGEST, BLOCKS.slice(0, 5))], now_s=1001.0)
    assert found(directory, now_s=1001.0) == {"a": 295, "b": 100}
    assert not list(faults(directory))


def test_nodes_beyond_the_limit_are_left_out_and_counted() -> None:
    directory, outcome = restored(written(filled()), max_streams=1)
    assert (outcome.nodes, len(directory.nodes)) == (1, 1)
    assert outcome.left_out == 1


def test_directory_may_change_while_it_is_written() -> None:
    directory = filled()
    pieces = []
    for number, piece in enumerate(frames(directory, Head(VERSION, SEED, 50, 0.0, "test"), page_blocks=16)):
        pieces.append(piece)
        if number == 8:
            directory.goodbye(directory.nodes["a"].stream, now_s=50.0)  # type: ignore[arg-type]
            store(directory, hello(directory, "a", epoch=2), 1, some_fingerprints(300, seed=5))  # takes a's old number
    again, _ = restored(b"".join(pieces))
    assert found(again, some_fingerprints(300, seed=5)) == {}
    assert found(again)["b"] == 100
    assert not list(faults(again))


def test_a_cut_anywhere_is_noticed() -> None:
    data = written(filled(), page_blocks=256)
    list(parse([data[at : at + 7] for at in range(0, len(data), 7)]))
    for end in range(len(data)):
        with pytest.raises(CheckpointRefused):
            list(parse([data[:end]]))
    with pytest.raises(CheckpointRefused, match="follows"):
        list(parse([data + b"x"]))


def test_a_changed_byte_anywhere_is_noticed() -> None:
    data = written(filled(), page_blocks=256)
    for at in range(0, len(data), 3):
        damaged = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        with pytest.raises(CheckpointRefused):
            list(parse([damaged]))


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(CheckpointRefused, match="version 2, this release reads 1"):
        decode_head(b'{"version":2}')
    with pytest.raises(CheckpointRefused, match="not a checkpoint"):
        list(parse([b"GARBAGE!" * 100]))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (b"NODE", b'{"node":"x"}'),
        (b"NODE", b"[]"),
        (b"NSPC", b'{"digest":"zz","canonical":"","block_bytes":1}'),
        (b"BLKS", struct.pack("<III", 1, 1, 99) + bytes(12)),
    ],
)
def test_nonsense_with_a_right_checksum_is_refused(kind: bytes, payload: bytes) -> None:
    directory = new_directory()
    head = Head(VERSION, SEED, 0, 0.0, "")
    assert zlib.crc32(payload) >= 0
    with pytest.raises(CheckpointRefused, match="damaged"):
        restore(directory, head, [(kind, payload)], now_s=0.0, age_s=0.0)
