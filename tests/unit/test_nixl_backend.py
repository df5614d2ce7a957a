"""What the nixl backend does when NIXL fails in ways that a machine without RDMA cannot show."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from peer_agent.mover.backend import Gets, PeerMemory, Unsettled
from peer_agent.mover.nixl import NixlBackend, NixlLink, Remote
from peer_agent.mover.nixl_agent import NixlError
from peer_agent.mover.nixl_lists import Grid

PEER = PeerMemory(b"p" * 16, 1 << 20, b"")
ONE = Gets(*(value.to_bytes(8, "little") for value in (4096, 1 << 20, 512)))


class Agent:
    """Answers `ended` with what the test says; releases are counted."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)
        self.released: list[int] = []
        self.removed: list[str] = []

    def prepare(self, name: str, row: tuple[int, int, int, int]) -> int:
        return 1

    def release_list(self, prepared: int) -> None: ...

    def read_prepared(self, ours: Any, theirs: Any) -> int:
        return 7

    def post(self, transfer: int) -> bool:
        return False

    def ended(self, transfer: int) -> bool:
        answer = self.answers.pop(0) if self.answers else False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def release(self, transfer: int) -> None:
        self.released.append(transfer)

    def remove(self, name: str) -> None:
        self.removed.append(name)


def link_over(agent: Agent) -> NixlLink:
    backend = NixlBackend({"emulated": "tcp"})
    backend._agent = agent  # type: ignore[assignment]
    backend._grids = [Grid(agent, "", 1 << 20, 1 << 20)]
    remote = backend._remotes[PEER] = Remote(agent, "peer-1", PEER, Grid(agent, "peer-1", 1 << 30, 1 << 20))  # type: ignore[arg-type]
    remote.links += 1
    return NixlLink(backend, remote)


async def test_gets_end_as_lost_when_the_endpoint_has_failed() -> None:
    agent = Agent(False, ConnectionError("lost"))
    link = link_over(agent)
    with pytest.raises(ConnectionError, match="lost"):
        await link.gets(ONE)
    assert link.broken
    assert agent.released == [7]
    await link.close()
    assert agent.removed == ["peer-1"]


async def test_gets_are_unsettled_when_nixl_fails_and_the_peer_is_there() -> None:
    """Other transfers of the batch may go on behind the one that failed."""
    with pytest.raises(Unsettled):
        await link_over(Agent(False, NixlError("canceled"))).gets(ONE)


async def test_close_waits_when_a_transfer_ends_by_itself() -> None:
    agent = Agent(*[False] * 20, True)
    link = link_over(agent)
    reading = asyncio.create_task(link.gets(ONE))
    await asyncio.sleep(0)
    await link.close()
    assert agent.released == [7]
    with pytest.raises(ConnectionError, match="closed"):
        await reading


async def test_close_is_unsettled_when_a_transfer_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer_agent.mover.nixl.SETTLE_S", 0.01)
    agent = Agent()
    link = link_over(agent)
    reading = asyncio.create_task(link.gets(ONE))
    await asyncio.sleep(0)
    with pytest.raises(Unsettled, match="under way"):
        await link.close()
    assert agent.removed == [], "the peer's agent stays as long as something is under way"
    reading.cancel()
    await asyncio.wait({reading})


async def test_other_links_of_a_peer_go_on_when_one_is_closed() -> None:
    agent = Agent(False, True)
    first = link_over(agent)
    first._remote.links += 1
    second = NixlLink(first._backend, first._remote)
    await first.close()
    await second.gets(ONE)


async def test_agents_of_peers_stay_known_without_links_and_the_oldest_go_when_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("peer_agent.mover.nixl.MAX_IDLE", 2)
    agent = Agent()
    backend = link_over(agent)._backend
    del backend._remotes[PEER]
    for number in (1, 2, 3):
        peer = PeerMemory(bytes([number]) * 16, 1 << 20, b"")
        grid = Grid(agent, f"peer-{number}", 1 << 30, 1 << 20)  # type: ignore[arg-type]
        remote = backend._remotes[peer] = Remote(agent, f"peer-{number}", peer, grid)  # type: ignore[arg-type]
        remote.links = 1
        await NixlLink(backend, remote).close()
    assert agent.removed == ["peer-1"]
    assert [remote.name for remote in backend._remotes.values()] == ["peer-2", "peer-3"]


def test_lanes_are_one_word_when_several_are_allowed() -> None:
    """They travel comma separated."""
    assert NixlBackend({}).lanes == ("one of rc|dc|srd",)
