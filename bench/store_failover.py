"""What losing a coordinator of a shared store costs: after how long a stream goes on at another one, what lookups do meanwhile.

Two coordinator processes over one Redis, heartbeats of a second as configured by default; a node that publishes all the time, a
client that asks all the time. One coordinator is killed, or stopped; in the last row the Redis server itself is stopped for two
seconds. Everything shares one machine, so the figures are upper bounds.

    python bench/store_failover.py --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from kvdir.client.aio import DirectoryClient
from kvdir.client.standby import Standby
from kvdir.location import StreamState
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.redis_servers import Server, redis_server
from kvdir.testing.wait import eventually
from peer_agent.testing.coordinators import Coordinators, coordinators

BASE = some_fingerprints(1024)
SETTINGS = ("--heartbeat-interval-ms", "1000")
Figures = dict[str, list[float]]


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[tuple[Server, Coordinators, list[FakeNode], Figures]]:
    """A Redis, two coordinators, one node under way, lookups under way; figures of the lookups, in seconds."""
    with redis_server() as server:
        async with coordinators(2, "--store", server.url, *SETTINGS) as both:
            standby = Standby()
            first = FakeNode(both.addresses[0], "n", standby=standby)
            second = first.also(both.addresses[1], standby)
            figures: Figures = {"lookup_s": [], "misses": [0]}
            async with first, second:
                await eventually(lambda: speaker([first, second]) is not None, what="one speaks")
                first.store(BASE)
                await asyncio.sleep(5)  # until the saved position has come along
                work = [asyncio.create_task(item) for item in (ask(both, figures), publish(first))]
                try:
                    await asyncio.sleep(0.5)
                    yield server, both, [first, second], figures
                finally:
                    for task in work:
                        task.cancel()
                    await asyncio.gather(*work, return_exceptions=True)


def speaker(voices: list[FakeNode]) -> FakeNode | None:
    stats = {voice: voice.publisher.stats() for voice in voices}
    whole = [voice for voice, item in stats.items() if item.connected and item.state is StreamState.SYNCED]
    return whole[0] if len(whole) == 1 and any(item.standby for item in stats.values()) else None


async def ask(both: Coordinators, figures: Figures) -> None:
    async with DirectoryClient(both.addresses) as client:
        while True:
            began_s = time.monotonic()
            answer = await client.lookup(EXAMPLE_NAMESPACE.digest, BASE, deadline_s=2.0)
            figures["lookup_s"].append(time.monotonic() - began_s)
            figures["misses"][0] += answer.hits == 0
            await asyncio.sleep(0.005)


async def publish(node: FakeNode) -> None:
    for seed in itertools.count(1):
        node.store(some_fingerprints(20, seed=seed))
        node.remove(some_fingerprints(20, seed=seed - 10))
        await asyncio.sleep(0.02)


async def lose(how: Callable[[Coordinators, int], Coroutine[Any, Any, None]]) -> tuple[float, Figures]:
    """Seconds until another coordinator has taken the stream and calls it synced."""
    async with world() as (_, both, voices, figures):
        speaking = speaker(voices)
        assert speaking is not None
        other = next(voice for voice in voices if voice is not speaking)
        began_s = time.monotonic()
        await how(both, both.addresses.index(speaking.publisher.stats().address))
        await eventually(lambda: other.state is StreamState.SYNCED, what="the other one has taken over")
        took_s = time.monotonic() - began_s
        snapshots = sum(voice.publisher.stats().snapshots for voice in voices)
        figures["snapshots"] = [float(snapshots)]
        await asyncio.sleep(0.5)
        return took_s, figures


async def kill(both: Coordinators, number: int) -> None:
    await both.kill(number)


async def stop(both: Coordinators, number: int) -> None:
    both.stop(number)


async def stopped_server() -> tuple[float, Figures]:
    """Seconds from when it goes on until the stream is synced again."""
    async with world() as (server, _, voices, figures):
        server.pause()
        await asyncio.sleep(2)
        server.resume()
        began_s = time.monotonic()
        node = voices[0]

        def caught_up() -> bool:
            stats = [voice.publisher.stats() for voice in voices]
            return any(item.state is StreamState.SYNCED and node.outbox.last_seq - item.acked_seq < 20 for item in stats)

        await eventually(caught_up, what="the stream is synced")
        took_s = time.monotonic() - began_s
        figures["snapshots"] = [float(sum(voice.publisher.stats().snapshots for voice in voices))]
        return took_s, figures


async def main(rounds: int) -> None:
    print("| what happens | stream goes on after, median (worst) | slowest lookup | lookups without hits | of | snapshots |")
    print("|---|---|---|---|---|---|")
    cases = [
        ("its coordinator is killed", lambda: lose(kill)),
        ("its coordinator is stopped (SIGSTOP)", lambda: lose(stop)),
        ("the Redis server is stopped for 2 s", stopped_server),
    ]
    for name, run in cases:
        results = [await run() for _ in range(rounds)]
        took = sorted(took_s for took_s, _ in results)
        lookups = [value for _, figures in results for value in figures["lookup_s"]]
        misses = sum(int(figures["misses"][0]) for _, figures in results)
        snapshots = sum(int(figures["snapshots"][0]) for _, figures in results)
        print(
            f"| {name} | {took[len(took) // 2]:.2f} s ({took[-1]:.2f} s) | {max(lookups) * 1000:.0f} ms | {misses:,} | "
            f"{len(lookups):,} | {snapshots} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(main(parser.parse_args().rounds))
