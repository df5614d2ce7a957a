"""A load generator for LookupStream that costs next to nothing: ready-made bytes out, nothing read of what comes back.

    python -m kvdir.cli.bench_lookup_load       started by bench_lookup.py

Owns: connections to chosen processes behind one address (they say who they are in the initial metadata), WINDOW messages of
PER_MESSAGE lookups under way on each. Reads a Plan (JSON, one line), connects, says {}, reads a line, measures, and
says lookups, seconds, cpu_s (its own) and server_cpu_s.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Any

import msgspec

from kvdir.cli.bench_process import cpu_s
from kvdir.client.lookup_stream import METHOD
from kvdir.core.answer import LookupMode
from kvdir.fingerprint import Fingerprints
from kvdir.rpc.channel import client_options
from kvdir.rpc.lookup_codec import encode_lookup_request
from kvdir.rpc.tls import PLAINTEXT
from kvdir.v1 import directory_pb2

PER_MESSAGE = 16
WINDOW = 2
TRIES = 400
WARM_S = 0.5


class Plan(msgspec.Struct, frozen=True):
    """processes: how many connections to which. packed: one list of fingerprints. servers: process ids, for their CPU time."""

    address: str
    namespace_digest: bytes
    packed: bytes
    width: int
    processes: dict[str, int]
    seconds: float
    servers: list[int]


async def run(plan: Plan) -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        calls = await _calls(plan, stack)
        request = encode_lookup_request(
            plan.namespace_digest, Fingerprints(plan.packed, plan.width), mode=LookupMode.SPARSE, touch=False
        )
        lookups = [directory_pb2.StreamedLookup(id=number, lookup=request) for number in range(PER_MESSAGE)]
        message = directory_pb2.LookupStreamRequest(lookups=lookups).SerializeToString()
        answered = [0]
        say({})
        await asyncio.to_thread(sys.stdin.buffer.readline)
        work = [asyncio.create_task(_ask(call, message, answered)) for call in calls]
        await asyncio.sleep(WARM_S)
        began, began_s, own_s, servers_s = answered[0], time.perf_counter(), time.process_time(), sum(map(cpu_s, plan.servers))
        await asyncio.sleep(plan.seconds)
        figures = {
            "lookups": float((answered[0] - began) * PER_MESSAGE),
            "seconds": time.perf_counter() - began_s,
            "cpu_s": time.process_time() - own_s,
            "server_cpu_s": sum(map(cpu_s, plan.servers)) - servers_s,
        }
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        return figures


async def _calls(plan: Plan, stack: contextlib.AsyncExitStack) -> list[Any]:
    wanted = dict(plan.processes)
    calls: list[Any] = []
    options = client_options()
    for _ in range(TRIES):
        if not any(wanted.values()):
            return calls
        channel = PLAINTEXT.aio(plan.address, options=options)
        call: Any = channel.stream_stream(METHOD)()
        process = str(dict(await call.initial_metadata()).get("kvdir-process"))
        if wanted.get(process):
            wanted[process] -= 1
            stack.push_async_callback(channel.close)
            calls.append(call)
        else:
            call.cancel()
            await channel.close()
    raise SystemExit(f"no connection to {wanted} in {TRIES} tries")


async def _ask(call: Any, message: bytes, answered: list[int]) -> None:
    """A message is answered as one here, because everything in it was ready at once."""
    for _ in range(WINDOW):
        await call.write(message)
    async for _ in call:
        answered[0] += 1
        await call.write(message)


def say(figures: dict[str, float]) -> None:
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    say(asyncio.run(run(msgspec.json.decode(sys.stdin.buffer.readline(), type=Plan))))
