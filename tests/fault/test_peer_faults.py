"""One agent among peers that lie, hang, speak another version, are dead by the thousand, or are 64 at once. Over real sockets.

The directory is made: it names whom a test wants. Everything behind it is real: gRPC, the tcp plane, slots, the engine library.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, StreamState
from kvdir.testing.wait import eventually
from peer_agent import _native
from peer_agent.client.results import LoadResult
from peer_agent.core.effects import LoadStatus
from peer_agent.core.nominees import Claim
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.server.load import Nominations
from peer_agent.testing import LocalCluster, local_cluster
from peer_agent.testing.fake_peer import FakePeer, fake_peer
from peer_agent.testing.leaks import held_by_process
from peer_agent.testing.link import link_to
from peer_agent.testing.timing import DEADLINE_SLACK_S, PROMPT_S, expect_within, took
from peer_agent.transport.check_rig import pack
from peer_agent.transport.fake import RECORD, Fault
from peer_agent.transport.faulty_owner import faulty_owner

pytestmark = pytest.mark.slow

BLOCKS = 8
SHORT_S = 0.3


class MadeDirectory:
    """Names these nodes for everything but what was reported stale."""

    def __init__(self, nodes: dict[str, str]) -> None:
        self.nodes = nodes
        self.gone: set[tuple[str, bytes]] = set()

    async def nominate(self, namespace_digest: bytes, fingerprints: Fingerprints, *, timeout_s: float) -> Nominations:
        found = [NodeTrust(name, 0, StreamState.SYNCED, "", 0.0, 0, address) for name, address in self.nodes.items()]
        wanted = list(enumerate(fingerprints))
        held = [[at for at, item in wanted if (node.node, item) not in self.gone] for node in found]
        return Nominations([Claim.of(node, positions) for node, positions in zip(found, held, strict=True)], found)

    async def report_stale(
        self, namespace_digest: bytes, fingerprints: Fingerprints, *, node: str, epoch: int, owner_seq: int
    ) -> None:
        self.gone |= {(node, item) for item in fingerprints}


class Bed:
    """Agent "reader", with an engine, and whoever the directory names."""

    def __init__(self, cluster: LocalCluster, engine) -> None:
        self.cluster = cluster
        self.engine = engine
        self.agent = cluster.agents["reader"]
        self.directory = MadeDirectory({})
        self.agent.reader._directory = self.directory
        self.agent.reader._owners.directory = self.directory

    async def load(self, fingerprints: Fingerprints, *, deadline_s: float = SHORT_S) -> LoadResult:
        into = self.cluster.blocks.room(fingerprints)
        result = await self.engine.load(fingerprints, into=into, deadline_s=deadline_s)
        self.cluster.blocks.check(fingerprints, into, result)
        return result

    def fresh(self, number: int) -> Fingerprints:
        return self.cluster.blocks.chain(BLOCKS, root=f"fresh {number}")

    async def give(self, node: str, fingerprints: Fingerprints, **settings) -> str:
        """A real agent that holds these; its address."""
        agent = await self.cluster.start_agent(node, **settings)
        engine = await self.cluster.engine(node)
        assert (await engine.store(fingerprints, self.cluster.blocks.data(fingerprints))).stored == len(fingerprints)
        return agent.ready.peer

    async def expect_all_in_the_end(self, fingerprints: Fingerprints) -> None:
        """Load after load brings some, until everything is here."""
        hits = 0
        for _ in range(200):
            hits = (await self.load(fingerprints, deadline_s=2.0)).hits
            if hits == len(fingerprints):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{hits} of {len(fingerprints)} in the end")

    async def expect_nothing_held(self) -> None:
        def held() -> tuple[int, int, int]:
            slots = self.agent.store.occupancy()[0]
            return slots.reserved, slots.quarantined, slots.retired

        await eventually(lambda: held() == (0, 0, 0), within_s=5, what="slots came back")
        self.agent.store._inventory.check()


@asynccontextmanager
async def bed_of(**settings) -> AsyncIterator[Bed]:
    values = {"transports": ("tcp",), "breaker_s": 0.01, "breaker_max_s": 0.02, "connect_timeout_s": 0.2}
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        async with local_cluster(Path(path), "reader", coordinator=False, **(values | settings)) as cluster:
            yield Bed(cluster, await cluster.engine("reader"))


@asynccontextmanager
async def lying_peer(bed: Bed, fingerprints: Fingerprints, fault: Fault | None, **answers) -> AsyncIterator[str]:
    """A peer that holds these blocks and serves them over tcp as `fault` says."""
    digest, block_bytes = bed.cluster.namespace.digest, bed.cluster.namespace.block_bytes
    path = bed.cluster.directory / "liar.arena"
    with Arena.create(path, [SizeClass(digest, block_bytes, len(fingerprints))], epoch=77) as arena:
        offsets = pack([arena.classes[0].offset(slot) for slot in range(len(fingerprints))])
        data = bed.cluster.blocks.data(fingerprints)
        _native.begin_write(arena.region, offsets)
        sources = pack([data[slot].ctypes.data for slot in range(len(fingerprints))])
        sums = _native.write_blocks(arena.region, offsets, sources, block_bytes)
        packed, width = fingerprints.packed, fingerprints.width
        records = _native.commit(arena.region, offsets, digest, packed, width, block_bytes, sums)
        async with faulty_owner(arena, fault) as descriptor:
            values = {"offers": {"tcp": descriptor}, "records": records} | answers
            async with fake_peer(FakePeer("liar", **values)) as address:
                bed.directory.nodes["liar"] = address
                yield address


@pytest.mark.parametrize(
    ("fault", "possible"),
    [
        (None, {LoadStatus.HIT_PEER}),
        (Fault.WRONG_BYTES, {LoadStatus.CORRUPT}),
        (Fault.WRONG_HEADER, {LoadStatus.STALE, LoadStatus.CORRUPT}),
        (Fault.TORN, {LoadStatus.CORRUPT}),
        (Fault.GARBAGE, {LoadStatus.MISS}),
        (Fault.CLOSING, {LoadStatus.HIT_PEER, LoadStatus.MISS}),
        (Fault.SLOW, {LoadStatus.LATE}),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Fault) else "",
)
async def test_load_is_right_or_recomputed_when_a_peer_serves(fault: Fault | None, possible: set[LoadStatus]):
    async with bed_of() as bed:
        fingerprints = bed.fresh(0)
        async with lying_peer(bed, fingerprints, fault):
            result, seconds = await took(bed.load(fingerprints))
            assert {LoadStatus(status) for status in result.statuses} <= possible
            assert seconds <= SHORT_S + DEADLINE_SLACK_S
        await bed.expect_nothing_held()


@pytest.mark.parametrize(
    "records",
    [b"", b"\0" * 31, b"\xff" * 32 * BLOCKS, bytes(range(256)), RECORD.pack(1 << 63, 2, 0, 1 << 31, 1) * BLOCKS,
     RECORD.pack(4096, 2, 0, 4096, 1) * BLOCKS, RECORD.pack(4096, 3, 0, 4096, 1) * BLOCKS],
    ids=["none", "a part of one", "all ones", "noise", "huge", "all the same", "odd"],
)  # fmt: skip
async def test_nothing_is_believed_when_a_peer_answers_a_lock_with(records: bytes):
    async with bed_of() as bed:
        fingerprints = bed.fresh(0)
        async with lying_peer(bed, fingerprints, None, records=records):
            result, seconds = await took(bed.load(fingerprints))
            assert result.hits == 0
            assert seconds <= SHORT_S + DEADLINE_SLACK_S
        await bed.expect_nothing_held()


async def test_load_is_a_miss_at_once_when_the_peer_speaks_another_version():
    async with bed_of() as bed:
        async with lying_peer(bed, bed.fresh(0), None, protocol_version=999):

            async def load() -> LoadResult:
                await asyncio.sleep(0.02)  # the breaker's pause
                return await bed.load(bed.fresh(0), deadline_s=10)

            for result in await expect_within(PROMPT_S, load, what="finding out"):
                assert (result.hits, result.count(LoadStatus.LATE)) == (0, 0)
        await bed.expect_nothing_held()


@pytest.mark.parametrize(
    "offers", [{}, {"rdma": b"x"}, {"tcp": b""}, {"tcp": b"\x09" * 40}], ids=["none", "unknown", "empty", "v9"]
)
async def test_load_is_a_miss_at_once_when_the_peer_offers_no_plane_of_ours(offers: dict[str, bytes]):
    async with bed_of() as bed:
        async with lying_peer(bed, bed.fresh(0), None, offers=offers):
            result, seconds = await took(bed.load(bed.fresh(0), deadline_s=10))
            assert (result.hits, result.count(LoadStatus.LATE)) == (0, 0)
            assert seconds < 1.0
        await bed.expect_nothing_held()


@pytest.mark.parametrize("call", ["Hello", "Lock"])
async def test_load_keeps_its_deadline_and_others_serve_when_a_peer_never_answers(call: str):
    async with bed_of() as bed:
        fingerprints = bed.fresh(0)
        async with lying_peer(bed, fingerprints, None, silent=frozenset({call})):

            async def load() -> LoadResult:
                return await bed.load(fingerprints)

            for result in await expect_within(SHORT_S + DEADLINE_SLACK_S, load, what="a load"):
                assert result.hits == 0
            bed.directory.nodes["good"] = await bed.give("good", fingerprints)
            result = await bed.load(fingerprints, deadline_s=2.0)
            assert result.hits == BLOCKS
        await bed.expect_nothing_held()


async def test_load_keeps_its_deadline_when_the_control_connection_is_cut_one_way():
    """Lock requests arrive and their answers do not."""
    async with bed_of() as bed:
        fingerprints = bed.fresh(0)
        host, _, port = (await bed.give("a", fingerprints)).rpartition(":")
        async with link_to(host, int(port)) as link:
            bed.directory.nodes["a"] = f"127.0.0.1:{link.port}"
            warm = await bed.load(fingerprints.slice(0, 1), deadline_s=2.0)
            assert warm.hits == 1
            link.down.cut()
            for number in range(3):
                _, seconds = await took(bed.load(fingerprints))
                assert seconds <= SHORT_S + DEADLINE_SLACK_S, number
            await bed.expect_nothing_held()
            link.down.restore()
            await bed.expect_all_in_the_end(fingerprints)


def closed_addresses(count: int) -> Sequence[str]:
    """Addresses of this host on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    return [f"127.0.{number // 250}.{number % 250 + 2}:{port}" for number in range(count)]


@pytest.mark.parametrize("count", [100, 1000])
async def test_load_keeps_its_deadline_and_a_living_owner_is_found_when_dead_ones_are_named_first(count: int):
    async with bed_of(breaker_s=0.05, breaker_max_s=30.0) as bed:
        fingerprints = bed.fresh(0)
        dead = {f"dead-{number:04}": address for number, address in enumerate(closed_addresses(count))}
        bed.directory.nodes = dead | {"zombie": await bed.give("zombie", fingerprints)}
        before = held_by_process()

        async def load() -> LoadResult:
            return await bed.load(fingerprints, deadline_s=1.0)

        await expect_within(1.0 + DEADLINE_SLACK_S, load, what="a load among the dead")
        if count == 100:
            await bed.expect_all_in_the_end(fingerprints)
        after = held_by_process()
        assert after["descriptors"] <= before["descriptors"] + 64, "a thousand dead peers hold no thousand sockets"
        assert after["threads"] <= before["threads"] + 16
        await bed.expect_nothing_held()


async def test_every_block_arrives_when_64_peers_have_one_each():
    async with bed_of() as bed:
        fingerprints = bed.cluster.blocks.chain(64)
        for number in range(64):
            one = fingerprints.slice(number, 1)
            bed.directory.nodes[f"n{number}"] = await bed.give(f"n{number}", one, arena_bytes=64 << 10)
        await bed.expect_all_in_the_end(fingerprints)
        await bed.expect_nothing_held()
