"""Several coordinators as real processes, and nodes that publish to each of them: for tests of losing one.

async with coordinators(3) as trio, publishing_everywhere(trio.addresses, "n1") as node:
    node.store(blocks)
    await trio.restart(0)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from kvdir.client.aio import DirectoryClient
from kvdir.core.diff import Verdict, compare, worst
from kvdir.errors import KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.testing.fake_node import FakeNode
from kvdir.testing.wait import POLL_S
from peer_agent.demo.processes import Child

READY_S = 20.0
GRACE_S = 5.0
SETTINGS = ("--http-listen", "", "--heartbeat-interval-ms", "100", "--grace-s", "1")


class Coordinators:
    """Use `coordinators`. addresses: the same before and after a restart."""

    def __init__(self, work: Path, settings: Sequence[str]) -> None:
        self.addresses: list[str] = []
        self._children: list[Child] = []
        self._work = work
        self._settings = settings

    async def start(self, count: int) -> None:
        self._children = list(await asyncio.gather(*(self._start(number) for number in range(count))))
        self.addresses = [str(child.ready["grpc"]) for child in self._children]

    async def kill(self, number: int) -> None:
        """SIGKILL."""
        await self._children[number].kill()

    async def end(self, number: int) -> None:
        """SIGTERM, and waits until it has ended."""
        await self._children[number].end(grace_s=GRACE_S)

    async def start_again(self, number: int) -> None:
        """At its old address; ready, but it may know nothing."""
        self._children[number] = await self._start(number, listen=self.addresses[number])

    def stop(self, number: int) -> None:
        """SIGSTOP: connected, and silent."""
        os.kill(self._children[number].pid, signal.SIGSTOP)

    def go_on(self, number: int) -> None:
        os.kill(self._children[number].pid, signal.SIGCONT)

    async def synced(self, number: int, streams: int, *, within_s: float = 20.0) -> None:
        """Until that coordinator calls so many streams synced and is not warming."""
        async with DirectoryClient(self.addresses[number]) as client, asyncio.timeout(within_s):
            while True:
                with contextlib.suppress(KvdirError):
                    status = await client.status()
                    if status.streams_synced == streams and not status.warming:
                        return
                await asyncio.sleep(POLL_S)

    async def equal(self, *, within_s: float = 20.0) -> None:
        """Until all believe the same, by digest."""
        async with contextlib.AsyncExitStack() as stack:
            clients = {item: await stack.enter_async_context(DirectoryClient(item)) for item in self.addresses}
            verdict = Verdict.DIFFERENT
            try:
                async with asyncio.timeout(within_s):
                    while verdict is not Verdict.EQUAL:
                        views = await asyncio.gather(*(client.digests() for client in clients.values()))
                        verdict = worst(compare(dict(zip(clients, views, strict=True))))
                        await asyncio.sleep(POLL_S)
            except TimeoutError:
                raise AssertionError(f"not equal within {within_s:g} s: {verdict}") from None

    async def close(self) -> None:
        for number, child in enumerate(self._children):
            if child.running:
                self.go_on(number)
        await asyncio.gather(*(child.end(grace_s=GRACE_S) for child in self._children))

    async def _start(self, number: int, *, listen: str = "127.0.0.1:0") -> Child:
        arguments = ["-m", "kvdir", "serve", "--listen", listen, "--output", "json", *self._settings]
        name = f"coordinator-{number}"
        return await Child.start(name, arguments, log=self._work / f"{name}.log", ready_s=READY_S)


@contextlib.asynccontextmanager
async def coordinators(count: int, *more: str) -> AsyncIterator[Coordinators]:
    """more: settings of each, beside those of tests (heartbeats of 100 ms, no http)."""
    with tempfile.TemporaryDirectory(prefix="kvdir-test-") as work:
        made = Coordinators(Path(work), (*SETTINGS, *more))
        try:
            await made.start(count)
            yield made
        finally:
            await made.close()


class NodeEverywhere:
    """One node, one outbox, one publisher for each coordinator."""

    def __init__(self, parts: Sequence[FakeNode]) -> None:
        self.parts = parts

    def store(self, fingerprints: Fingerprints) -> None:
        self.parts[0].store(fingerprints)

    def remove(self, fingerprints: Fingerprints) -> None:
        self.parts[0].remove(fingerprints)

    async def synced(self) -> None:
        """At every coordinator."""
        await asyncio.gather(*(part.synced() for part in self.parts))


@contextlib.asynccontextmanager
async def publishing_everywhere(addresses: Sequence[str], name: str) -> AsyncIterator[NodeEverywhere]:
    """Publishes while entered; ends without a goodbye."""
    async with contextlib.AsyncExitStack() as stack:
        first = FakeNode(addresses[0], name)
        parts = [first, *(FakeNode(address, name, epoch=first.epoch, outbox=first.outbox) for address in addresses[1:])]
        for part in parts:
            part.held = first.held
            await stack.enter_async_context(part)
        yield NodeEverywhere(parts)
