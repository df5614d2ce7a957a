"""What a mover process is and is denied (environment, descriptors, lifetime, priority), its cost, and why one is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from kvdir.errors import ConfigError
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.mover import contain, lanes, libucp, messages
from peer_agent.mover.child import MoverSpec
from peer_agent.mover.messages import Opened, Ping, Read, Reply, decode_answer, decode_question, encode
from peer_agent.mover.process import MoverProcess
from peer_agent.testing.leaks import descriptors
from peer_agent.transport.check_movers import DIGEST, eventually, mover_rig
from peer_agent.transport.check_rig import DEADLINE_S
from peer_agent.transport.mover import MoverTransport

EMULATED = {"emulated": "tcp"}


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "arena", [SizeClass(DIGEST, 4096, 16)], epoch=1) as made:
        yield made


async def refusal(arena: Arena, **settings: str) -> str:
    plane = MoverTransport(arena, backend="ucx", settings=settings)
    try:
        with pytest.raises(ConfigError) as refused:
            await plane.export()
    finally:
        await plane.close()
    return str(refused.value)


async def test_mover_holds_the_arena_its_socket_and_no_secret_when_started(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("UCX_LOG_LEVEL", "error")
    with open(tmp_path / "secret", "w") as secret:  # noqa: ASYNC230 (an inheritable descriptor is wanted)
        os.set_inheritable(secret.fileno(), True)  # subprocess closes it nevertheless
        plane = MoverTransport(arena, backend="fake")
        try:
            await plane.export()
            proc = Path(f"/proc/{plane.pid}")
            names = {entry.split("=")[0] for entry in (proc / "environ").read_text().split("\0") if entry}
            assert names == {"PYTHONPATH", "PYTHONSAFEPATH", "PYTHONNOUSERSITE", "UCX_LOG_LEVEL"} | (
                names & contain.PASSED_NAMES
            )
            opened = [os.readlink(link) for link in (proc / "fd").iterdir()]
            assert 1 <= sum(arena.path in target for target in opened) <= 2  # mmap keeps a duplicate
            assert not any("secret" in target for target in opened)
            assert sum("socket" in target for target in opened) <= 3  # control, and the loop's own pair
            assert not psutil.Process(plane.pid).net_connections(kind="inet")
            assert (proc / "oom_score_adj").read_text().strip() == str(contain.OOM_SCORE_ADJ)
            assert "NoNewPrivs:\t1" in (proc / "status").read_text()
        finally:
            await plane.close()


async def test_mover_stays_when_the_whole_group_is_told_to_end(arena: Arena) -> None:
    """systemd and shells signal all processes; the agent serves on while it drains, and ends its mover itself."""
    plane = MoverTransport(arena, backend="fake")
    try:
        await plane.export()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(plane.pid, number)
        await plane.process.ask(Ping).answer
    finally:
        await plane.close()


async def test_mover_ends_with_its_plane_and_leaves_no_descriptor_open(arena: Arena) -> None:
    before = descriptors().items()
    for _ in range(3):
        plane = MoverTransport(arena, backend="fake")
        await plane.export()
        pid = plane.pid
        await plane.close()
        await plane.close()
        assert not psutil.pid_exists(pid)
    assert not descriptors().items() - before


AGENT = """
import asyncio, sys
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.transport.mover import MoverTransport

async def main():
    plane = MoverTransport(Arena.create(sys.argv[1], [SizeClass(bytes(32), 4096, 4)], epoch=1), backend="fake")
    await plane.export()
    print(plane.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_mover_dies_with_its_agent_when_that_is_killed(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    agent = subprocess.Popen(  # noqa: ASYNC220 (short)
        [sys.executable, "-c", AGENT, str(tmp_path / "arena")], stdout=subprocess.PIPE, cwd=root
    )
    try:
        assert agent.stdout is not None
        mover = int(await asyncio.to_thread(agent.stdout.readline))
        os.kill(mover, signal.SIGSTOP)  # it cannot see that its agent is gone: the kernel ends it
        agent.kill()
        await eventually(lambda: not psutil.pid_exists(mover) or psutil.Process(mover).status() == psutil.STATUS_ZOMBIE)
    finally:
        agent.kill()
        agent.communicate()


async def test_movers_cost_nothing_when_connected_and_idle(tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "ucx", EMULATED) as rig:
        connection = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S)
        movers = [psutil.Process(rig.owner.pid), psutil.Process(rig.reader.pid)]
        before = [sum(mover.cpu_times()[:2]) for mover in movers]
        span_s = 1.5  # what is measured is a span of time, not waited for
        await asyncio.sleep(span_s)
        used = [sum(mover.cpu_times()[:2]) - start for mover, start in zip(movers, before, strict=True)]
        assert max(used) <= 0.02 * span_s + 0.01, "two per cent of a core, and one tick of the clock that counts it"
        await connection.close()


async def test_lists_beyond_one_message_are_read_whole(tmp_path: Path) -> None:
    count = messages.MAX_READ_BLOCKS + 10
    async with mover_rig(tmp_path, "ucx", EMULATED, block_bytes=256, slots=count) as rig:
        connection, stored = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S), rig.store(range(count))
        blocks = rig.request(stored)
        outcome = await connection.read(blocks, deadline_s=DEADLINE_S)
        assert set(rig.expect(outcome, blocks, stored)) == {0}


@pytest.mark.parametrize("backend", ["ucx", "nixl"])
async def test_nothing_piles_up_when_peers_connect_and_leave(backend: str, tmp_path: Path) -> None:
    async with mover_rig(tmp_path, backend, EMULATED) as rig:
        descriptor, stored = await rig.owner.export(), rig.store(range(2))

        async def cycle() -> None:
            connection = await rig.reader.connect(descriptor, deadline_s=DEADLINE_S)
            blocks = rig.request(stored)
            outcome = await connection.read(blocks, deadline_s=DEADLINE_S)
            assert set(rig.expect(outcome, blocks, stored)) == {0}
            await connection.close()

        def counts() -> list[int]:
            return [psutil.Process(transport.pid).num_fds() for transport in (rig.owner, rig.reader)]

        for _ in range(5):
            await cycle()
        before = counts()
        for _ in range(40):
            await cycle()
        await eventually(lambda: all(now <= then + 2 for now, then in zip(counts(), before, strict=True)))
        assert rig.reader.stats()["peers"] == 0


async def test_start_says_which_library_is_missing(arena: Arena) -> None:
    words = await refusal(arena, library="/nowhere/libucp.so.0", emulated="tcp")
    assert "ucx: /nowhere/libucp.so.0 cannot be used: " in words
    assert "install UCX 1.19 or newer" in words


async def test_start_says_which_lanes_were_looked_for_when_there_is_no_rdma(arena: Arena) -> None:
    words = await refusal(arena)
    if not libucp.rdma_devices():
        assert "no RDMA device: looked for lanes rc, dc and srd" in words
    assert "is built without verbs" in words
    assert "install" in words


async def test_start_says_what_ucx_said_when_a_lane_does_not_exist(arena: Arena) -> None:
    words = await refusal(arena, emulated="tcp", UCX_NET_DEVICES="none0")
    assert "UCX cannot" in words
    assert "UCX_TLS=tcp" in words


def test_locked_memory_is_named_when_it_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libucp.resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    monkeypatch.setattr(libucp, "has_ipc_lock", lambda: False)
    faults = libucp.rdma_faults("libucp.so.0", pinned_bytes=1 << 30)
    assert any(
        "1,073,741,824 bytes, and at most 8,388,608 may be locked; raise it (ulimit -l unlimited" in fault for fault in faults
    )
    monkeypatch.setattr(libucp, "has_ipc_lock", lambda: True)
    assert not any("may be locked" in fault for fault in libucp.rdma_faults("libucp.so.0", pinned_bytes=1 << 30))


@pytest.mark.parametrize(("effective", "has"), [("0000000000004000", True), ("ffffffffffffbfff", False)])
def test_capability_to_lock_memory_is_read_from_the_kernel(effective: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"Name:\tmover\nCapEff:\t{effective}\n")
    assert libucp.has_ipc_lock() is has


def test_only_lanes_known_to_check_keys_are_allowed() -> None:
    assert lanes.refused(["rc_mlx5", "dc_mlx5", "rc_verbs", "srd", "cuda_ipc", "cuda_copy", "gdr_copy"]) == []
    assert lanes.refused(["rc_mlx5", "tcp", "posix", "sysv", "cma", "self", "invented"]) == sorted(
        ["tcp", "posix", "sysv", "cma", "self", "invented"]
    )
    assert lanes.enforced(emulated="", gpu=False)["TLS"] == "rc,dc,srd"
    assert lanes.enforced(emulated="", gpu=True)["TLS"] == "rc,dc,srd,cuda_copy,cuda_ipc,gdr_copy"
    assert lanes.defaults(emulated="tcp")["NET_DEVICES"] == "lo", "open to this host only"
    assert "NET_DEVICES" not in lanes.defaults(emulated="")


async def test_unknown_backend_is_named(arena: Arena) -> None:
    mover = MoverProcess(MoverSpec("carrier-pigeon", arena.fd, arena.arena_bytes))
    with pytest.raises(Exception, match="unknown mover backend 'carrier-pigeon'; known are ucx"):
        await mover.start()
    await mover.close()


def test_mover_imports_nothing_of_the_agents_network() -> None:
    code = "import sys, peer_agent.mover.main, peer_agent.mover.ucx; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    loaded = set(done.stdout.split())
    assert "peer_agent.mover.main" in loaded
    assert not loaded & {"grpc", "google.protobuf", "numpy", "torch", "redis", "uvloop", "kvdir.client", "kvdir.rpc"}


def test_messages_survive_the_wire_and_garbage_does_not() -> None:
    read = Read(7, 1, 123, bytes(32), b"f" * 16, 16, bytes(32), bytes(8))
    assert decode_question(encode(read)) == read
    opened = Opened(bytes(16), b"descriptor", {"library": "UCX"})
    assert decode_answer(encode(opened)) == opened
    for data in (b"", b"\xc1", encode(Reply(1)), b"\x00" * 100, encode(Ping(1)) + b"x"):
        with pytest.raises(msgspec.DecodeError):
            decode_question(data)
    with pytest.raises(ValueError, match="at most 131072 fit a message"):
        encode(Reply(1, body=bytes(messages.MAX_MESSAGE_BYTES)))


def test_largest_read_fits_a_message() -> None:
    count = messages.MAX_READ_BLOCKS
    read = Read(2**63, 2**63, 2**63, bytes(32), bytes(32 * count), 32, bytes(32 * count), bytes(8 * count))
    assert len(encode(read)) <= messages.MAX_MESSAGE_BYTES
