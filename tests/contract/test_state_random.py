"""Random holdings of state groups on two nodes, some gone again: a load restores the best point there is, with right bytes."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

import numpy as np

import peer_agent
from kvdir.core.restore_points import restore_points
from kvdir.fingerprint import Fingerprints
from peer_agent.client.state import StateEngine
from peer_agent.testing import Blocks, LocalCluster, local_cluster, sample_namespace

ATTENTION = {"layers": 1, "kv_heads": 1, "head_dim": 8}
GROUPS = [
    {"kind": "full", **ATTENTION},
    {"kind": "sliding_window", "window_tokens": 33, **ATTENTION},
    {"kind": "recurrent", "layers": 1, "state_bytes": 1000},
    {"kind": "draft", **ATTENTION},
]
HYBRID = sample_namespace(groups=GROUPS, bytes_override=0)
PARTS = HYBRID.parts()
BLOCKS = 8
ROUNDS = 12


def held_at(rng: random.Random) -> list[list[int]]:
    """Per group: dense for those of which a prefix is needed, so that points are reached."""
    return [[at for at in range(BLOCKS) if rng.random() < share] for share in (0.85, 0.7, 0.5, 0.5)]


def store(engine: StateEngine, prompt: Fingerprints, held: list[list[int]]) -> None:
    chosen = [prompt.select(positions) for positions in held]
    engine.store(chosen, [Blocks(part).data(some) for part, some in zip(PARTS, chosen, strict=True)], deadline_s=10.0)


def check(cluster: LocalCluster, reader: StateEngine, rng: random.Random, prompt: Fingerprints) -> int:
    """What the nodes really hold decides. Returns the tokens restored."""
    rooms = [Blocks(part).room(prompt) for part in PARTS]
    stores = [agent.store for agent in cluster.agents.values()]
    truth = [
        np.logical_or.reduce([np.frombuffer(each.present(part.digest, prompt), np.bool_) for each in stores]) for part in PARTS
    ]
    prompt_tokens = 16 * BLOCKS - rng.choice((0, 0, 1, 20))
    best = restore_points([part.group for part in PARTS], truth, block_tokens=16, prompt_tokens=prompt_tokens)
    result = reader.load([prompt] * len(PARTS), into=rooms, prompt_tokens=prompt_tokens, deadline_s=10.0)
    assert result.restored_tokens == best.best_tokens
    for number, (part, room) in enumerate(zip(PARTS, rooms, strict=True)):
        right, needs = Blocks(part).data(prompt), result.points.needs(number)
        if part.group.kind == "draft":  # as far as the report says
            needs = range(min(len(needs), result.points.partial[number].prefix_tokens // 16))
        assert np.array_equal(room[needs.start : needs.stop], right[needs.start : needs.stop])
    return result.restored_tokens


async def test_loads_restore_the_best_point_of_what_is_there_whatever_the_directory_says() -> None:
    settings = {"namespaces": (), "accept_bytes": 1 << 18}
    rng = random.Random(20_26)
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        async with local_cluster(Path(path), "a", "b", namespace=HYBRID, **settings) as cluster:
            addresses = [agent.ready.engine for agent in cluster.agents.values()]
            engines = [
                await asyncio.to_thread(peer_agent.connect_state, address, namespace=HYBRID, timeout_s=10.0)
                for address in addresses
            ]
            restored = set[int]()
            for number in range(ROUNDS):
                prompt = Fingerprints.chain((b"%d" % at for at in range(BLOCKS)), root=b"%d" % number)
                for engine in engines:
                    await asyncio.to_thread(store, engine, prompt, held_at(rng))
                for node in cluster.agents:
                    await cluster.wait_known(node)
                for part in rng.sample(PARTS, 2):  # and no wait: the directory may still name what went
                    cluster.agents["a"].store.discard(part.digest, prompt.select([rng.randrange(BLOCKS)]))
                restored.add(await asyncio.to_thread(check, cluster, engines[1], rng, prompt))
            assert len(restored) > 3, "the rounds are to differ"
            for engine in engines:
                await asyncio.to_thread(engine.close)
