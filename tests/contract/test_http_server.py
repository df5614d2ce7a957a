"""The HTTP server of the indexer as connections find it: bounds, deadlines, and whatever bytes come."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import uvloop

from kvdir.errors import ConfigError
from kvdir.server.http_server import HttpLimits, HttpServer, Request, Response
from kvdir.testing.indexing import call
from kvdir.testing.wait import eventually


@dataclass(frozen=True)
class Api:
    address: str
    server: HttpServer


async def answered(request: Request) -> Response:
    """What is no POST is well; a POST has a body that is not wanted."""
    if request.target == "/never":
        await asyncio.Event().wait()
    if request.target == "/large":
        return Response(200, bytes(32 * 2**20))
    if request.target == "/bug":
        raise RuntimeError("a bug")
    if request.method == "POST":
        return Response(400, b'{"error": "not wanted"}\n')
    return Response(200, b'{"status": "ok"}\n')


@contextlib.asynccontextmanager
async def api(limits: HttpLimits | None = None) -> AsyncIterator[Api]:
    server = HttpServer(answered, limits or HttpLimits())
    port = await server.start("127.0.0.1", 0, setting="indexer_listen")
    try:
        yield Api(f"127.0.0.1:{port}", server)
    finally:
        await server.close()


async def raw(address: str, sent: bytes, *, end: bool = False) -> bytes:
    """What comes back on a connection of its own, until the server closes it."""
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        if end:
            writer.write_eof()
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /health HTTP/3.0\r\n\r\n", b"400"),
        (b"GET health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nbad header\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nA: b\rTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nA: b\0\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nA: " + b"x" * 20_000 + b"\r\n\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\n" + b"A: x\r\n" * 4_000 + b"\r\n", b"431"),
        (b"POST /query HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"411"),
        (b"POST /query HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
        (b"POST /query HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /query HTTP/1.1\r\nContent-Length: 9999\r\n\r\n", b"413"),
        (b"POST /query HTTP/1.1\r\nContent-Length: 10\r\n\r\nslow", b"408"),
        (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
        (b"\r\nGET /health HTTP/1.1\nConnection: close\n\n", b"200"),
        (b"HEAD /health HTTP/1.1\r\nConnection: close\r\n\r\n", b"200"),
    ],
)
async def test_connection_is_answered_and_closed_when_it_brings_nonsense_or_wants_it(sent: bytes, status: bytes) -> None:
    async with api(HttpLimits(body_bytes=4096, request_s=0.3)) as it:
        answer = await raw(it.address, sent)
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"Connection: close" in answer
        assert answer.endswith(b"\r\n\r\n") == sent.startswith(b"HEAD")


async def test_connection_serves_one_call_after_the_other_when_it_stays_open() -> None:
    async with api() as it:
        host, _, port = it.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\n\r\n" * 2)
        for _ in range(2):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"}\n")
        writer.write(b"POST /query HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_idle_connections_are_bounded_and_closed_when_they_are_many() -> None:
    async with api(HttpLimits(connections=20, idle_s=0.5)) as it:
        host, _, port = it.address.partition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(60)]
        first_words = await asyncio.gather(*(reader.read() for reader, _ in idle))
        refused = [words for words in first_words if words]
        assert len(refused) == 40
        assert all(b"503" in words and b"20 connections are open" in words for words in refused)
        assert (await call(it.address, "/health"))[0] == 200
        for _, writer in idle:
            writer.close()


async def test_silent_connections_give_way_when_they_are_too_many() -> None:
    async with api(HttpLimits(connections=5, idle_s=60.0, yield_s=0.0)) as it:
        host, _, port = it.address.partition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        await eventually(lambda: it.server.connections == 5)
        assert (await call(it.address, "/health"))[0] == 200
        assert await silent[0][0].read() == b"", "the first that came is the first that goes"
        assert not any(reader.at_eof() for reader, _ in silent[1:])
        for _, writer in silent:
            writer.close()


async def test_calls_are_answered_when_slow_clients_hold_every_place_for_large_bodies() -> None:
    async with api(HttpLimits(request_s=1.0)) as it:
        slow = [
            asyncio.create_task(raw(it.address, b"POST /query HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")) for _ in range(8)
        ]
        assert (await call(it.address, "/health"))[0] == 200
        answers = await asyncio.gather(*slow)
        assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
        assert (await call(it.address, "/query", b" " * 200_000 + b"{}"))[0] == 400


async def test_head_is_read_at_once_when_a_value_is_thousands_of_spaces() -> None:
    async with api() as it:
        async with asyncio.timeout(1.0):
            head = b"GET /health HTTP/1.1\r\nConnection: close\r\nA: b" + b" " * 16_000 + b"b\r\n\r\n"
            assert (await raw(it.address, head)).startswith(b"HTTP/1.1 200")


async def test_others_have_their_turn_when_a_client_sends_many_calls_at_once() -> None:
    turns, at = 0, []

    async def answer(request: Request) -> Response:
        at.append(turns)
        return Response(200, b"{}")

    server = HttpServer(answer, HttpLimits())
    host, port = "127.0.0.1", await server.start("127.0.0.1", 0, setting="indexer_listen")
    _, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /health HTTP/1.1\r\n\r\n" * 300)
    while len(at) < 300:
        turns += 1
        await asyncio.sleep(0)
    assert len(set(at)) == 300
    writer.close()
    await server.close()


class Watched(HttpServer):
    """Lets a test see when a connection is gone."""

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers = [writer]
        super()._connected(reader, writer)


def test_nothing_is_wrong_when_a_client_resets_its_connection_before_the_answer() -> None:
    async def reset() -> BaseException | None:
        asked, gone = asyncio.Event(), asyncio.Event()

        async def answer(request: Request) -> Response:
            asked.set()
            await gone.wait()
            return Response(200, b"{}")

        server = Watched(answer, HttpLimits())
        port = await server.start("127.0.0.1", 0, setting="indexer_listen")
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            await asked.wait()
        (connection,) = server._connections
        await eventually(server.writers[0].is_closing)
        gone.set()
        await asyncio.wait({connection}, timeout=10)
        await server.close()
        return connection.exception()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as coordinators run
        assert runner.run(reset()) is None


async def test_refusal_is_read_when_the_client_sends_the_whole_body_first() -> None:
    async with api(HttpLimits(body_bytes=4096)) as it:
        status, words = await call(it.address, "/query", b" " * 4_000_000)
        assert status == 413
        assert "at most 4096" in words


async def test_connection_is_given_up_when_the_client_does_not_read_its_answer() -> None:
    async with api(HttpLimits(write_s=0.2)) as it:
        host, _, port = it.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /large HTTP/1.1\r\n\r\n")
        await eventually(lambda: it.server.connections == 1)
        await eventually(lambda: it.server.connections == 0)
        with contextlib.suppress(ConnectionError):
            taken = len(await reader.read())
            assert 0 < taken < 32 * 2**20
        writer.close()


async def test_client_is_told_when_its_answer_does_not_come() -> None:
    async with api(HttpLimits(answer_s=0.2)) as it:
        status, words = await call(it.address, "/never")
        assert status == 504
        assert "no answer within" in words


async def test_server_goes_on_when_clients_send_whatever_they_like() -> None:
    rng = random.Random(7)
    whole = b"POST /query HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 40\r\n\r\n" + b"[" * 40
    sent = [rng.randbytes(rng.randrange(1, 400)) for _ in range(30)]
    sent += [whole[: rng.randrange(1, len(whole))] for _ in range(30)]
    for _ in range(60):  # a few bytes are others
        broken = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        sent.append(bytes(broken))
    async with api(HttpLimits(request_s=0.3, idle_s=0.3)) as it:
        answers = await asyncio.gather(*(raw(it.address, item, end=True) for item in sent))
        for item, answer in zip(sent, answers, strict=True):
            assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 100")), (item, answer)
            assert b" 500 " not in answer
        assert (await call(it.address, "/health"))[0] == 200
        await eventually(lambda: it.server.connections == 0)


async def test_port_that_is_taken_is_named_when_the_server_starts() -> None:
    async with api() as it:
        with pytest.raises(ConfigError, match=r"indexer_listen: .* cannot be used"):
            await HttpServer(answered, HttpLimits()).start(
                "127.0.0.1", int(it.address.partition(":")[2]), setting="indexer_listen"
            )


async def test_bug_costs_its_call_only_when_an_answer_raises(caplog: pytest.LogCaptureFixture) -> None:
    async with api() as it:
        assert await call(it.address, "/bug") == (500, "internal error, logged there\n")
        assert (await call(it.address, "/health"))[0] == 200
    assert "a bug" in caplog.text
