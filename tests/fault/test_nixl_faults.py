"""What is NIXL's own among the planes in mover processes; the rest is in test_mover_faults.py and test_transport_mover.py."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdir.errors import ConfigError
from peer_agent import _native
from peer_agent.core.effects import LoadStatus
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.mover import nixl_agent
from peer_agent.mover.backend import BackendError
from peer_agent.testing import local_cluster
from peer_agent.transport.base import ReadStatus
from peer_agent.transport.check_movers import DIGEST, MoverRig, eventually, mover_rig, stop
from peer_agent.transport.check_rig import DEADLINE_S, LOCK, WIDTH, Stored, write
from peer_agent.transport.mover import MoverTransport
from peer_agent.transport.mover_descriptor import HEAD, seal

OK, LATE, PEER_LOST = ReadStatus.OK, ReadStatus.LATE, ReadStatus.PEER_LOST
EMULATED = {"emulated": "tcp"}
IDLE_S = 1.0


def cpu_s(pid: int) -> float:
    """CPU time of a process with all its threads. clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


async def test_movers_cost_nothing_when_connected_and_idle(tmp_path: Path) -> None:
    """As NIXL comes, its progress thread alone takes a core."""
    async with mover_rig(tmp_path, "nixl", EMULATED) as rig:
        await read_everything(rig, rig.store(range(4)))
        pids = (rig.owner.pid, rig.reader.pid)
        before = [cpu_s(pid) for pid in pids]
        await asyncio.sleep(IDLE_S)
        used = [cpu_s(pid) - begun for pid, begun in zip(pids, before, strict=True)]
        assert max(used) < 0.03 * IDLE_S, used


async def test_mover_is_replaced_and_other_peers_are_read_again_when_a_transfer_never_ends(tmp_path: Path) -> None:
    """NIXL cannot say that a transfer it gave up has stopped writing: only a dead process proves it."""
    async with mover_rig(tmp_path, "nixl", EMULATED) as rig:
        stored = rig.store(range(4))
        stopped, _ = rig.another("stopped")
        slow = await rig.reader.connect(await stopped.export(), deadline_s=DEADLINE_S)
        other = await rig.connect()
        victim = rig.reader.pid
        await stop(stopped.pid)
        blocks = rig.request(stored)
        outcome = await slow.read(blocks, deadline_s=0.2)
        assert rig.expect(outcome, blocks, stored) == [LATE] * 4
        assert rig.reader.pid == victim, "late alone is no reason to end it"
        assert not outcome.settled.done()
        await asyncio.wait_for(outcome.settled, DEADLINE_S)
        before = [rig.landed(blocks, index) for index in range(len(blocks))]
        os.kill(stopped.pid, signal.SIGCONT)  # it answers now what it was asked, if anybody listens
        await eventually(lambda: rig.reader.pid not in (0, victim))
        again = rig.request(stored, first=8)
        assert rig.expect(await other.read(again, deadline_s=DEADLINE_S), again, stored) == [OK] * 4
        assert [rig.landed(blocks, index) for index in range(len(blocks))] == before


async def test_late_transfer_costs_no_mover_when_it_ends_by_itself(tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "nixl", EMULATED) as rig:
        stored = rig.store(range(4))
        connection = await rig.connect()
        await stop(rig.owner.pid)
        blocks = rig.request(stored)
        outcome = await connection.read(blocks, deadline_s=0.1)
        os.kill(rig.owner.pid, signal.SIGCONT)
        assert rig.expect(outcome, blocks, stored) == [LATE] * 4
        await asyncio.wait_for(outcome.settled, DEADLINE_S)
        again = rig.request(stored, first=8)
        assert rig.expect(await connection.read(again, deadline_s=DEADLINE_S), again, stored) == [OK] * 4
        assert rig.reader.stats()["mover_starts"] == 1


async def test_no_mover_of_ours_ends_when_a_peers_mover_is_killed_in_a_read(tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "nixl", EMULATED) as rig:
        stored = rig.store(range(8))
        connection = await rig.connect()
        blocks = rig.request(stored)
        await stop(victim := rig.owner.pid)
        reading = asyncio.create_task(connection.read(blocks, deadline_s=DEADLINE_S))
        await asyncio.sleep(0.05)
        os.kill(victim, signal.SIGKILL)
        outcome = await reading
        assert rig.expect(outcome, blocks, stored) == [PEER_LOST] * 8
        assert outcome.settled.done()
        assert rig.reader.stats()["mover_starts"] == 1


async def test_blocks_shorter_than_their_slots_are_read_when_they_lie_on_no_grid(tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "nixl", EMULATED) as rig:
        payloads = [rig.seed.randbytes(length) for length in (1, 4096, 99_999)]
        fingerprints = rig.seed.randbytes(len(payloads) * WIDTH)
        offsets = rig.owner_offsets(range(len(payloads)))
        _native.begin_write(rig.owner_arena.region, offsets)
        records = b"".join(
            write(rig.owner_arena, offsets[i * 8 : i * 8 + 8], rig.digest, fingerprints[i * WIDTH : (i + 1) * WIDTH], [payload])
            for i, payload in enumerate(payloads)
        )
        rig.grant(LOCK, records)
        blocks = rig.request(Stored((0, 1, 2), records, fingerprints, tuple(payloads)))
        outcome = await (await rig.connect()).read(blocks, deadline_s=DEADLINE_S)
        assert list(outcome.statuses) == [OK] * 3
        assert [rig.landed(blocks, i)[: len(payload)] for i, payload in enumerate(payloads)] == payloads


BAD_PARTS: tuple[tuple[Callable[[bytes], bytes], type[Exception], str], ...] = (
    (lambda part: b"\x02" + part[1:], ValueError, "not a nixl descriptor"),
    (lambda part: part[:20], ValueError, "cut"),
    (lambda part: part.replace(b"1.5.1", b"1.4.9"), ConnectionError, "NIXL 1.4.9, we have 1.5.1; upgrade the peer's"),
    (lambda part: part.replace(b"1.5.1", b"2.0.0"), ConnectionError, "NIXL 2.0.0, we have 1.5.1; upgrade this node's"),
    (lambda part: part[:24] + b"garbage" * 20, ConnectionError, "does not take the peer's metadata"),
)
"""How the backend's part of a descriptor is changed, and what the answer is."""


async def test_descriptors_are_refused_with_the_reason_when_they_are_damaged_or_of_another_version(tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "nixl", EMULATED) as rig:
        descriptor = await rig.owner.export()
        head, part = descriptor[: HEAD.size], descriptor[HEAD.size : -8]
        for change, error, message in BAD_PARTS:
            with pytest.raises(error, match=message):
                await rig.reader.connect(seal(head + change(part), "nixl"), deadline_s=DEADLINE_S)
        other_life = bytearray(head)
        other_life[1] ^= 1
        with pytest.raises(ConnectionError, match="another incarnation"):
            await rig.reader.connect(seal(bytes(other_life) + part, "nixl"), deadline_s=DEADLINE_S)
        await read_everything(rig, rig.store(range(4)))
        assert rig.reader.stats()["mover_starts"] == 1


async def test_agent_lives_when_descriptors_are_garbage(tmp_path: Path) -> None:
    """Sealed garbage, so that it reaches the mover and NIXL's own parsers, which may end it: the next one serves."""
    rng = random.Random(7)
    async with mover_rig(tmp_path, "nixl", EMULATED) as rig:
        stored = rig.store(range(4))
        good = (await rig.owner.export())[:-8]
        candidates = [good[: rng.randrange(HEAD.size + 1, len(good))] for _ in range(4)]
        candidates += [good + rng.randbytes(rng.randrange(1, 2000)) for _ in range(2)]
        for _ in range(8):
            flipped = bytearray(good)
            flipped[rng.randrange(HEAD.size, len(good))] ^= 1 << rng.randrange(8)
            candidates.append(bytes(flipped))
        for candidate in candidates:
            with contextlib.suppress(ValueError, ConnectionError, TimeoutError):
                connection = await rig.reader.connect(seal(candidate, "nixl"), deadline_s=0.3)
                blocks = rig.request(stored)
                outcome = await connection.read(blocks, deadline_s=0.3)
                rig.expect(outcome, blocks, stored)
                await connection.close()
                await asyncio.wait_for(outcome.settled, DEADLINE_S)
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s:
            with contextlib.suppress(ConnectionError, AssertionError):
                return await read_everything(rig, stored)
            await asyncio.sleep(0.05)
        raise AssertionError("nothing can be read any more")


async def test_blocks_come_over_nixl_when_it_is_the_only_plane() -> None:
    with tempfile.TemporaryDirectory(prefix="kvdir-") as directory:  # short, because socket paths end at 107 bytes
        async with local_cluster(
            Path(directory), "a", "b", transports=("nixl",), allow_emulated_rma=True, connect_timeout_s=2.0
        ) as cluster:
            fingerprints = cluster.blocks.chain(40)
            writer, reader = await cluster.engine("a"), await cluster.engine("b")
            await writer.store(fingerprints, cluster.blocks.data(fingerprints))
            await cluster.wait_known("a")
            into = cluster.blocks.room(fingerprints)
            result = await reader.load(fingerprints, into=into)
            assert result.count(LoadStatus.HIT_PEER) == 40
            cluster.blocks.check(fingerprints, into, result)


async def test_start_is_refused_with_what_is_missing_when_there_is_no_rdma(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "arena", [SizeClass(DIGEST, 4096, 4)], epoch=1) as arena:
        plane = MoverTransport(arena, backend="nixl")
        try:
            with pytest.raises(ConfigError, match=r"nixl: 1.5.1 cannot start here: .*RDMA devices: none"):
                await plane.export()
        finally:
            await plane.close()


def test_start_is_refused_with_how_to_install_it_when_nixl_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(BackendError, match="pip install --no-deps nixl-cu12"):
        nixl_agent.load()


async def read_everything(rig: MoverRig, stored: Stored) -> None:
    connection = await rig.connect()
    blocks = rig.request(stored)
    outcome = await connection.read(blocks, deadline_s=DEADLINE_S)
    assert set(rig.expect(outcome, blocks, stored)) == {OK}
