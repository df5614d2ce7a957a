"""Requests that no client of ours would send, for every method of a gRPC service: noise, random fields, damage.

Deterministic in its seed. Calls are made with raw bytes, so what is no message of the method reaches the server as well.

    async for call in attacks(channel, directory_pb2, seed=1, each=20):
        assert call.code in HONEST
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.message import Message

CALL_S = 10.0
"""A call that has not ended by then hangs, unless it is a stream that waits for more."""

BUGS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS})
"""What a server may never answer, whatever it was sent."""

_NUMBERS = (0, 1, 2, 7, 255, 4096, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_DEPTH = 4
_ENDED_WHILE_WRITING = "Internal error from Core"
"""What grpc.aio's client makes up when a stream ends under its write; the server's status is lost then."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One call and how it ended. code: of what the server answered; DEADLINE_EXCEEDED of a stream that was left open."""

    method: str
    sent: tuple[bytes, ...]
    code: grpc.StatusCode
    details: str
    streams: bool


async def attacks(channel: grpc.aio.Channel, module: ModuleType, *, seed: int, each: int) -> AsyncIterator[Attack]:
    """`each` calls of every method of every service in a generated *_pb2 module."""
    chance = random.Random(seed)
    for service in module.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            path = f"/{service.full_name}/{method.name}"
            for requests in list(_requests(chance, method, each)):
                yield await _call(channel, path, method, requests)


def random_message(chance: random.Random, descriptor: Any, *, depth: int = 0) -> Message:
    """Some fields set to values at the edges of their types, lists and nested messages included."""
    made: Message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if chance.random() < 0.4:
            continue
        if field.label == field.LABEL_REPEATED:
            values = [_value(chance, field, depth) for _ in range(chance.choice((0, 1, 3)))]
            kept = [value for value in values if value is not None]
            if not field.message_type or not field.message_type.GetOptions().map_entry:
                getattr(made, field.name).extend(kept)
        elif (value := _value(chance, field, depth)) is None:
            continue
        elif field.message_type:
            getattr(made, field.name).CopyFrom(value)
        else:
            setattr(made, field.name, value)
    return made


def damaged(chance: random.Random, whole: bytes) -> bytes:
    """Bits flipped, cut, or with more behind."""
    out = bytearray(whole)
    for _ in range(chance.randint(0, 4)):
        if out:
            out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    if chance.random() < 0.3:
        del out[chance.randint(0, len(out)) :]
    if chance.random() < 0.2:
        out += chance.randbytes(chance.randint(1, 40))
    return bytes(out)


def _requests(chance: random.Random, method: Any, each: int) -> Iterator[tuple[bytes, ...]]:
    for number in range(each):
        count = chance.randint(1, 3) if method.client_streaming else 1
        sent = []
        for _ in range(count):
            whole = random_message(chance, method.input_type).SerializeToString()
            sent.append((whole, damaged(chance, whole), chance.randbytes(chance.randint(0, 200)))[number % 3])
        yield tuple(sent)


def _value(chance: random.Random, field: Any, depth: int) -> Any:
    """None: too deep, or a kind that has no value here."""
    kind = field.cpp_type
    match kind:
        case field.CPPTYPE_MESSAGE:
            return random_message(chance, field.message_type, depth=depth + 1) if depth < _DEPTH else None
        case field.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case field.CPPTYPE_ENUM:
            return chance.choice([value.number for value in field.enum_type.values])
        case field.CPPTYPE_DOUBLE | field.CPPTYPE_FLOAT:
            return chance.choice((0.0, -1.0, 1e300, float("inf"), float("nan")))
        case field.CPPTYPE_STRING if field.type == field.TYPE_BYTES:
            return chance.randbytes(chance.choice((0, 1, 16, 32, 33, 96)))
        case field.CPPTYPE_STRING:
            return chance.choice(("", "a", "n" * 300, "\0", "../x", "é\n", "%s", "127.0.0.1:1"))
    bits = 32 if kind in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 64
    signed = kind in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
    number = chance.choice((*_NUMBERS, chance.getrandbits(bits))) % 2**bits
    return number - 2 ** (bits - 1) if signed else number


async def _call(channel: Any, path: str, method: Any, requests: tuple[bytes, ...]) -> Attack:
    """channel: of grpc.aio, whose types know no call without serializers."""
    streams = bool(method.client_streaming or method.server_streaming)
    code, details = grpc.StatusCode.OK, ""
    limit_s = 0.2 if streams else CALL_S
    try:
        if method.client_streaming:
            async for _ in channel.stream_stream(path)(iter(requests), timeout=limit_s):
                pass
        elif method.server_streaming:
            async for _ in channel.unary_stream(path)(requests[0], timeout=limit_s):
                pass
        else:
            await channel.unary_unary(path)(requests[0], timeout=limit_s)
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or ""
        if details == _ENDED_WHILE_WRITING:
            code = grpc.StatusCode.CANCELLED
    return Attack(path, requests, code, details, streams)
