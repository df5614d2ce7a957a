"""A bad network between two ends of a TCP connection, inside the test's event loop: cut one way, slow, lossy, reset.

    async with link_to("127.0.0.1", port) as link:
        descriptor = ... link.port ...
        link.down.cut()          # requests still arrive, answers do not
        link.down.restore()

What a cut or a lost packet does to a stream is that its bytes come later, or never, while both ends believe to be connected:
so a direction holds bytes back, and restoring it delivers them, as retransmission would. Real packets are dropped in
tests/fault/test_network.py, where network namespaces are allowed; this runs everywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

PIECE_BYTES = 64 << 10


class Direction:
    """One way through a link. passed_bytes: so far."""

    def __init__(self, seed: int) -> None:
        self.passed_bytes = 0
        self._open = asyncio.Event()
        self._open.set()
        self._left_bytes: int | None = None
        self._loss, self._retransmit_s = 0.0, 0.0
        self._random = random.Random(seed)

    def cut(self, *, after_bytes: int = 0) -> None:
        """Nothing passes any more, once so many further bytes have."""
        self._left_bytes = after_bytes
        if not after_bytes:
            self._open.clear()

    def lose(self, share: float, *, retransmit_s: float = 0.2) -> None:
        """This share of pieces is lost and comes a retransmission later (RFC 6298: 200 ms at least on Linux)."""
        self._loss, self._retransmit_s = share, retransmit_s

    def restore(self) -> None:
        self._left_bytes, self._loss = None, 0.0
        self._open.set()

    async def carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Until either end is gone."""
        while piece := await source.read(PIECE_BYTES):
            if self._random.random() < self._loss:
                await asyncio.sleep(self._retransmit_s)
            while piece:
                await self._open.wait()
                now, piece = self._admit(piece)
                sink.write(now)
                self.passed_bytes += len(now)
                await sink.drain()

    def _admit(self, piece: bytes) -> tuple[bytes, bytes]:
        if self._left_bytes is None:
            return piece, b""
        now, rest = piece[: self._left_bytes], piece[self._left_bytes :]
        self._left_bytes -= len(now)
        if not self._left_bytes:
            self._open.clear()
        return now, rest


class Link:
    """up: from who connects to whom it is connected to. down: back."""

    def __init__(self, host: str, port: int) -> None:
        self.port = 0
        self.up, self.down = Direction(1), Direction(2)
        self._target = host, port
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()

    @property
    def connections(self) -> int:
        """Under way."""
        return len(self._pairs)

    def reset(self) -> None:
        """Both ends of every connection get a reset."""
        for pair in tuple(self._pairs):
            for writer in pair:
                writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._pairs.add(pair)
        ways = (self.up.carry(reader, far_writer), self.down.carry(far_reader, writer))
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError, ConnectionError):
                    await task
            self._pairs.discard(pair)
            for end in pair:
                end.transport.abort()


@asynccontextmanager
async def link_to(host: str, port: int) -> AsyncIterator[Link]:
    """A link on a free port of 127.0.0.1 to `host`:`port`."""
    link = Link(host, port)
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await link.serve(reader, writer)
        finally:
            serving.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    link.port = server.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        server.close()
        link.reset()
        for direction in (link.up, link.down):
            direction.restore()
        if serving:
            await asyncio.wait(serving)
        await server.wait_closed()
