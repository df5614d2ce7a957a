"""Owners behind TLS that are stopped or killed while they are read: statuses and times as without. Real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdir.testing.certificates import shared_certificates
from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.transport.base import ReadList, ReadStatus
from peer_agent.transport.check_rig import LOCK, WIDTH, pack
from peer_agent.transport.tcp import TcpTransport
from peer_agent.transport.tls import plane_credentials

DIGEST = b"tls faults".ljust(32, b".")
BLOCK = 1 << 20
SLOTS = 32
PROMPT_S = 3.0
"""What "at once" means beside other work on two cores."""

OWNER = """
import asyncio, json, sys
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.transport.check_rig import Rig
from peer_agent.transport.tcp import TcpTransport
from peer_agent.transport.tls import plane_credentials
from kvdir.rpc.certificates import TlsFiles

async def main(path, certificate, key, ca):
    with Arena.create(path, [SizeClass(b"tls faults".ljust(32, b"."), 1 << 20, 32)], epoch=7) as arena:
        tcp = TcpTransport(arena, tls=plane_credentials(TlsFiles(certificate, key, ca)))
        descriptor = await tcp.export()
        rig = Rig(tcp, arena, tcp, arena)
        stored = rig.store(range(32))
        told = (descriptor, stored.records, stored.fingerprints, rig.capabilities[7])
        print(json.dumps([part.hex() for part in told]), flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the test ends this process
        await tcp.close()

asyncio.run(main(*sys.argv[1:]))
"""


class Owner:
    """An owner process with SLOTS committed blocks, granted under LOCK."""

    def __init__(self, path: Path) -> None:
        files = shared_certificates().files("other")
        command = [sys.executable, "-c", OWNER, str(path), files.certificate, files.key, files.ca]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert self.process.stdout is not None
        told = map(bytes.fromhex, json.loads(self.process.stdout.readline()))
        self.descriptor, self.records, self.fingerprints, self.capability = told

    def request(self, reader: Arena) -> ReadList:
        destinations = pack([reader.classes[0].offset(slot) for slot in range(SLOTS)])
        _native.begin_write(reader.region, destinations)
        return ReadList(LOCK, 7, DIGEST, self.fingerprints, WIDTH, self.records, destinations, self.capability)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    started = Owner(tmp_path / "owner")
    yield started
    started.end()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "reader", [SizeClass(DIGEST, BLOCK, SLOTS)], epoch=2) as arena:
        yield arena


async def test_read_is_late_and_nothing_is_written_later_when_the_owner_is_stopped(owner: Owner, reader: Arena) -> None:
    tcp = TcpTransport(reader, tls=plane_credentials(shared_certificates().files("node")))
    connection = await tcp.connect(owner.descriptor, deadline_s=10)
    owner.process.send_signal(signal.SIGSTOP)
    blocks = owner.request(reader)
    begun = time.monotonic()
    outcome = await connection.read(blocks, deadline_s=0.3)
    assert ReadStatus.LATE in outcome.statuses
    assert 0.25 < time.monotonic() - begun < 0.3 + PROMPT_S
    assert outcome.settled.done(), "the destinations may be used again"
    before = bytes(reader.region)
    owner.process.send_signal(signal.SIGCONT)
    await (await tcp.connect(owner.descriptor, deadline_s=10)).close()  # it runs again, and sends what was under way
    assert bytes(reader.region) == before, "nothing is written after the read has returned"
    fresh = await connection.read(owner.request(reader), deadline_s=10)
    assert set(fresh.statuses) == {ReadStatus.OK}, "a new connection, once it runs again"
    await tcp.close()


async def test_reads_are_whole_or_lost_when_the_owner_is_killed_among_them(owner: Owner, reader: Arena) -> None:
    tcp = TcpTransport(reader, tls=plane_credentials(shared_certificates().files("node")))
    connection = await tcp.connect(owner.descriptor, deadline_s=10)
    blocks = owner.request(reader)
    assert set((await connection.read(blocks, deadline_s=30)).statuses) == {ReadStatus.OK}
    owner.process.kill()  # it dies somewhere in the reads that follow
    while ReadStatus.PEER_LOST not in (outcome := await connection.read(blocks, deadline_s=30)).statuses:
        assert set(outcome.statuses) == {ReadStatus.OK}
    assert set(outcome.statuses) <= {ReadStatus.OK, ReadStatus.PEER_LOST}
    begun = time.monotonic()
    assert set((await connection.read(blocks, deadline_s=30)).statuses) == {ReadStatus.PEER_LOST}
    assert time.monotonic() - begun < PROMPT_S, "a dead peer costs a refused connection, not a deadline"
    await tcp.close()
