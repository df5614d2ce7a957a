"""One writer and several readers of a region, each a process: every answer is judged, also when the writer is killed."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import struct
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from kvdir.errors import KvdirError
from kvdir.index import RegionReader
from kvdir.testing.region_world import Judged, read, write

DEADLINE_S = 40.0
READERS = 2


@pytest.fixture(name="path")
def _path() -> object:
    """Shared memory where there is some; pytest's own directory lies on a disk."""
    place = Path("/dev/shm") / f"kvdir-test-{os.getpid()}-{time.monotonic_ns()}"
    place.mkdir()
    yield str(place / "region")
    for leftover in place.iterdir():
        leftover.unlink()
    place.rmdir()


@pytest.fixture(name="processes")
def _processes() -> mp.context.ForkServerContext:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["kvdir.testing.region_world"])
    return context


def _until(done: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < end_s, f"{what} did not happen within {DEADLINE_S:g} s"
        time.sleep(0.0005)


def _turn(path: str, after: int) -> tuple[int, int]:
    """(generation, turns done) of the region at the path; (0, -1) while there is none newer than `after`."""
    try:
        reader = RegionReader(path)
    except KvdirError:
        return 0, -1
    beat, generation = reader.beat(), reader.generation
    reader.close()
    return (0, -1) if generation == after else (generation, struct.unpack("<I", beat)[0] if beat else -1)


def test_every_answer_is_true_when_a_writer_churns_in_another_process(
    path: str, processes: mp.context.ForkServerContext
) -> None:
    with ProcessPoolExecutor(READERS, mp_context=processes) as pool:
        readings = [pool.submit(read, path, seed, path + ".end", DEADLINE_S) for seed in range(READERS)]
        writer = processes.Process(target=write, args=(path, 1, 4000))
        writer.start()
        writer.join(DEADLINE_S)
        Path(path + ".end").touch()
        judged = [reading.result(DEADLINE_S) for reading in readings]
    assert writer.exitcode == 0
    for each in judged:
        assert each.answers - each.torn > 100  # of a writer that loses its core within a section all are torn until it is back
        assert each.hits > 10_000
        assert each.longest_s < 1.0


def test_readers_go_on_when_the_writer_is_killed_at_any_moment_and_the_next_one_begins(
    path: str, processes: mp.context.ForkServerContext
) -> None:
    rng = random.Random(4)
    stuck = 0
    with ProcessPoolExecutor(READERS, mp_context=processes) as pool:
        readings = [pool.submit(read, path, seed, path + ".end", DEADLINE_S) for seed in range(READERS)]
        generation = 0
        for life in range(50):
            writer = processes.Process(target=write, args=(path, 100 + life, 10**9))
            writer.start()
            last_turn = rng.randrange(1, 150)
            _until(lambda last=last_turn, before=generation: _turn(path, before)[1] >= last, "the writer's turns")  # type: ignore[misc]
            generation = _turn(path, 0)[0]
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join(DEADLINE_S)
            reader = RegionReader(path)
            begin_s = time.monotonic()
            stuck += reader.lookup(bytes(8), 8, scope=0).torn
            assert time.monotonic() - begin_s < 1.0
            reader.close()
        Path(path + ".end").touch()
        judged: list[Judged] = [reading.result(DEADLINE_S) for reading in readings]
    assert stuck > 0, "no kill hit a section: the test proves nothing"
    for each in judged:
        assert each.answers > 100
        assert each.regions > 25
        assert each.longest_s < 1.0
