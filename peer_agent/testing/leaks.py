"""Whether something that fails again and again leaves anything behind in this process: descriptors, threads, memory, tasks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from kvdir.testing.wait import eventually

SLACK: Mapping[str, int] = {"threads": 4, "descriptors": 4, "tasks": 2, "memory_pages": 1024}
"""Pools of threads (of gRPC and asyncio) follow the load, each with a descriptor; a ticker may be in a call at one count and
not at the other; allocators keep some pages. What leaks on each of a thousand repeats is more than that."""

Held = Callable[[], Mapping[str, int]]


def held_by_process() -> dict[str, int]:
    """memory_pages: private resident ones; pages of mapped files come and go with what is read."""
    maps = Path("/proc/self/maps").read_text()
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "tasks": len(asyncio.all_tasks()),
        "mapped arenas": maps.count(".arena"),
        "memory_pages": resident - shared,
    }


def descriptors() -> dict[str, str]:
    """What is open in this process, by number: `descriptors().items() - before.items()` is what was opened since, whatever
    others closed meanwhile (threads that earlier tests left close what is theirs when they will).
    """
    opened = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, and what others have just closed
            opened[number] = os.readlink(f"/proc/self/fd/{number}")
    return opened


async def expect_no_leak(
    act: Callable[[int], Awaitable[object]], *, times: int, warm_up: int, also: Held = dict, within_s: float = 5.0
) -> None:
    """Acts `times` times after a warm-up; AssertionError, with the difference, unless everything comes back.

    also: what else must not grow, for example slots and locks of an agent.
    """

    def held() -> dict[str, int]:
        gc.collect()  # what ended in a cycle
        return held_by_process() | dict(also())

    for number in range(warm_up):
        await act(number)
    before = held()
    for number in range(warm_up, warm_up + times):
        await act(number)
    allowed = {name: count + SLACK.get(name, 0) for name, count in before.items()}
    with contextlib.suppress(AssertionError):
        await eventually(lambda: all(count <= allowed[name] for name, count in held().items()), within_s=within_s)
    after = held()
    grown = {name: (before[name], count) for name, count in after.items() if count > allowed[name]}
    assert not grown, f"(before, after) {times} repeats: {grown}"
