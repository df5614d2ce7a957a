"""Figures of repair: how many differences a sketch decodes and what that costs, and how fast a snapshot is taken in.

Owns the measuring; `kvdir bench sketch` and `kvdir bench snapshot` print it. The sketch's yardsticks are the index's own
store, and a full snapshot of the same owner; bytes are those of the encoded protobuf messages, failed attempts included.
The snapshot runs through the real directory, beside the entries that it replaces. Does not: judge a figure.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.effects import RequestSketch, RequestSnapshot
from kvdir.core.event import Event, Heartbeat, HeartbeatFigures
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.core.sketches import SKETCH_CELLS, OwnerSketches
from kvdir.core.snapshot import snapshot_chunks
from kvdir.index import Sketch, open_index
from kvdir.location import Tier
from kvdir.rpc.event_codec import decode_chunk, encode_chunk, encode_sketch
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE
from kvdir.v1 import events_pb2

__all__ = ["run_sketch_bench", "run_snapshot_bench"]

WIDTH = 16
WIRE_WIDTH = 32  # what agents send; the directory keeps less
ITEMS = 1_000_000
DIFFERENCES = 700
TRIALS = 50
REPAIRED = (10, 100, 500)
BATCH_BLOCKS = 1024
CHUNK_BLOCKS = 8192
SNAPSHOT_BLOCKS = 4_000_000
ROUNDS = 3

Advance = Callable[..., None]
Blocks = npt.NDArray[np.uint64]  # shape (blocks, width / 8)
_DIGEST = EXAMPLE_NAMESPACE.digest


def run_sketch_bench(*, advance: Advance = lambda n=1.0, text=None: None) -> dict[str, Any]:
    """Decoding, updating and repairing with ITEMS blocks in one stream."""
    rng = np.random.default_rng(1)
    figures = {
        "items": ITEMS,
        "differences": DIFFERENCES,
        **_decode(rng, advance),
        **_update(rng, advance),
    }
    rows = []
    for differences in REPAIRED:
        rows.append(_repair(rng, differences))
        advance(0.3 / len(REPAIRED), f"repair of {differences}")
    return {**figures, "rows": rows}


def run_snapshot_bench(*, advance: Advance = lambda n=1.0, text=None: None) -> dict[str, Any]:
    """A snapshot of SNAPSHOT_BLOCKS blocks, taken in beside as many that it replaces."""
    blocks = _random_blocks(np.random.default_rng(2), SNAPSHOT_BLOCKS, WIDTH)
    directory, stream = _directory(blocks, expected_blocks=SNAPSHOT_BLOCKS)
    advance(0.3, "fill")
    rounds = []
    for round in range(ROUNDS):
        rounds.append(_take_in(directory, stream, blocks, now_s=10.0 * (round + 1)))
        advance(0.5 / ROUNDS, "snapshot")
    wire_s, wire_bytes = _parse(blocks)
    advance(0.2, "decode")
    core_s = median(item[0] for item in rounds)
    floor_s = median(_store_alone(blocks, with_sketch=False) for _ in range(ROUNDS))
    sketched_s = median(_store_alone(blocks, with_sketch=True) for _ in range(ROUNDS))
    return {
        "entries": SNAPSHOT_BLOCKS,
        "applied_entries_per_s": SNAPSHOT_BLOCKS / core_s,
        "store_alone_entries_per_s": SNAPSHOT_BLOCKS / floor_s,
        "store_with_sketch_entries_per_s": SNAPSHOT_BLOCKS / sketched_s,
        "decoded_and_applied_entries_per_s": SNAPSHOT_BLOCKS / (core_s + wire_s),
        "wire_bytes_per_entry": wire_bytes / SNAPSHOT_BLOCKS,
        "extra_index_bytes_ratio": max(item[1] for item in rounds),
        "extra_rss_bytes_ratio": max(item[2] for item in rounds),
        "longest_chunk_ms": max(item[3] for item in rounds) * 1e3,
        "swap_ms": median(item[4] for item in rounds) * 1e3,
    }


# -- sketch --------------------------------------------------------------------------------------------------------------


def _decode(rng: np.random.Generator, advance: Advance) -> dict[str, Any]:
    here = Sketch(SKETCH_CELLS)
    common = _random_blocks(rng, ITEMS, WIDTH)
    here.insert(_packed(common), WIDTH)
    exact, taken_s = 0, []
    encoded = b""
    for _ in range(TRIALS):
        there, ours = here.copy(), here.copy()
        mine, theirs = (_packed(_random_blocks(rng, DIFFERENCES // 2, WIDTH)) for _ in range(2))
        ours.insert(mine, WIDTH)
        there.insert(theirs, WIDTH)
        encoded = there.encode()
        begin = process_time()
        found = ours.difference(encoded)
        taken_s.append(process_time() - begin)
        exact += found is not None and [_sorted(part) for part in found] == [_sorted(mine), _sorted(theirs)]
        advance(0.3 / TRIALS, "decode")
    return {
        "decoded_exactly": exact,
        "trials": TRIALS,
        "sketch_bytes": len(encoded),
        "decode_cpu_ms": median(taken_s) * 1e3,
    }


def _update(rng: np.random.Generator, advance: Advance) -> dict[str, Any]:
    blocks = _random_blocks(rng, ITEMS, WIDTH)
    update_s, plain_s, fed_s = [], [], []
    for _ in range(ROUNDS):
        sketch = Sketch(SKETCH_CELLS)
        begin = perf_counter()
        for batch in _batches(blocks, BATCH_BLOCKS):
            sketch.insert(batch, WIDTH)
        update_s.append(perf_counter() - begin)
        plain_s.append(_store_alone(blocks, with_sketch=False))
        fed_s.append(_store_alone(blocks, with_sketch=True))
        advance(0.4 / ROUNDS, "update")
    return {
        "update_ns": median(update_s) / ITEMS * 1e9,
        "index_store_ns": median(plain_s) / ITEMS * 1e9,
        "update_to_store_ratio": median(update_s) / median(plain_s),
        "store_with_sketch_to_store_ratio": median(fed_s) / median(plain_s),
    }


def _repair(rng: np.random.Generator, differences: int) -> dict[str, Any]:
    """A directory that is silently wrong by so many blocks, until it is proved right; against a snapshot of the owner."""
    blocks = _random_blocks(rng, ITEMS, WIDTH)
    directory, stream = _directory(blocks, expected_blocks=ITEMS)
    owner = OwnerSketches(lambda: Sketch(SKETCH_CELLS))
    owner.restate([Event(1, int(Tier.CPU), _DIGEST, bytes(_packed(blocks)), WIDTH)])
    half = differences // 2
    extra, missing = _packed(_random_blocks(rng, half, WIDTH)), _packed(blocks[:half])
    directory.ingest.correct(stream, (_DIGEST, int(Tier.CPU)), bytes(missing), bytes(extra), 1.0)
    sent_bytes = tries = 0
    begin = process_time()
    for step in range(1, 10):
        directory.heartbeat(stream, Heartbeat(1, HeartbeatFigures(counts=owner.counts())), now_s=10.0 * step)
        requests = [effect for effect in directory.tick(now_s=10.0 * step) if isinstance(effect, RequestSketch)]
        if not requests:
            break
        statement = owner.statement(requests[0].request_id, 1, cells=requests[0].cells, wanted=requests[0].parts)
        assert statement is not None
        sent_bytes += encode_sketch(7, statement).ByteSize()
        tries += 1
        directory.sketch(stream, statement, now_s=10.0 * step)
    cpu_s = process_time() - begin
    assert directory.reconciler.repaired_blocks == differences
    snapshot_bytes = _snapshot_bytes()
    return {
        "differences": differences,
        "sketches": tries,
        "repair_bytes": sent_bytes,
        "snapshot_bytes": snapshot_bytes,
        "times_fewer": snapshot_bytes / sent_bytes,
        "cpu_ms": cpu_s * 1e3,
    }


def _snapshot_bytes() -> int:
    """What the owner would have to send instead: ITEMS fingerprints as agents send them."""
    packed = bytes(CHUNK_BLOCKS * WIRE_WIDTH)
    (chunk, *_) = snapshot_chunks(1, 1, [Event(1, int(Tier.CPU), _DIGEST, packed, WIRE_WIDTH)], max_blocks=CHUNK_BLOCKS)
    return encode_chunk(7, chunk).ByteSize() * ITEMS // CHUNK_BLOCKS


# -- snapshot ------------------------------------------------------------------------------------------------------------


def _directory(blocks: Blocks, *, expected_blocks: int) -> tuple[Directory, Stream]:
    """One stream that holds the blocks, synced."""
    index = open_index(seed=1, expected_blocks=expected_blocks)
    directory = Directory(index, lambda: Sketch(SKETCH_CELLS), Limits(), now_s=0.0)
    announced = Announced(_DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes)
    outcome = directory.hello(Hello("n", 7, 0, namespaces=(announced,)), now_s=0.0)
    assert isinstance(outcome, Welcomed)
    directory.batch(outcome.stream, 1, [Event(1, int(Tier.CPU), _DIGEST, bytes(_packed(blocks)), WIDTH)], now_s=0.0)
    return directory, outcome.stream


def _take_in(directory: Directory, stream: Stream, blocks: Blocks, *, now_s: float) -> tuple[float, float, float, float, float]:
    """(seconds in the core, extra index bytes, extra resident bytes, as shares; longest chunk and last chunk in seconds)"""
    directory.heartbeat(stream, Heartbeat(1, HeartbeatFigures()), now_s=now_s)
    directory.want_snapshot("n")
    (request,) = [effect for effect in directory.tick(now_s=now_s) if isinstance(effect, RequestSnapshot)]
    index_bytes, resident_bytes = directory.index.stats().bytes, _resident_bytes()
    taken_s, most_index, most_resident = [], 0, 0
    for chunk in snapshot_chunks(request.snapshot_id, 1, _entries(blocks), max_blocks=CHUNK_BLOCKS):
        if chunk.last:
            most_index, most_resident = directory.index.stats().bytes, _resident_bytes()
        begin = perf_counter()
        directory.snapshot_chunk(stream, chunk, now_s=now_s)
        taken_s.append(perf_counter() - begin)
    assert directory.counters.snapshots_refused == 0
    assert sum(holder.blocks for holder in stream.holders.values()) == len(blocks)
    directory.tick(now_s=now_s)
    return (
        sum(taken_s),
        most_index / index_bytes - 1,
        (most_resident - resident_bytes) / index_bytes,
        max(taken_s[:-1]),
        taken_s[-1],
    )


def _entries(blocks: Blocks) -> Iterator[Event]:
    for batch in _batches(blocks, CHUNK_BLOCKS):
        yield Event(1, int(Tier.CPU), _DIGEST, bytes(batch), WIDTH)


def _parse(blocks: Blocks) -> tuple[float, int]:
    """Seconds from the bytes of the messages to chunks, and those bytes."""
    taken_s, size = 0.0, 0
    for chunk in snapshot_chunks(1, 1, _entries(blocks), max_blocks=CHUNK_BLOCKS):
        message = encode_chunk(7, chunk).SerializeToString()
        size += len(message)
        begin = perf_counter()
        decode_chunk(events_pb2.PublishRequest.FromString(message).snapshot)
        taken_s += perf_counter() - begin
    return taken_s, size


def _store_alone(blocks: Blocks, *, with_sketch: bool) -> float:
    """Seconds to store the blocks in an index made for them."""
    index = open_index(seed=1, expected_blocks=len(blocks))
    sketch = Sketch(SKETCH_CELLS) if with_sketch else None
    begin = perf_counter()
    for batch in _batches(blocks, BATCH_BLOCKS):
        index.store(batch, WIDTH, scope=1, holder=0, now_s=1, sketch=sketch)
    return perf_counter() - begin


def _random_blocks(rng: np.random.Generator, count: int, width: int) -> Blocks:
    return rng.integers(0, 2**64, size=(count, width // 8), dtype=np.uint64)


def _packed(blocks: Blocks) -> memoryview:
    return np.ascontiguousarray(blocks).data.cast("B")


def _batches(blocks: Blocks, size: int) -> list[memoryview]:
    packed = _packed(blocks)
    step = size * WIDTH
    return [packed[start : start + step] for start in range(0, len(packed), step)]


def _sorted(packed: bytes | memoryview) -> list[bytes]:
    whole = bytes(packed)
    return sorted(whole[at : at + WIDTH] for at in range(0, len(whole), WIDTH))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
