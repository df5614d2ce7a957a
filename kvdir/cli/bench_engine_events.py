"""Figures of event ingest from engines: payloads as an engine sends them, decoded, counted and appended to an outbox.

Owns the measuring; `kvdir bench engine-events` prints it. In the same run: the same payloads decoded by msgspec alone
(what a naive reader pays, token ids and all), ours decoded without counting, and only split into their events. Half of what is
stored is evicted again, an event a block and before each request's stores, as vLLM does. CPU time of one thread; the ways take
turns, medians.
Does not: sockets, gRPC, or judging a figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import msgspec

from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sketches import OwnerSketches
from kvdir.engines import EngineIdentity, Residency, decode
from kvdir.engines.wire import split
from kvdir.index import Sketch

__all__ = ["run_engine_events_bench"]

BLOCK_TOKENS = 16
SHAPES = ((1, 1), (4, 8), (16, 8), (128, 1))
"""(blocks an event, stored events a batch)."""
BLOCKS = 30_000
AGE_BLOCKS = 1024
ROUNDS = 5
IDENTITY = EngineIdentity(model="bench", hash_scheme="vllm:sha256")

Advance = Callable[..., None]


def run_engine_events_bench(*, advance: Advance = lambda n=1.0, text=None: None) -> dict[str, Any]:
    """rows: per shape and hash width: blocks_per_s from payload to outbox, and of its parts and yardsticks."""
    rows = []
    for width in (8, 32):
        for blocks, events in SHAPES:
            advance(0.0, f"{blocks} blocks an event, {width}-byte hashes")
            payloads = list(_payloads(blocks, events, width))
            rows.append({"blocks_per_event": blocks, "hash_bytes": width, **_row(payloads)})
            advance(1 / (2 * len(SHAPES)))
    return {"rounds": ROUNDS, "block_tokens": BLOCK_TOKENS, "blocks_a_round": BLOCKS, "rows": rows}


def _row(payloads: list[bytes]) -> dict[str, float]:
    whole = msgspec.msgpack.Decoder()
    ways: dict[str, Callable[[list[bytes]], object]] = {
        "blocks_per_s": _ingest,
        "decode_only": lambda items: [decode("vllm", item) for item in items],
        "bare_msgspec": lambda items: [whole.decode(item) for item in items],
        "framing_only": lambda items: [split(item) for item in items],
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            begin = time.process_time()
            way(payloads)
            spent[name].append(time.process_time() - begin)
    rates = {name: 1.5 * BLOCKS / median(times) for name, times in spent.items()}  # stored, and half of them removed
    return rates | {"of_bare_msgspec": rates["blocks_per_s"] / rates["bare_msgspec"]}


def _ingest(payloads: list[bytes]) -> None:
    residency = Residency(IDENTITY)
    outbox = OwnerOutbox(sketches=OwnerSketches(Sketch))
    for payload in payloads:
        for event in residency.apply(decode("vllm", payload)).events:
            outbox.append(event)


def _payloads(blocks: int, events: int, width: int) -> Iterator[bytes]:
    encoder = msgspec.msgpack.Encoder()
    tokens = list(range(1000, 1000 + blocks * BLOCK_TOKENS))
    number = 0
    while number < BLOCKS:
        batch: list[dict[str, Any]] = []
        for _ in range(events):
            hashes = [_hash(number + step, width) for step in range(blocks)]
            # A request evicts what it needs room for, then stores: every other block of those stored a thousand blocks ago.
            batch += [
                {"type": "BlockRemoved", "block_hashes": [_hash(old, width)], "medium": "GPU", "group_idx": 0}
                for old in range(number - AGE_BLOCKS, number - AGE_BLOCKS + blocks)
                if old >= 0 and not old % 2
            ]
            batch.append(
                {
                    "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": _hash(number - 1, width),
                    "token_ids": tokens, "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None,
                    "extra_keys": [None] * blocks, "group_idx": 0, "kv_cache_spec_kind": "full_attention",
                }
            )  # fmt: skip
            number += blocks
        yield encoder.encode([1700000000.0, batch, 0])


def _hash(number: int, width: int) -> int | bytes:
    value = (number + 1) * 0x9E37_79B9_7F4A_7C15 % 2**64
    return value if width == 8 else value.to_bytes(8, "little") * 4
