"""The probe at Attach: an engine that hashes otherwise than its namespace says is refused, with what to set."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import peer_agent
from kvdir.errors import InvalidInput
from kvdir.hashing import probe
from peer_agent.client import aio
from peer_agent.testing import LocalCluster, local_cluster, sample_namespace

VLLM = sample_namespace(hash_scheme="vllm:sha256_cbor", hash_seed="builtin")


@pytest.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        async with local_cluster(Path(path), "a", coordinator=False, arena_bytes=64 << 10, namespace=VLLM) as cluster:
            yield cluster


async def refused(cluster: LocalCluster, fingerprint: bytes) -> str:
    with pytest.raises(InvalidInput) as caught:
        await aio.connect(cluster.agents["a"].ready.engine, namespace=VLLM, probe=fingerprint)
    assert cluster.agents["a"].store.sessions == 0
    return str(caught.value)


async def test_engine_attaches_when_its_probe_fits(cluster: LocalCluster):
    for fingerprint in (b"", probe("vllm:sha256_cbor", "builtin", VLLM.block_tokens)):
        async with await aio.connect(cluster.agents["a"].ready.engine, namespace=VLLM, probe=fingerprint) as engine:
            assert engine.attached


async def test_engine_is_refused_with_the_seed_to_set_when_another_fits(cluster: LocalCluster):
    words = await refused(cluster, probe("vllm:sha256_cbor", "42", VLLM.block_tokens))
    assert "without PYTHONHASHSEED" in words
    assert 'hash_seed = "42"' in words
    assert VLLM.short in words


async def test_engine_is_refused_with_the_algorithm_to_set_when_another_fits(cluster: LocalCluster):
    words = await refused(cluster, probe("vllm:sha256", "builtin", VLLM.block_tokens))
    assert "--prefix-caching-hash-algo sha256_cbor" in words


async def test_engine_is_refused_in_words_when_nothing_fits(cluster: LocalCluster):
    assert "PYTHONHASHSEED" in await refused(cluster, b"\x01" * 16)
    assert "(3 bytes)" in await refused(cluster, b"abc")


async def test_blocking_engine_is_refused_the_same_way(cluster: LocalCluster):
    def work() -> None:
        with pytest.raises(InvalidInput, match="PYTHONHASHSEED"):
            peer_agent.connect(cluster.agents["a"].ready.engine, namespace=VLLM, probe=probe("vllm:sha256_cbor", "0", 16))

    await asyncio.to_thread(work)


@pytest.mark.parametrize("scheme", ["opaque", "hashes-of-somebody"])
async def test_probe_is_not_compared_when_nobody_can_compute_the_scheme(cluster: LocalCluster, scheme: str):
    namespace = sample_namespace(hash_scheme=scheme)
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        async with (
            local_cluster(Path(path), "b", coordinator=False, arena_bytes=64 << 10, namespace=namespace) as other,
            await aio.connect(other.agents["b"].ready.engine, namespace=namespace, probe=b"\x01" * 32) as engine,
        ):
            assert engine.attached
