"""What UCX was told and what it chose are two things: an endpoint with an emulated lane is never used in production.

With a worker that answers as told, since RDMA lanes cannot be had on every machine.
"""

from __future__ import annotations

import os

import pytest

from peer_agent.mover.backend import Gets, PeerMemory
from peer_agent.mover.ucx import UcxBackend

DESCRIPTOR = bytes([1, 1, 21, 0, 3, 0]) + b"adr" + b"key"
PEER = PeerMemory(bytes(16), 1 << 20, DESCRIPTOR)


class Worker:
    """A UCX worker whose peers welcome everybody at once."""

    def __init__(self, *lanes: str) -> None:
        self._lanes = [(lane, "dev0") for lane in lanes]
        self._ended: list[tuple[int, int]] = []
        self.open: set[int] = set()

    def connect(self, address: bytes, key: bytes, incarnation: bytes, ticket: int) -> int:
        assert (address, key) == (b"adr", b"key")
        self._ended.append((ticket, 0))
        self.open.add(1)
        return 1

    def get(self, link: int, to: bytes, remote: bytes, lengths: bytes, ticket: int) -> None:
        self._ended.append((ticket, 0))

    def close(self, link: int, ticket: int) -> None:
        self.open.discard(link)
        self._ended.append((ticket, 0))

    def progress(self, budget_ns: int) -> tuple[bool, list[tuple[int, int]]]:
        ended, self._ended = self._ended, []
        return True, ended

    def lanes(self, link: int) -> list[tuple[str, str]]:
        return self._lanes

    def failed(self, link: int) -> bool:
        return link not in self.open

    def reason(self, status: int) -> str:
        return "fine"


def backend(worker: Worker, *, emulated: str = "", version: tuple[int, int, int] = (1, 22, 0)) -> UcxBackend:
    made = UcxBackend({"emulated": emulated})
    made._worker = worker  # type: ignore[assignment]
    made._version = version
    return made


async def test_link_is_used_when_all_its_lanes_are_rdma() -> None:
    worker = Worker("rc_mlx5", "rc_mlx5", "cuda_ipc")
    link = await backend(worker).connect(PEER)
    assert link.lanes == ("rc_mlx5/dev0", "cuda_ipc/dev0")
    await link.gets(Gets(b"", b"", b""))
    assert not link.broken
    await link.close()
    assert link.broken


@pytest.mark.parametrize("lane", ["tcp", "posix", "sysv", "cma", "self", "tomorrows_lane"])
async def test_link_is_closed_unused_when_one_lane_is_emulated_or_unknown(lane: str) -> None:
    worker = Worker("rc_mlx5", lane)
    with pytest.raises(ConnectionError, match=rf"lanes on which gets are emulated \({lane}\)"):
        await backend(worker).connect(PEER)
    assert not worker.open


async def test_link_is_lost_when_its_endpoint_fails_behind_the_welcome() -> None:
    """UCX is asked nothing about a failed endpoint, and the mover, which serves others, goes on."""

    class Failed(Worker):
        def failed(self, link: int) -> bool:
            return True

        def lanes(self, link: int) -> list[tuple[str, str]]:
            raise RuntimeError("asked of a failed endpoint")

    with pytest.raises(ConnectionError, match="has gone"):
        await backend(Failed("rc_mlx5")).connect(PEER)


async def test_peer_is_refused_when_it_serves_emulated_lanes_and_we_do_not() -> None:
    emulated = PeerMemory(bytes(16), 1 << 20, DESCRIPTOR[:3] + b"\x01" + DESCRIPTOR[4:])
    worker = Worker("rc_mlx5")
    with pytest.raises(ConnectionError, match="the peer serves emulated lanes"):
        await backend(worker).connect(emulated)
    assert not worker.open
    await backend(Worker("tcp"), emulated="tcp").connect(emulated)


@pytest.mark.parametrize("version", [(1, 19, 0), (1, 30, 1)])
async def test_versions_of_one_major_meet(version: tuple[int, int, int]) -> None:
    await backend(Worker("rc_verbs"), version=version).connect(PEER)


def test_policy_wins_over_settings_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_KEEPALIVE_INTERVAL", "7s")
    assert "UCX_TLS" not in os.environ
    chosen = UcxBackend({"UCX_TLS": "tcp", "UCX_PROTO_EMULATION_ENABLE": "y", "UCX_RC_TX_QUEUE_LEN": "64"})._settings()
    assert chosen == {"TLS": "rc,dc,srd", "PROTO_EMULATION_ENABLE": "n", "RC_TX_QUEUE_LEN": "64"}
    tested = UcxBackend({"emulated": "tcp", "UCX_TLS": "all"})._settings()
    assert tested == {"TLS": "tcp", "NET_DEVICES": "lo", "TCP_TX_SEG_SIZE": "64K"}
