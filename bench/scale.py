"""How large it gets: docs/scale.md's tables, derived from measured parts for 10, 100, 1,000 and 10,000 nodes.

    .venv/bin/python bench/scale.py              the tables, from the parts below
    .venv/bin/python bench/scale.py --measure    measures again what this script can measure, beside the parts below
    .venv/bin/python bench/scale.py --write      puts the tables into docs/scale.md (a test holds that page against them)

A part is one number with its source: a command that measures it, or the message or layout that it follows from. Those of other
benches name them; put a new figure here and write the page again. Does not: guess anything that is not in LOAD.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.event import Event, Heartbeat, HeartbeatFigures, OwnerCount
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.index import Sketch, open_index
from kvdir.location import Tier
from kvdir.rpc.event_codec import encode_event, encode_heartbeat
from kvdir.testing.fake_node import some_fingerprints
from kvdir.testing.sim_node import SimNode
from kvdir.testing.simulate import trace_namespace

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
MARK = "<!-- {name}: bench/scale.py -->"
FLEETS = (10, 100, 1_000, 10_000)


@dataclass(frozen=True, slots=True)
class Part:
    """One number. source: what gives it again."""

    value: float
    unit: str
    source: str


LOAD = {
    "blocks_held": Part(100_000, "blocks a node holds", "200 GiB of memory, 2 MiB a block"),
    "copies": Part(2, "nodes that hold a block", "shared prompts; more copies cost nothing in the index"),
    "changes": Part(100, "blocks a node stores a second, and as many removed", "3,200 tokens/s prefilled that were not cached"),
    "event_blocks": Part(32, "blocks an event", "an agent's batch of one request"),
    "lookups": Part(5, "lookups of 1,024 blocks a node makes a second", "requests a node takes"),
    "gaps": Part(1, "gaps a node and hour that need a sketch", "a queue that overflows"),
    "restarts": Part(1, "restarts a node and day", "rollouts"),
}

PARTS = {
    "index_block": Part(24, "bytes of the index a block, at most", "`kvdir bench index`, docs/adr/0001"),
    "holder_bytes": Part(
        75_000, "bytes of a coordinator a node and namespace", "`bench/scale.py --measure`: 24 kB sketch, 45 kB stores"
    ),
    "heartbeat_bytes": Part(83, "bytes of a heartbeat, one namespace", "`bench/scale.py --measure`"),
    "event_overhead": Part(46, "bytes of an event beside 16 a block", "`bench/scale.py --measure`"),
    "framing": Part(24, "bytes of framing a message", "5 of gRPC, 9 of HTTP/2, 10 of the envelope"),
    "heartbeat_us": Part(15, "us of a core a heartbeat costs the directory", "`bench/scale.py --measure`, busy machine"),
    "message_us": Part(
        71, "us of a core a message costs in Python gRPC", "as a lookup over LookupStream, which is little else"
    ),
    "tick_us": Part(0.3, "us of a core a node and tick, 20 a second", "`bench/scale.py --measure`, busy machine"),
    "ingest_us": Part(90, "us of a core an event of 128 blocks", "`kvdir bench ingest`: 1.4 M blocks a CPU-second"),
    "unary_us": Part(282, "us of a server core a unary lookup", "`kvdir bench lookup`, docs/adr/0012"),
    "stream_us": Part(71, "us of a server core a lookup over LookupStream", "`kvdir bench lookup`, docs/adr/0012"),
    "replica_us": Part(19, "us of the node's core a lookup in its replica", "`kvdir bench replica`, docs/replica.md"),
    "feed_block": Part(
        8, "bytes of the feed a changed block", "docs/replica.md; framing is under a tenth at 32 blocks an event"
    ),
    "redis_block": Part(19, "bytes of the masters a block with one holder", "`kvdir bench redis`, docs/redis.md"),
    "redis_holder": Part(4, "bytes of the masters a further holder", "`kvdir bench redis`, docs/redis.md"),
    "sketch_bytes": Part(3_192, "bytes of a sketch for up to 100 differences", "`kvdir bench sketch`"),
    "snapshot_block": Part(16, "bytes of a snapshot a block", "`kvdir bench snapshot`"),
    "snapshot_rate": Part(
        100e6, "bytes of snapshots a core takes in a second", "`kvdir bench snapshot`: 117 MB/s, busy machine"
    ),
    "snapshots_per_s": Part(
        80, "snapshots asked for a second: max_snapshots (4) a tick of 50 ms", "`bench/fleet.py`: 1,000 in 10 s"
    ),
}


def value(name: str) -> float:
    return (LOAD.get(name) or PARTS[name]).value


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. of: a fleet's size to what stands there. formula: in words."""

    name: str
    of: Callable[[int], str]
    formula: str


def rows() -> Iterator[Row]:
    """What a fleet of n nodes costs, line by line."""
    yield Row("distinct blocks", lambda n: _count(_distinct(n)), "n x held / copies")
    yield Row("**memory** of a coordinator", lambda n: _bytes(_memory(n)), "distinct x 24 + n x 75 kB")
    yield Row("of a replica, on every node", lambda n: _bytes(_distinct(n) * value("index_block")), "distinct x 24")
    yield Row("of Redis masters, 1 replica each on top", lambda n: _bytes(_redis(n)), "distinct x (19 + 4 x (copies - 1))")
    yield Row("**events** into each coordinator", lambda n: f"{_count(_events(n))}/s", "n x 2 x changes / blocks an event")
    yield Row(
        "bandwidth of it, heartbeats included",
        lambda n: f"{_bytes(_event_bytes(n))}/s",
        "n x (2 x changes x 16 + 107) + events x 70",
    )
    yield Row("cores for it", lambda n: _cores(_event_us(n)), "events x 90 us + n x (15 + 71 + 20 x 0.3) us")
    yield Row("shards by namespace, as one process takes events", lambda n: f"{_shards(n)}", "cores / 0.7, rounded up")
    yield Row("**feed** to one replica", lambda n: f"{_bytes(_feed(n))}/s", "n x 2 x changes x 8")
    yield Row("feed to all n replicas, over all coordinators", lambda n: f"{_bytes(n * _feed(n))}/s", "n x that")
    yield Row("**lookups**", lambda n: f"{_count(n * value('lookups'))}/s", "n x 5")
    yield Row("cores for them, unary", lambda n: _cores(n * value("lookups") * value("unary_us")), "x 282 us")
    yield Row("cores for them, LookupStream", lambda n: _cores(n * value("lookups") * value("stream_us")), "x 71 us")
    yield Row(
        "of a node's core, in its replica", lambda n: f"{value('lookups') * value('replica_us') / 1e4:.2g} %", "5 x 19 us"
    )
    yield Row("**repair** by sketches", lambda n: f"{_bytes(_sketches(n))}/s", "n x gaps / 3,600 x 3,192")
    yield Row("by snapshots, of restarts", lambda n: f"{_bytes(_snapshots(n))}/s", "n x restarts / 86,400 x held x 16")
    yield Row("a coordinator that restarts with nothing takes in", lambda n: _bytes(n * _snapshot_bytes()), "n x held x 16")
    yield Row(
        "and needs, at the default `max_snapshots`",
        lambda n: _seconds(_warming(n)),
        "the longer of n / 80 and bytes / 100 MB/s",
    )


def _distinct(n: int) -> float:
    return n * value("blocks_held") / value("copies")


def _memory(n: int) -> float:
    return _distinct(n) * value("index_block") + n * value("holder_bytes")


def _redis(n: int) -> float:
    return _distinct(n) * (value("redis_block") + value("redis_holder") * (value("copies") - 1))


def _events(n: int) -> float:
    return n * 2 * value("changes") / value("event_blocks")


def _event_bytes(n: int) -> float:
    framing = value("framing")
    beats = n * (value("heartbeat_bytes") + framing)
    return n * 2 * value("changes") * 16 + beats + _events(n) * (value("event_overhead") + framing)


def _event_us(n: int) -> float:
    return _events(n) * value("ingest_us") + n * (value("heartbeat_us") + value("message_us") + 20 * value("tick_us"))


def _shards(n: int) -> int:
    return math.ceil(_event_us(n) / 1e6 / 0.7)


def _feed(n: int) -> float:
    return n * 2 * value("changes") * value("feed_block")


def _sketches(n: int) -> float:
    return n * value("gaps") / 3600 * value("sketch_bytes")


def _snapshot_bytes() -> float:
    return value("blocks_held") * value("snapshot_block")


def _snapshots(n: int) -> float:
    return n * value("restarts") / 86_400 * _snapshot_bytes()


def _warming(n: int) -> float:
    return max(n / value("snapshots_per_s"), n * _snapshot_bytes() / value("snapshot_rate"))


def _count(number: float) -> str:
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _bytes(number: float) -> str:
    return f"{_count(number)}B" if number >= 1000 else f"{number:.3g} B"


def _cores(us: float) -> str:
    return f"{us / 1e6:.2g}"


def _seconds(number: float) -> str:
    return f"{number:.2g} s" if number < 120 else f"{number / 60:.2g} min"


def tables() -> dict[str, str]:
    """The generated parts of docs/scale.md, by the name of their mark."""
    head = "| " + " | ".join(["a fleet of", *(f"{n:,}" for n in FLEETS), "how"]) + " |\n|---" + "|---:" * len(FLEETS) + "|---|"
    derived = [f"| {row.name} | " + " | ".join(row.of(n) for n in FLEETS) + f" | {row.formula} |" for row in rows()]
    parts = ["| part | | from |\n|---|---:|---|"]
    parts += [f"| {part.unit} | {part.value:,g} | {part.source} |" for part in (*LOAD.values(), *PARTS.values())]
    return {"derived": "\n".join([head, *derived]), "parts": "\n".join(parts)}


def page(text: str) -> str:
    """docs/scale.md with its tables as they are derived now."""
    for name, table in tables().items():
        mark = MARK.format(name=name)
        before, _, rest = text.partition(mark)
        _, _, after = rest.partition(mark)
        text = f"{before}{mark}\n{table}\n{mark}{after}"
    return text


# -- measuring ---------------------------------------------------------------------------------------------------------------

MEASURED_NODES = 1_000
MEASURED_EVENTS = 64  # as many stores of a stream as a coordinator remembers
EVENT_BLOCKS = 32


def measure() -> dict[str, float]:
    """What this script can measure: memory, time and bytes of a node at a coordinator, without gRPC."""
    namespace = trace_namespace()
    announced = Announced(namespace.digest, namespace.canonical().encode(), namespace.block_bytes)
    index = open_index(seed=1, expected_blocks=MEASURED_EVENTS * EVENT_BLOCKS)
    directory = Directory(index, Sketch, Limits(max_streams=2 * MEASURED_NODES), now_s=0.0)
    before = _resident_bytes() - index.stats().bytes
    streams = [_introduce(directory, announced, number) for number in range(MEASURED_NODES)]
    held_bytes = (_resident_bytes() - index.stats().bytes - before) / MEASURED_NODES
    node = SimNode("node", 1, namespace_digest=namespace.digest, capacity_blocks=100_000)
    node.opened(0)
    node.store(range(50_000))
    list(node.batches())
    beat = node.heartbeat()
    event = Event.stored(Tier.CPU, namespace.digest, some_fingerprints(EVENT_BLOCKS))
    return {
        "holder_bytes": held_bytes,
        "heartbeat_us": _heartbeat_us(directory, streams),
        "tick_us": _tick_us(directory),
        "heartbeat_bytes": len(encode_heartbeat(2**63, beat).SerializeToString()),
        "event_overhead": len(encode_event(event).SerializeToString()) - 16 * EVENT_BLOCKS,
    }


def _introduce(directory: Directory, announced: Announced, number: int) -> Stream:
    welcomed = directory.hello(Hello(f"node-{number:05d}", number + 1, 0, "host:7411", namespaces=(announced,)), now_s=0.0)
    assert isinstance(welcomed, Welcomed)
    for seq in range(1, MEASURED_EVENTS + 1):
        blocks = some_fingerprints(EVENT_BLOCKS, seed=seq, width=16)  # the same at every node
        directory.batch(welcomed.stream, seq, [Event.stored(Tier.CPU, announced.digest, blocks)], now_s=0.0)
    return welcomed.stream


def _heartbeat_us(directory: Directory, streams: list[Stream]) -> float:
    (holder,) = streams[0].holders.values()
    counts = (OwnerCount(holder.namespace.digest, holder.tier, holder.blocks, holder.sketch.digest),)
    beat = Heartbeat(MEASURED_EVENTS, HeartbeatFigures(counts=counts))
    began_s = time.process_time()
    for now_s in range(1, 11):
        for stream in streams:
            directory.heartbeat(stream, beat, now_s=float(now_s))
    return (time.process_time() - began_s) / 10 / len(streams) * 1e6


def _tick_us(directory: Directory) -> float:
    directory.tick(now_s=10.0)
    began_s = time.process_time()
    for number in range(50):
        directory.tick(now_s=10.0 + number / 20)
    return (time.process_time() - began_s) / 50 / len(directory.nodes) * 1e6


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure what this script can, beside the parts in it")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale.md")
    options = parser.parse_args()
    if options.measure:
        for name, found in measure().items():
            print(f"{name:20} {found:12,.1f}   in the page: {PARTS[name].value:,g} {PARTS[name].unit}")
    elif options.write:
        PAGE.write_text(page(PAGE.read_text()))
    else:
        print("\n\n".join(tables().values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
