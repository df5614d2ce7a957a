"""The worker half of vLLM's connector on a real agent: pages go out and come back, each job is reported once."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from kvdir.testing.wait import eventually
from peer_agent.client.engine import Engine, connect
from peer_agent.connectors.vllm.connector_lookup import Lookups
from peer_agent.connectors.vllm.connector_values import Blocks, LoadJob, SaveJob, StepPlan, StepReport
from peer_agent.connectors.vllm.connector_worker import Group, Results, WorkerHalf
from peer_agent.memory.device import DevicePool, Segment
from peer_agent.memory.host_device import HostDevice, HostEvent
from peer_agent.testing import LocalCluster, local_cluster

BLOCKS = 16
LAYERS = 2


@dataclass
class Pages:
    """One group's pages, as vLLM's: (layer, block, page), the layers apart."""

    namespace: Namespace

    def __post_init__(self) -> None:
        self.device = HostDevice()
        page_bytes = self.namespace.block_bytes // LAYERS
        self.bytes = np.random.default_rng(1).integers(0, 256, (LAYERS, BLOCKS, page_bytes), np.uint8)
        segments = tuple(Segment(layer.ctypes.data, page_bytes, page_bytes) for layer in self.bytes)
        self.pool = DevicePool(self.device, BLOCKS, segments, owner=self.bytes)

    def block(self, block_id: int) -> bytes:
        return self.bytes[:, block_id].tobytes()


@dataclass
class Bench:
    """Two groups of one engine on one agent."""

    cluster: LocalCluster
    pages: list[Pages]
    engines: list[Engine]

    def half(self, groups: int = 2, **options: Any) -> WorkerHalf:
        made = [Group(engine, pages.pool) for engine, pages in zip(self.engines, self.pages, strict=True)]
        return WorkerHalf(made[:groups], **({"load_s": 5.0, "save_s": 5.0} | options))

    def names(self, count: int, root: str = "") -> Fingerprints:
        return self.cluster.blocks.chain(count, root=root)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


@pytest.fixture
async def bench(directory: Path) -> AsyncIterator[Bench]:
    async with local_cluster(directory, "a", coordinator=False, arena_bytes=1 << 20, accept_bytes=128 << 10) as cluster:
        namespaces = [cluster.namespace, replace(cluster.namespace, layout="of-the-other-group")]
        device = HostDevice()
        address = cluster.agents["a"].ready.engine
        engines = await asyncio.to_thread(lambda: [connect(address, namespace=each, device=device) for each in namespaces])
        pages = [Pages(each) for each in namespaces]
        for each in pages:
            each.device, each.pool = device, replace(each.pool, device=device)
        yield Bench(cluster, pages, engines)
        await asyncio.to_thread(lambda: [engine.close() for engine in engines])


async def reported(half: WorkerHalf, done: Callable[[Results, StepReport], bool]) -> tuple[Results, StepReport]:
    """Everything that was told until `done`, and, after the half was closed, that nothing was told twice."""
    results, report = Results(), StepReport()

    def take() -> bool:
        new = half.results()
        assert not new.loaded & results.loaded, "a load was reported twice"
        results.loaded |= new.loaded
        results.failed |= new.failed
        results.bad_blocks |= new.bad_blocks
        report.add(half.report())
        return done(results, report)

    await eventually(take, what="the jobs' reports")
    await asyncio.to_thread(half.close)
    take()
    return results, report


async def saved(bench: Bench, names: Fingerprints, block_ids: tuple[int, ...], groups: int = 2) -> StepReport:
    half = bench.half(groups)
    job = SaveJob(1, tuple(Blocks(group, names, block_ids) for group in range(groups)))
    half.start_saves(StepPlan(saves=(job,)), ready=HostEvent())
    _, report = await reported(half, lambda _, report: bool(report.saved))
    assert report.saved == {1: 1}
    return report


async def loaded(bench: Bench, names: Fingerprints, block_ids: tuple[int, ...], groups: int = 2) -> tuple[Results, StepReport]:
    half = bench.half(groups)
    job = LoadJob("r", tuple(Blocks(group, names, block_ids) for group in range(groups)))
    half.start_loads(StepPlan(loads=(job,)), ready=HostEvent())
    return await reported(half, lambda results, _: "r" in results.loaded)


async def test_pages_come_back_elsewhere_when_they_were_saved(bench: Bench):
    names = bench.names(4)
    report = await saved(bench, names, (3, 1, 7, 2))
    assert report.counts["saved_blocks"] == 8
    results, report = await loaded(bench, names, (8, 9, 10, 15))
    assert (results.failed, results.bad_blocks, report.failed) == (set(), set(), set())
    assert report.counts["loaded_bytes"] == sum(4 * pages.namespace.block_bytes for pages in bench.pages)
    for pages in bench.pages:
        assert [pages.block(to) for to in (8, 9, 10, 15)] == [pages.block(source) for source in (3, 1, 7, 2)]


async def test_nothing_is_copied_twice_when_the_blocks_are_there_already(bench: Bench):
    names = bench.names(3)
    await saved(bench, names, (0, 1, 2))
    report = await saved(bench, names, (0, 1, 2))
    assert (report.counts["saved_blocks"], report.counts["present_blocks"]) == (0, 6)


async def test_missing_block_is_told_by_its_id_when_there_is_one_group(bench: Bench):
    names = bench.names(3)
    await saved(bench, names.slice(0, 2), (0, 1), groups=1)
    results, report = await loaded(bench, names, (8, 9, 10), groups=1)
    assert (results.bad_blocks, results.failed, report.failed) == ({10}, set(), {"r"})
    assert bench.pages[0].block(8) == bench.pages[0].block(0)


async def test_request_is_told_when_one_of_several_groups_lacks_a_block(bench: Bench):
    names = bench.names(3)
    await saved(bench, names, (0, 1, 2), groups=1)
    results, report = await loaded(bench, names, (8, 9, 10))
    assert (results.bad_blocks, results.failed, report.failed) == (set(), {"r"}, {"r"})
    assert report.counts["failed_blocks"] == 3


async def test_corrupt_block_is_recomputed_when_memory_rots(bench: Bench):
    names = bench.names(2)
    await saved(bench, names, (0, 1), groups=1)
    agent = bench.cluster.agents["a"]
    flipped = await asyncio.to_thread(flip_a_payload, Path(agent.config.arena_path), bench.pages[0].block(1))
    assert flipped == 1
    checking = await asyncio.to_thread(
        lambda: connect(agent.ready.engine, namespace=bench.cluster.namespace, device=bench.pages[0].device, check=True)
    )
    bench.engines[0].close()
    bench.engines[0] = checking
    results, _ = await loaded(bench, names, (8, 9), groups=1)
    assert results.bad_blocks == {9}


async def test_jobs_are_reported_in_time_when_the_agent_is_gone(bench: Bench):
    names = bench.names(3)
    await bench.cluster.stop_agent("a")
    half = bench.half(load_s=0.3, save_s=0.3)
    began_s = time.monotonic()
    blocks = (Blocks(0, names, (1, 2, 3)), Blocks(1, names, (1, 2, 3)))
    half.start_loads(StepPlan(loads=(LoadJob("r", blocks), LoadJob("s", blocks))), ready=HostEvent())
    half.start_saves(StepPlan(saves=(SaveJob(7, blocks), SaveJob(8, blocks))), ready=HostEvent())
    results, report = await reported(half, lambda results, report: len(results.loaded) == 2 and len(report.saved) == 2)
    assert time.monotonic() - began_s < 2
    assert results.failed == {"r", "s"}
    assert report.silent == 4
    assert report.counts["unsaved_blocks"] == 12


async def test_job_is_reported_when_the_code_that_does_it_breaks(bench: Bench):
    half = bench.half(groups=1)
    broken = Blocks(0, bench.names(2), (1, BLOCKS + 1))  # a page that does not exist
    half.start_loads(StepPlan(loads=(LoadJob("r", (broken,)),)), ready=HostEvent())
    half.start_saves(StepPlan(saves=(SaveJob(1, (broken,)),)), ready=HostEvent())
    results, report = await reported(half, lambda results, report: bool(results.loaded and report.saved))
    assert results.bad_blocks == {1, BLOCKS + 1}
    assert report.saved == {1: 1}


async def test_load_of_nothing_is_reported_at_once(bench: Bench):
    half = bench.half()
    half.start_loads(StepPlan(loads=(LoadJob("r", ()),)), ready=HostEvent())
    assert half.results().loaded == {"r"}
    await asyncio.to_thread(half.close)


async def test_saves_are_reported_and_not_done_when_their_step_has_failed(bench: Bench):
    half, names = bench.half(), bench.names(2)
    half.drop_saves(StepPlan(saves=(SaveJob(4, (Blocks(0, names, (1, 2)), Blocks(1, names, (1, 2)))),)))
    _, report = await reported(half, lambda _, report: bool(report.saved))
    assert (report.saved, report.counts) == ({4: 1}, {"unsaved_blocks": 4})
    results, _ = await loaded(bench, names, (8, 9), groups=1)
    assert results.bad_blocks == {8, 9}


async def test_lists_longer_than_the_agent_takes_go_in_several_calls(directory: Path):
    settings = {"arena_bytes": 1 << 20, "max_fingerprints": 4}
    async with local_cluster(directory, "a", coordinator=False, **settings) as cluster:
        pages = Pages(cluster.namespace)
        address = cluster.agents["a"].ready.engine
        engine = await asyncio.to_thread(lambda: connect(address, namespace=cluster.namespace, device=pages.device))
        bench = Bench(cluster, [pages], [engine])
        names = bench.names(7)
        report = await saved(bench, names, tuple(range(7)), groups=1)
        assert report.counts["saved_blocks"] == 7
        results, _ = await loaded(bench, names, tuple(range(8, 15)), groups=1)
        assert not results.bad_blocks
        assert pages.block(14) == pages.block(6)
        await asyncio.to_thread(engine.close)


async def test_lookup_is_nothing_by_its_deadline_when_the_agent_does_not_answer(bench: Bench):
    lookups = Lookups([[bench.engines[0]]], deadline_s=0.2)
    names = bench.names(3)
    await saved(bench, names, (0, 1, 2), groups=1)

    async def answer() -> Any:
        until_s = time.monotonic() + 5
        while (found := lookups.ask("r", [names])) is None:
            assert time.monotonic() < until_s
            await asyncio.sleep(0.001)
        return found[0].tolist()

    assert await answer() == [True] * 3
    stuck = threading.Event()

    def lookup(*_: Any, **__: Any) -> Any:
        stuck.wait(10)
        raise RuntimeError("and then it breaks")

    bench.engines[0].lookup = lookup  # type: ignore[method-assign]
    began_s = time.monotonic()
    assert await answer() == [False] * 3
    assert time.monotonic() - began_s < 1
    assert lookups.ask("s", [names]) is not None, "nobody else waits for it"
    stuck.set()
    await asyncio.to_thread(lookups.close)


def flip_a_payload(arena: Path, block: bytes) -> int:
    """Changes one byte in every copy of a block in the arena file; how many there were."""
    with arena.open("r+b") as file:
        content = file.read()
        found, at = 0, content.find(block)
        while at >= 0:
            file.seek(at + 5)
            file.write(bytes([content[at + 5] ^ 1]))
            found, at = found + 1, content.find(block, at + 1)
    return found


async def test_idle_step_waits_for_a_job_and_not_for_nothing(bench: Bench):
    half = bench.half(groups=1)
    began_s = time.monotonic()
    for _ in range(100):
        half.await_news()
    assert time.monotonic() - began_s < 1, "nothing was under way"
    half.start_saves(StepPlan(saves=(SaveJob(1, (Blocks(0, bench.names(2), (1, 2)),)),)), ready=HostEvent())

    def steps() -> int:
        for number in range(10_000):
            half.await_news()
            if half.report().saved:
                return number
        return 10_000

    assert await asyncio.to_thread(steps) < 2_000
    await asyncio.to_thread(half.close)
