"""Agents whose tcp plane has TLS: blocks move, and who has no certificate gets none and holds nobody up."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvdir.errors import ConfigError
from kvdir.testing.certificates import shared_certificates
from peer_agent.cli.probe import run_probe
from peer_agent.core.effects import LoadStatus
from peer_agent.server.app import Agent
from peer_agent.testing import LocalCluster, local_cluster
from peer_agent.transport.registry import PlaneOptions

BLOCKS = 24


def settings(name: str, *, ca: str = "ca") -> dict[str, str]:
    files = shared_certificates().files(name, ca=ca)
    return {"data_tls_cert": files.certificate, "data_tls_key": files.key, "data_tls_ca": files.ca}


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


@pytest.fixture
async def cluster(directory: Path) -> AsyncIterator[LocalCluster]:
    """Agents a (node's certificate) and b (other's); a holds BLOCKS blocks."""
    async with local_cluster(directory, transports=("tcp",)) as cluster:
        await cluster.start_agent("a", **settings("node"))
        await cluster.start_agent("b", **settings("other"))
        writer = await cluster.engine("a")
        fingerprints = cluster.blocks.chain(BLOCKS)
        assert (await writer.store(fingerprints, cluster.blocks.data(fingerprints))).stored == BLOCKS
        await cluster.wait_known("a")
        yield cluster


async def hits(cluster: LocalCluster, node: str) -> int:
    """Of the blocks that a holds, loaded at `node`: from the peer, with the right bytes."""
    fingerprints = cluster.blocks.chain(BLOCKS)
    into = cluster.blocks.room(fingerprints)
    result = await (await cluster.engine(node)).load(fingerprints, into=into, deadline_s=5.0)
    cluster.blocks.check(fingerprints, into, result)
    return result.count(LoadStatus.HIT_PEER)


async def test_blocks_come_from_the_peer_when_both_have_certificates(cluster: LocalCluster) -> None:
    assert await hits(cluster, "b") == BLOCKS
    (plane,) = cluster.agents["a"].store.planes
    assert plane.stats()["tls_handshakes"] >= 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("stranger", [{}, settings("foreign", ca="foreign-ca")], ids=["plaintext", "another CA"])
async def test_stranger_misses_and_others_hit_when_it_has_no_certificate_of_ours(
    cluster: LocalCluster, stranger: dict[str, str]
) -> None:
    await cluster.start_agent("c", **stranger)
    assert await asyncio.wait_for(hits(cluster, "c"), 10) == 0
    assert await hits(cluster, "b") == BLOCKS


async def test_agent_does_not_start_when_its_certificate_has_expired(directory: Path) -> None:
    async with local_cluster(directory, coordinator=False) as cluster:
        with pytest.raises(ConfigError, match=r"data_tls_cert: .*certificate has expired"):
            await Agent.start(cluster.config("a", **settings("expired")))
        assert not (directory / "a.arena").exists()


async def test_probe_measures_the_plane_or_says_what_it_needs(cluster: LocalCluster) -> None:
    peer = cluster.agents["a"].ready.peer
    without = await run_probe(peer, ("tcp",), 1 << 20, 5.0)
    assert "needs TLS: set data_tls_cert" in without["planes"][0]["reason"]
    options = PlaneOptions(tls=shared_certificates().files("other"))
    with_tls = await run_probe(peer, ("tcp",), 1 << 20, 5.0, options=options)
    assert with_tls["would_use"] == "tcp"
    assert with_tls["planes"][0]["blocks"] > 0
