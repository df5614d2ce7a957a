"""Noise and damaged requests at the HTTP ports of a coordinator: an answer of ours or a closed connection, and it serves on."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from kvdir.testing.fuzz import damaged
from kvdir.testing.served import FAST_CONFIG, serving

ROUNDS = 150
ANSWER_S = 20.0
WHOLE = (
    b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/openmetrics-text\r\n\r\n",
    b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"POST /query HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 40\r\n\r\n" + b'{"model":"m","tokens":[1,2,3],"x":null} ',
    b"POST /register HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    b"HEAD / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: keep-alive\r\n\r\n",
)


async def said(address: str, words: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(ANSWER_S):
            writer.write(words)
            writer.write_eof()
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(("port", "alive"), [("http", b"/healthz"), ("indexer", b"/health")])
async def test_port_answers_or_closes_and_serves_on_when_it_is_sent_noise(port: str, alive: bytes) -> None:
    chance = random.Random(3)
    async with serving(replace(FAST_CONFIG, indexer_listen="127.0.0.1:0")) as served:
        address = str(getattr(served, port))
        noise = [chance.randbytes(chance.randint(0, 400)) for _ in range(ROUNDS // 4)]
        sent = noise + [damaged(chance, chance.choice(WHOLE)) for _ in range(ROUNDS)]
        answers = await asyncio.gather(*(said(address, words) for words in sent))  # who says half a head waits for its end
        for words, answer in zip(sent, answers, strict=True):
            assert b" 500 " not in answer.partition(b"\r\n")[0], words
        healthy = await said(
            address, b"GET " + alive + b" HTTP/1.1\r\nHost: " + address.encode() + b"\r\nConnection: close\r\n\r\n"
        )
        assert b" 200 " in healthy.partition(b"\r\n")[0]
