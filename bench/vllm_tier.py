"""Figures of the vLLM tier, each beside what it should be compared with, in one run.

    PYTHON=$(tests/vllm/install.sh .venv/bin/python); PYTHONPATH=. $PYTHON bench/vllm_tier.py

Lookups and loads go through the parts of the tier with real agents, without vLLM; the time to first token is that of a real
vLLM with a tiny model, where computing is cheap: what counts there is what the tier adds. Lookups are told in wall time and in
processor time of the thread, which is the same where nothing else runs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import peer_agent
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace, StateGroup
from kvdir.testing.wait import wait_until
from peer_agent.client.buffers import BlockRows
from peer_agent.connectors.vllm.tier_lookup import Lookups, Verdict
from tests.vllm.nodes import Nodes

BLOCKS = 1024
ROUNDS = 200


def sample(block_bytes: int) -> Namespace:
    group = StateGroup(kind="full", layers=1, kv_heads=1, head_dim=64, bytes_override=block_bytes)
    return Namespace.create(
        model="bench", weights="bench", kv_dtype="float16", layout="bench", block_tokens=16, groups=(group,), position="none",
        parallel="replicated", adapter="none", hash_scheme="opaque", hash_seed="none", cache_policy="exact",
    )  # fmt: skip


def percentiles(values: list[float]) -> str:
    return " / ".join(f"{value:,.1f}" for value in np.percentile(values, [50, 99]))


def lookups(nodes: Nodes) -> None:
    """A request of 1,024 blocks that another node has: its first lookup, and each of the others."""
    namespace, names = sample(4096), Fingerprints.chain(b"%d" % number for number in range(BLOCKS))
    store(nodes, namespace, names)
    with peer_agent.connect(nodes.engine("b"), namespace=namespace) as session:
        wait_until(lambda: session.directory.lookup_here(namespace.digest, names).hits == BLOCKS, "all in the replica")
        keys = dict.fromkeys(name + bytes(4) for name in names)
        asked = Lookups({0: session}, lookup_s=0.005)
        for name, clock_ns in (("wall", time.perf_counter_ns), ("processor", time.thread_time_ns)):
            first, others = [], []
            for number in range(ROUNDS):
                request = f"request-{number}"
                began_ns = clock_ns()
                assert asked.look(request, next(iter(keys)), keys) is Verdict.HIT
                answered_ns = clock_ns()
                for key in keys:
                    asked.look(request, key, keys)
                others.append((clock_ns() - answered_ns) / 1e3 / BLOCKS)
                first.append((answered_ns - began_ns) / 1e3)
                asked.forget(request)
            print(f"lookup of {BLOCKS} blocks, {name}, us, p50 / p99: {percentiles(first)}, then each {percentiles(others)}")
        asked.close()


def loads(nodes: Nodes, block_bytes: int, blocks: int) -> None:
    """From the owner's arena into rows of a pool, beside a memcpy of as many scattered rows."""
    namespace, names = sample(block_bytes), Fingerprints.chain(b"%d/%d" % (block_bytes, number) for number in range(blocks))
    store(nodes, namespace, names)
    pool, source = np.zeros((2, blocks, block_bytes), np.uint8), None
    source, target = pool[0], pool[1]
    order = np.random.default_rng(0).permutation(blocks)
    size = blocks * block_bytes
    with peer_agent.connect(nodes.engine("b"), namespace=namespace) as session:
        wait_until(lambda: session.directory.lookup_here(namespace.digest, names).hits == blocks, "all in the replica")
        began_s = time.monotonic()
        first = session.load(names, into=BlockRows(target, order), deadline_s=10)
        peer_s = time.monotonic() - began_s
        assert first.hits == blocks, first
        local_s = best(lambda: session.load(names, into=BlockRows(target, order), deadline_s=10))
    copy_s = best(lambda: [np.copyto(target[place], source[place]) for place in order])
    print(
        f"load of {blocks} x {block_bytes >> 10} KiB: from the peer {size / peer_s / 1e9:.2f} GB/s, from this node's arena "
        f"{size / local_s / 1e9:.2f}, memcpy {size / copy_s / 1e9:.2f} ({copy_s / peer_s:.2f} and {copy_s / local_s:.2f} of it)"
    )


def best(act: Callable[[], object], rounds: int = 5) -> float:
    took = []
    for _ in range(rounds):
        began_s = time.monotonic()
        act()
        took.append(time.monotonic() - began_s)
    return min(took)


def store(nodes: Nodes, namespace: Namespace, names: Fingerprints) -> None:
    content = np.random.default_rng(1).integers(0, 256, (len(names), namespace.block_bytes), np.uint8)
    with peer_agent.connect(nodes.engine("a"), namespace=namespace) as owner:
        stored = owner.store(names, content, deadline_s=10)
        assert stored.stored == len(names), stored


def first_token(directory: Path) -> None:
    """Seconds of one generated token: computed, loaded from another node, and with the tier but nothing to load."""
    import tests.vllm.conftest  # noqa: F401  (what has to be set before vLLM is imported)
    from tests.vllm.models import make_llama
    from tests.vllm.world import World, tier

    world = World.start(directory / "world", make_llama(directory / "model"), tier)
    prompts = [prompt for prompt in world.prompts if len(prompt) >= 200]
    with world.reader() as reader:
        others = [[token + 3 for token in prompt] for prompt in prompts]
        computed = [answer.took_s for answer in reader.engine.one_by_one(others, forget=True, tokens=1)]
        answers = reader.engine.one_by_one(prompts, forget=True, tokens=1)
        loaded = [answer.took_s for answer in answers]
        assert all(answer.cached for answer in answers)
    world.close()
    print(f"first token, median ms: computed {np.median(computed) * 1e3:.1f}, loaded {np.median(loaded) * 1e3:.1f}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvdir-bench-", dir="/dev/shm") as path:
        nodes = Nodes(Path(path))
        try:
            nodes.start_coordinator()
            for node in ("a", "b"):
                nodes.start_agent(node, "--accept-bytes", "160MiB", "--accept-namespaces", "3")
            lookups(nodes)
            loads(nodes, 64 << 10, 1024)
            loads(nodes, 2 << 20, 64)
        finally:
            nodes.close()
        if "--parts" not in sys.argv:
            first_token(Path(path))


if __name__ == "__main__":
    main()
