"""A coordinator's quota and real agents: blocks really go, those in use stay, and what stays has the right bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdir.testing.wait import eventually
from peer_agent.testing import local_cluster


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


async def test_quota_is_kept_over_two_agents_and_pinned_blocks_stay(directory: Path) -> None:
    async with local_cluster(directory, coordinator=False) as cluster:
        block_bytes = cluster.namespace.block_bytes
        await cluster.start_coordinator(
            quota=(f"{cluster.namespace.tenant}={30 * block_bytes}",), quota_enforce=True, quota_interval_s=0.1
        )
        await cluster.start_agent("a")
        await cluster.start_agent("b")
        chains = {"a": cluster.blocks.chain(20), "b": cluster.blocks.chain(20, root="other")}
        engines = {node: await cluster.engine(node) for node in chains}
        pinned = chains["a"].slice(0, 8)
        for node, chain in chains.items():
            assert (await engines[node].store(chain, cluster.blocks.data(chain))).stored == 20
        await engines["a"].pin(pinned, pin_s=60)

        def held() -> int:
            return sum(item.committed for agent in cluster.agents.values() for item in agent.store.occupancy())

        coordinator = cluster.coordinator
        assert coordinator is not None
        await eventually(lambda: held() == 30, what="the excess is gone")
        await eventually(lambda: coordinator.quotas.watched[0].verdict == "within")
        assert coordinator.quotas.watched[0].evicted_blocks == 10
        for node, chain in chains.items():
            into = cluster.blocks.room(chain)
            result = await engines[node].load(chain, into=into, deadline_s=2)
            cluster.blocks.check(chain, into, result)
        assert sum(cluster.agents["a"].store.present(cluster.namespace.digest, pinned)) == 8
        await cluster.wait_known("a")
        await cluster.wait_known("b")
