"""Every data plane keeps the contract of peer_agent/transport/base.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvdir.testing.certificates import shared_certificates
from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.transport.base import ReadList, Transport
from peer_agent.transport.check import CHECKS, Check, check_transport
from peer_agent.transport.check_rig import Rig
from peer_agent.transport.fake import FakeNetwork, FakeTransport, Fault
from peer_agent.transport.faulty_owner import faulty_owner
from peer_agent.transport.shm import ShmTransport
from peer_agent.transport.tcp import TcpTransport
from peer_agent.transport.tls import plane_credentials

DIGEST = b"contract namespace".ljust(32, b".")
SLOTS = 16

RigMaker = Callable[[Path, int], AbstractAsyncContextManager[Rig]]


@asynccontextmanager
async def _rig(directory: Path, block_bytes: int, plane: Callable[[Arena], Transport]) -> AsyncIterator[Rig]:
    classes = [SizeClass(DIGEST, block_bytes, SLOTS)]
    with (
        Arena.create(directory / "owner", classes, epoch=0xA1) as owner_arena,
        Arena.create(directory / "reader", classes, epoch=0xB2) as reader_arena,
    ):
        owner, reader = plane(owner_arena), plane(reader_arena)
        rig = Rig(owner, owner_arena, reader, reader_arena)
        await owner.export()
        try:
            yield rig
        finally:
            await reader.close()
            await owner.close()


@asynccontextmanager
async def fake_rig(directory: Path, block_bytes: int) -> AsyncIterator[Rig]:
    network = FakeNetwork()
    async with _rig(directory, block_bytes, lambda arena: FakeTransport(network, arena)) as rig:

        async def faulty(fault: Fault) -> bytes:
            descriptor = await rig.owner.export()
            network.faults[descriptor] = fault
            return descriptor

        rig.faulty = faulty
        yield rig


@asynccontextmanager
async def shm_rig(directory: Path, block_bytes: int) -> AsyncIterator[Rig]:
    async with _rig(directory, block_bytes, ShmTransport) as rig:
        yield rig


@asynccontextmanager
async def checking_shm_rig(directory: Path, block_bytes: int) -> AsyncIterator[Rig]:
    async with _rig(directory, block_bytes, lambda arena: ShmTransport(arena, check=True)) as rig:
        yield rig


@asynccontextmanager
async def threaded_shm_rig(directory: Path, block_bytes: int) -> AsyncIterator[Rig]:
    async with _rig(directory, block_bytes, lambda arena: ShmTransport(arena, inline_bytes=-1)) as rig:
        yield rig


@asynccontextmanager
async def tcp_rig(directory: Path, block_bytes: int, tls: _native.TlsCredentials | None = None) -> AsyncIterator[Rig]:
    python_tls = shared_certificates().python_server("other") if tls is not None else None
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(_rig(directory, block_bytes, lambda arena: TcpTransport(arena, tls=tls)))

        async def faulty(fault: Fault) -> bytes | None:
            if fault is Fault.LATE_WRITE:  # a native read writes from its own thread only, which has ended
                return None
            return await stack.enter_async_context(faulty_owner(rig.owner_arena, fault, tls=python_tls))

        rig.faulty = faulty
        yield rig


@asynccontextmanager
async def tls_rig(directory: Path, block_bytes: int) -> AsyncIterator[Rig]:
    async with tcp_rig(directory, block_bytes, plane_credentials(shared_certificates().files("node"))) as rig:
        yield rig


RIGS: dict[str, RigMaker] = {
    "fake": fake_rig,
    "shm": shm_rig,
    "shm+checksum": checking_shm_rig,
    "shm+threads": threaded_shm_rig,
    "tcp": tcp_rig,
    "tcp+tls": tls_rig,
}


@pytest.fixture(params=[4096, 100_000], ids=["4KiB", "odd-size"])
def block_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("plane", RIGS)
async def test_plane_keeps_the_contract(plane: str, check: Check, tmp_path: Path, block_bytes: int) -> None:
    async with RIGS[plane](tmp_path, block_bytes) as rig:
        await check(rig)


async def test_suite_runs_as_one_call_when_a_third_party_uses_it(tmp_path: Path) -> None:
    await check_transport(lambda: fake_rig(tmp_path, 4096))


async def test_suite_fails_when_a_plane_believes_everything(tmp_path: Path) -> None:
    """The suite is worth something: a plane without verification does not pass."""

    class Gullible(FakeTransport):
        def admit(self, blocks: ReadList) -> bytes:
            return blocks.records

    network = FakeNetwork()
    with pytest.raises(AssertionError):
        await check_transport(lambda: _rig(tmp_path, 4096, lambda arena: Gullible(network, arena)))


@pytest.mark.parametrize("security", ["plaintext", "tls"])
async def test_python_owner_is_read_when_it_speaks_the_frames_of_wire_hpp(
    security: str, tmp_path: Path, block_bytes: int
) -> None:
    certificates = shared_certificates()
    ours, theirs = (
        (plane_credentials(certificates.files("node")), certificates.python_server("other"))
        if security == "tls"
        else (None, None)
    )
    async with tcp_rig(tmp_path, block_bytes, ours) as rig, faulty_owner(rig.owner_arena, None, tls=theirs) as descriptor:
        connection = await rig.reader.connect(descriptor, deadline_s=5)
        stored = rig.store(range(SLOTS))
        blocks = rig.request(stored)
        outcome = await connection.read(blocks, deadline_s=5)
        assert set(rig.expect(outcome, blocks, stored)) == {0}
