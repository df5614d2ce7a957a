"""SGLang's storage threads when agents stop: every call ends in time, what arrives is right, and the rest is a miss."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from peer_agent.testing import sample_namespace, sglang_contract
from peer_agent.testing.processes import ProcessCluster
from peer_agent.testing.sglang_pools import FakeHostPool, page_keys, slots, storage_config

sglang_contract.use()
from peer_agent.connectors.sglang import KvdirHiCache  # noqa: E402

pytestmark = pytest.mark.slow

DEADLINE_S = 0.5
SLACK_S = 1.0
"""For a busy machine."""


@pytest.fixture
async def cluster() -> AsyncIterator[ProcessCluster]:
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path:
        made = ProcessCluster(Path(path), sample_namespace())
        try:
            yield made
        finally:
            await made.close()


async def backend(cluster: ProcessCluster, node: str, pool: FakeHostPool) -> Any:
    agent = {"agent": cluster.children[node].ready["engine"], "deadline_s": DEADLINE_S, "exists_deadline_s": DEADLINE_S}
    made = KvdirHiCache(storage_config(agent), {})
    await asyncio.to_thread(made.register_mem_pool_host, pool)
    return made


async def timed(call: Callable[..., Any], *arguments: Any) -> Any:
    began_s = time.monotonic()
    answer = await asyncio.to_thread(call, *arguments)
    assert time.monotonic() - began_s < DEADLINE_S + SLACK_S
    return answer


async def test_pages_are_misses_in_time_when_their_owner_or_this_nodes_agent_is_stopped(cluster: ProcessCluster) -> None:
    coordinator = await cluster.start_coordinator()
    for node in ("a", "b"):
        await cluster.start_agent(node, coordinator, "--accept-bytes", "1MiB", "--arena-bytes", "1MiB")
    here, there = FakeHostPool(), FakeHostPool()
    here.fill([0, 4], seed=7)
    writer, reader = await backend(cluster, "a", here), await backend(cluster, "b", there)
    names = page_keys(2)
    try:
        assert await timed(writer.batch_set_v1, names[:1], slots(here, [0])) == [True]
        end_s = time.monotonic() + 20
        while await timed(reader.batch_exists, names[:1]) != 1:
            assert time.monotonic() < end_s, "the page is never found"
        assert await timed(reader.batch_get_v1, names[:1], slots(there, [3])) == [True]
        assert there.page_bytes(12) == here.page_bytes(0)
        assert await timed(writer.batch_set_v1, names, slots(here, [0, 1])) == [True, True]
        os.kill(cluster.children["a"].pid, signal.SIGSTOP)
        assert await timed(reader.batch_get_v1, names, slots(there, [5, 6])) == [True, False]
        assert not any(there.page_bytes(24))
        os.kill(cluster.children["b"].pid, signal.SIGSTOP)
        assert await timed(reader.batch_exists, names) == 0
        assert await timed(reader.batch_get_v1, names, slots(there, [7, 8])) == [False, False]
        assert await timed(reader.batch_set_v1, names, slots(there, [7, 8])) == [False, False]
        os.kill(cluster.children["b"].pid, signal.SIGCONT)
        end_s = time.monotonic() + 20
        while await timed(reader.batch_get_v1, names[:1], slots(there, [9])) != [True]:
            assert time.monotonic() < end_s, "the agent goes on, and its page is never had again"
        assert there.page_bytes(36) == here.page_bytes(0)
    finally:
        for child in cluster.children.values():
            os.kill(child.pid, signal.SIGCONT)
        for made in (writer, reader):
            await asyncio.to_thread(made.close)
