"""What losing the coordinator that a client asks costs the lookup under way and the next ones, as JSON. Three real processes.

    python bench/failover.py [--rounds N]

Each round: a client that has been answered by its first coordinator; then that one is killed (SIGKILL), stopped (SIGSTOP), or
made slow (its answers take 300 ms), and the client asks again at once. `first_ms` is that lookup, `next_ms` the twenty after
it, `calm_ms` those before. Deadline 2 s. All processes share this machine; how busy it is shows in calm_ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvdir.client.aio import DirectoryClient
from kvdir.client.sync import Client
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints
from peer_agent.testing.coordinators import Coordinators, coordinators, publishing_everywhere
from peer_agent.testing.link import Link, link_to

BLOCKS = some_fingerprints(1024)
DEADLINE_S, SLOW_S = 2.0, 0.3
CALM, AFTER = 10, 20
FAULTS = ("killed", "stopped", "slow")

Ask = Callable[[], Awaitable[Any]]


async def timed(ask: Ask) -> float:
    """Milliseconds of one lookup that finds everything; an error ends the run."""
    began_s = time.perf_counter()
    answer = await ask()
    assert answer.hits == len(BLOCKS) or answer.warming, answer
    return (time.perf_counter() - began_s) * 1e3


async def one_round(kind: str, fault: str, trio: Coordinators, link: Link) -> dict[str, list[float]]:
    addresses = [f"127.0.0.1:{link.port}", *trio.addresses[1:]]
    async with AsyncExitStack() as stack:
        if kind == "aio":
            client = await stack.enter_async_context(DirectoryClient(addresses, deadline_s=DEADLINE_S))
            ask: Ask = lambda: client.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS)  # noqa: E731
        else:
            blocking = stack.enter_context(Client(addresses, deadline_s=DEADLINE_S))
            ask = lambda: asyncio.to_thread(blocking.lookup, EXAMPLE_NAMESPACE.digest, BLOCKS)  # noqa: E731
        await timed(ask)
        calm = [await timed(ask) for _ in range(CALM)]
        if fault == "killed":
            await trio.kill(0)
        elif fault == "stopped":
            trio.stop(0)
        else:
            link.down.lose(1.0, retransmit_s=SLOW_S)
        first = await timed(ask)
        after = [await timed(ask) for _ in range(AFTER)]
    if fault == "killed":
        await trio.start_again(0)
        await trio.synced(0, streams=1)
    elif fault == "stopped":
        trio.go_on(0)
    link.down.restore()
    return {"calm_ms": calm, "first_ms": [first], "next_ms": after}


async def measure(rounds: int) -> list[dict[str, Any]]:
    rows = []
    async with coordinators(3) as trio, publishing_everywhere(trio.addresses, "n1") as node:
        node.store(BLOCKS)
        await node.synced()
        host, _, port = trio.addresses[0].rpartition(":")
        for fault in FAULTS:
            for kind in ("aio", "sync"):
                taken: dict[str, list[float]] = {"calm_ms": [], "first_ms": [], "next_ms": []}
                for _ in range(rounds):
                    async with link_to(host, int(port)) as link:
                        for name, values in (await one_round(kind, fault, trio, link)).items():
                            taken[name] += values
                figures = {name: {"p50": at(values, 50), "p99": at(values, 99)} for name, values in taken.items()}
                rows.append({"client": kind, "first coordinator": fault, "rounds": rounds, **figures})
    return rows


def at(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, -(-percent * len(ordered) // 100) - 1)], 2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args()
    print(json.dumps({"bench": "failover", "deadline_s": DEADLINE_S, "rows": asyncio.run(measure(chosen.rounds))}, indent=2))
