"""Names of peers: some never resolve, and hold up nothing but other names."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from peer_agent.transport import names
from peer_agent.transport.names import MOST_LOOKUPS, Names


class SilentNames:
    """In place of the system's lookup: names that begin with "silent" are answered once `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked: Counter[str] = Counter()

    def getaddrinfo(self, host: str, port: None, *, type: int) -> list[tuple[object, ...]]:
        self.asked[host] += 1
        if host.startswith("silent"):
            assert self.answers.wait(30)
        if host == "nobody":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 6, "", ("192.0.2.7", 0))]


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentNames]:
    silent = SilentNames()
    monkeypatch.setattr(names.socket, "getaddrinfo", silent.getaddrinfo)
    yield silent
    silent.answers.set()


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


async def test_names_resolve_and_addresses_ask_nobody(system: SilentNames) -> None:
    found = Names()
    assert await found.resolve("::1", until_s=soon()) == "::1"
    assert not system.asked
    assert await found.resolve("node-7", until_s=soon()) == "192.0.2.7"
    with pytest.raises(ConnectionError, match=r"'nobody'.*not known.*advertise an address"):
        await found.resolve("nobody", until_s=soon())


async def test_lookups_are_few_and_end_by_their_deadline_when_names_never_resolve(system: SilentNames) -> None:
    found = Names()
    wanted = [f"silent-{number % 10}" for number in range(40)]
    ends = await asyncio.gather(*(found.resolve(host, until_s=soon(0.05)) for host in wanted), return_exceptions=True)
    assert all(isinstance(end, ConnectionError) and "no answer in time" in str(end) for end in ends)
    assert system.asked.total() == len(system.asked) == MOST_LOOKUPS, "each name once, and no more at a time"

    assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 20) == "free", "the loop's own threads are nobody's here"
    assert await found.resolve("192.0.2.9", until_s=soon(0.0)) == "192.0.2.9"
    waiting = asyncio.create_task(found.resolve("node-8", until_s=soon()))
    await asyncio.sleep(0)
    assert "node-8" not in system.asked
    system.answers.set()
    assert await waiting == "192.0.2.7", "its turn comes when another lookup has ended"
