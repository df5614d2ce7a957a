"""Rounds: in each one all subjects move the same request, one after the other, and the order turns.

Figures of one run: medians over its rounds; a ratio is the median of the ratios of its rounds, so that a busy moment of the
machine weighs on both sides. `merge` takes the median of each figure over several runs.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from peer_agent.cli.bench_read.cells import Cell, Content, Request, offsets, request, size_class
from peer_agent.cli.bench_read.subjects import Subject, SubjectFailed
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES

Row = dict[str, Any]
YARDSTICKS = ("memcpy", "raw_tcp", "raw_nixl_default", "raw_nixl", "raw_nixl_tcp", "raw_nixl_tcp_tuned", "mooncake")
"""Subjects that others are put in proportion to."""


@dataclass(slots=True)
class Samples:
    """One subject in one cell; CPU seconds are of all rounds together."""

    seconds: list[float] = field(default_factory=list)
    reader_cpu_s: float = 0.0
    owner_cpu_s: float = 0.0


class Requests:
    """Random requests of a cell."""

    def __init__(self, cell: Cell, content: Content, reader: Arena, *, capability: bytes) -> None:
        self._capability = capability
        self._cell = cell
        self._content = content
        self._random = random.Random(cell.read_bytes)
        self._destinations = offsets(size_class(reader, cell.block_bytes), range(cell.blocks))

    def next(self) -> Request:
        slots = self._random.sample(range(self._cell.slots), self._cell.blocks)
        return request(self._cell, slots, self._content, self._destinations, self._capability)


async def time_cell(
    requests: Requests,
    subjects: Sequence[Subject],
    owner: Arena,
    *,
    seconds: float,
    min_rounds: int,
    failed: Callable[[Subject, SubjectFailed], None],
) -> dict[str, Samples]:
    """Samples by subject. A subject that fails is reported once and has none; the first reads are checked byte for byte."""
    samples = {subject.name: Samples() for subject in subjects}
    order = list(subjects)

    async def turn(subject: Subject, chosen: Request, *, check: bool) -> None:
        try:
            await _one(subject, chosen, samples[subject.name])
            if check:
                _check(subject, chosen, owner)
        except SubjectFailed as error:
            failed(subject, error)
            del samples[subject.name]
            order.remove(subject)

    for subject in tuple(order):  # warm-up: connections, caches, page tables
        await turn(subject, requests.next(), check=True)
    for name in samples:
        samples[name] = Samples()
    ends = time.monotonic() + seconds
    rounds = 0
    while rounds < min_rounds or time.monotonic() < ends:
        chosen = requests.next()
        order.append(order.pop(0))
        for subject in tuple(order):
            await turn(subject, chosen, check=False)
        rounds += 1
    return samples


async def _one(subject: Subject, chosen: Request, samples: Samples) -> None:
    subject.resume()
    try:
        await asyncio.sleep(0)  # requests come one a turn of the loop, so the shm plane may copy in it
        reader, owner = cpu_s(subject.reader_pids), cpu_s(subject.owner_pids)
        samples.seconds.append(await subject.run(chosen))
        samples.reader_cpu_s += cpu_s(subject.reader_pids) - reader
        samples.owner_cpu_s += cpu_s(subject.owner_pids) - owner
    finally:
        subject.pause()


def _check(subject: Subject, chosen: Request, owner: Arena) -> None:
    landed = subject.landed(chosen)
    if landed is None:
        return
    of = size_class(owner, chosen.cell.block_bytes)
    for slot, got in zip(chosen.slots, landed, strict=True):
        at = of.offset(slot) + HEADER_BYTES
        if got != owner.region[at : at + of.block_bytes]:
            raise SubjectFailed(f"read wrong bytes: {chosen.cell.label}, slot {slot}")


def cpu_s(pids: Sequence[int]) -> float:
    """CPU time of these processes with all their threads so far; 0 for one that has gone. clock_getcpuclockid(3).

    The kernel brings the clock of another process up to date when that one is switched or a tick passes: a thread that spins
    is seen in steps of up to 10 ms, so a single round may show nothing of it, and the sum over many is right on average.
    """
    total = 0.0
    for pid in pids:
        try:
            total += time.clock_gettime((~pid << 3) | 2)
        except OSError:
            continue
    return total


def rows(cell: Cell, subjects: Sequence[Subject], samples: dict[str, Samples]) -> list[Row]:
    return [_row(cell, subject, samples) for subject in subjects if subject.name in samples]


def _row(cell: Cell, subject: Subject, samples: dict[str, Samples]) -> Row:
    own = samples[subject.name]
    ordered = sorted(own.seconds)
    p50_s, p99_s = statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    read_gb = len(ordered) * cell.read_bytes / 1e9
    ratios = {f"ratio_to_{name}": _ratio(samples[name].seconds, own.seconds) for name in YARDSTICKS if name in samples}
    return {
        "plane": subject.name,
        "kind": subject.kind,
        "block_bytes": cell.block_bytes,
        "blocks": cell.blocks,
        "gb_per_s": cell.read_bytes / p50_s / 1e9,
        **ratios,
        "p50_us": p50_s * 1e6,
        "p99_us": p99_s * 1e6,
        "p99_over_p50": p99_s / p50_s,
        "reader_cpu_s_per_gb": own.reader_cpu_s / read_gb,
        "owner_cpu_s_per_gb": own.owner_cpu_s / read_gb,
        "rounds": len(ordered),
    }


def _ratio(yardstick: list[float], own: list[float]) -> float:
    """Median over the rounds of our speed in parts of the yardstick's in the same round."""
    return statistics.median(y / o for y, o in zip(yardstick, own, strict=False))


def merge(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """One row a subject and cell: each figure's median over the runs that have it; the sum of their rounds, and how many."""
    found: dict[tuple[int, int, str], list[Row]] = {}
    for row in (row for run in runs for row in run):
        found.setdefault((row["block_bytes"], row["blocks"], row["plane"]), []).append(row)
    return [_median(same) for same in found.values()]


def _median(same: list[Row]) -> Row:
    merged = dict(same[0])
    for key, value in same[0].items():
        if isinstance(value, float):
            merged[key] = round(statistics.median(row[key] for row in same if key in row), 4)
    return {**merged, "rounds": sum(row["rounds"] for row in same), "runs": len(same)}
