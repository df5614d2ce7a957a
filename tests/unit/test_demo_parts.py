"""The parts of the demo alone: content, workload against a model engine, baseline, report, child processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdir.cli.output import CommandFailed, Exit
from kvdir.errors import Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.testing.lru import LruBlocks
from kvdir.testing.routing import Policy, Router
from kvdir.testing.trace import Request, fingerprints_of
from kvdir.testing.wait import eventually
from peer_agent.client.results import LoadResult, StoreResult, Timings
from peer_agent.core.effects import BlockState, LoadStatus
from peer_agent.demo.baseline import WithoutPeers
from peer_agent.demo.content import Content
from peer_agent.demo.leaks import Life, held_by
from peer_agent.demo.processes import Child
from peer_agent.demo.report import NodeFigures, Run, Settled, document, percentile, view
from peer_agent.demo.workload import Tally, Workload

A, B = (bytes(item) for item in fingerprints_of([1, 2]))


@pytest.mark.parametrize("block_bytes", [32, 100, 4096])
def test_content_matches_only_itself(block_bytes: int) -> None:
    content = Content(block_bytes)
    block = content.make(A)
    assert block.shape == (block_bytes,)
    assert content.matches(A, block)
    assert not content.matches(B, block)
    assert not content.matches(A, block[:-1])
    into = np.zeros(block_bytes, np.uint8)
    content.fill(A, into)
    assert bytes(into) == bytes(block)


@given(st.integers(0, 4095), st.integers(1, 255))
def test_content_notices_one_wrong_byte(at: int, change: int) -> None:
    content = Content(4096)
    block = content.make(A)
    block[at] ^= change
    assert not content.matches(A, block)


@given(st.integers(1, 4095))
def test_content_notices_a_shift(by: int) -> None:
    content = Content(4096)
    assert not content.matches(A, np.roll(content.make(A), by))


class ModelEngine:
    """One node of a model cluster: a load finds what it or a peer stored. Lies or fails when told to."""

    def __init__(self, peers: list[ModelEngine], *, capacity: int) -> None:
        self.peers, self.capacity = peers, capacity
        self.held: dict[bytes, bytes] = {}
        self.lie = self.down = False

    async def load(self, fingerprints: Fingerprints, *, into: Any, deadline_s: float) -> LoadResult:
        await asyncio.sleep(0)
        if self.down:
            raise Unavailable("agent is gone")
        local = [fingerprint in self.held for fingerprint in fingerprints]
        statuses = bytearray([LoadStatus.HIT_LOCAL if here else LoadStatus.MISS for here in local])
        for position in sorted(range(len(local)), key=lambda position: not local[position]):
            fingerprint = fingerprints[position]
            owner = next((node for node in [self, *self.peers] if fingerprint in node.held), None)
            if owner is None:
                continue
            if not local[position]:
                statuses[position] = LoadStatus.HIT_PEER
            into[position] = np.frombuffer(owner.held[fingerprint], np.uint8) + self.lie
            self._keep(fingerprint, owner.held[fingerprint])
        return LoadResult(statuses=bytes(statuses), timings=Timings(lookup_us=7), directory_reached=True, peer_bytes=1)

    async def store(self, fingerprints: Fingerprints, blocks: Any, *, deadline_s: float) -> StoreResult:
        for fingerprint, block in zip(fingerprints, blocks, strict=True):
            self._keep(fingerprint, bytes(block))
        return StoreResult(stored=len(fingerprints), states=bytes([BlockState.RESERVED]) * len(fingerprints))

    def _keep(self, fingerprint: bytes, block: bytes) -> None:
        self.held.pop(fingerprint, None)
        self.held[fingerprint] = block
        while len(self.held) > self.capacity:
            del self.held[next(iter(self.held))]


def requests(*prompts: Sequence[int]) -> list[Request]:
    return [Request(number, float(number), 512, 1, tuple(blocks)) for number, blocks in enumerate(prompts)]


def model(
    *, nodes: int = 3, capacity: int = 100, in_flight: int = 1, alone: bool = False
) -> tuple[Workload, list[ModelEngine]]:
    content, cluster = Content(64), list[ModelEngine]()
    cluster += [ModelEngine([] if alone else cluster, capacity=capacity) for _ in range(nodes)]
    workload = Workload(
        cluster,
        router=Router(Policy.P2C, nodes=nodes, rng=random.Random(3)),
        content=content,
        without_peers=WithoutPeers(nodes=nodes, blocks_per_node=capacity),
        deadline_s=1.0,
        in_flight=in_flight,
    )
    return workload, cluster


async def test_every_block_is_counted_once_and_peers_add_hits() -> None:
    prompts = [range(start % 7, start % 7 + 12) for start in range(60)]
    workload, _ = model(in_flight=4)
    tally = await workload.run(iter(requests(*prompts)))
    assert tally.requests == 60
    assert tally.blocks == 720 == tally.hit_local + tally.hit_peer + tally.recomputed
    assert tally.recomputed == tally.stored >= 18  # more, where requests in flight together lack the same block
    assert (tally.hit_peer > 0, tally.wrong, tally.failed_requests) == (True, 0, 0)
    assert len(tally.load_us) == 60


async def test_baseline_is_what_a_run_without_peers_hits() -> None:
    prompts = [[(7 * start + step) % 90 for step in range(10)] for start in range(200)]
    alone, _ = model(capacity=30, alone=True)
    tally = await alone.run(requests(*prompts))
    assert (tally.hit_local, tally.hit_peer) == (alone._without_peers.hits, 0)
    together, _ = model(capacity=30)
    tally = await together.run(requests(*prompts))
    assert together._without_peers.hits == alone._without_peers.hits > 0
    assert tally.hit_local == pytest.approx(together._without_peers.hits, rel=0.1)
    side_by_side, _ = model(capacity=90, alone=True, in_flight=6)
    tally = await side_by_side.run(requests(*prompts))
    assert tally.hit_local == pytest.approx(side_by_side._without_peers.hits, rel=0.05)


async def test_wrong_bytes_are_counted_and_recomputed_when_an_engine_lies() -> None:
    workload, cluster = model(nodes=1)
    cluster[0].lie = True
    tally = await workload.run(requests([1, 2], [1, 2]))
    assert (tally.wrong, tally.hit_local, tally.recomputed) == (2, 0, 4)


async def test_failed_request_is_counted_with_its_reason_and_the_rest_goes_on() -> None:
    workload, cluster = model(nodes=1)

    async def cut() -> None:
        cluster[0].down = True

    workload._actions[1] = cut
    tally = await workload.run(requests([1], [2], [3]))
    assert (tally.requests, tally.failed_requests) == (3, 2)
    assert "agent is gone" in tally.failures[0]
    assert workload._outstanding_blocks == [0.0]


def test_baseline_forgets_a_node_that_was_lost() -> None:
    baseline = WithoutPeers(nodes=2, blocks_per_node=10)
    for node in (0, 1):
        baseline.begin(node, [1, 2])
        baseline.end(node, [1, 2])
    baseline.lose(0)
    for node in (0, 1):
        baseline.begin(node, [1, 2])
    assert (baseline.hits, baseline.blocks, baseline.hit_ratio) == (2, 8, 0.25)
    assert len(LruBlocks(1)) == 0


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (99, 99), (100, 100), (1, 1)])
def test_percentile_is_the_nearest_rank(percent: int, expected: int) -> None:
    assert percentile(range(1, 101), percent) == expected
    assert percentile([], percent) == 0
    assert percentile([4], percent) == 4


def node_figures(
    *, blocks: int = 3, owner_blocks: int = 3, trusted: bool = True, state: str = "synced", owner_bytes: int = 0
) -> NodeFigures:
    return NodeFigures(
        node="node-0",
        state=state,
        trusted=trusted,
        blocks=blocks,
        bytes=blocks * 64,
        owner_blocks=owner_blocks,
        owner_bytes=owner_bytes or owner_blocks * 64,
    )


def settled_with(*nodes: NodeFigures) -> Settled:
    return Settled(
        streams_synced=len(nodes),
        streams_total=len(nodes),
        views_trusted=len(nodes),
        views_total=len(nodes),
        nodes=nodes,
        untrusted_s=0.25,
        repairs={"replay": 1, "snapshot": 0},
        waited_s=0.1,
    )


@pytest.mark.parametrize(
    ("figures", "equal", "agrees"),
    [
        (node_figures(), True, True),
        (node_figures(owner_blocks=4), False, False),
        (node_figures(owner_bytes=1), False, False),
        (node_figures(trusted=False), True, False),
        (node_figures(state="gap"), True, False),
    ],
)
def test_directory_agrees_only_if_figures_are_equal_trusted_and_synced(figures: NodeFigures, equal: bool, agrees: bool) -> None:
    settled = settled_with(node_figures(), figures)
    assert (settled.equal, settled.agrees) == (equal, agrees)


def test_report_has_the_promised_keys_and_a_table() -> None:
    run = Run(
        nodes=4,
        block_bytes=64,
        blocks_per_node=9,
        loss=0.0,
        killed=False,
        agent_down_s=None,
        seconds=1.0,
        hit_ratio_without_peers=0.1,
    )
    settled = settled_with(node_figures(blocks=10, owner_blocks=10))
    tally = Tally(
        requests=2, blocks=10, hit_local=1, hit_peer=2, recomputed=7, corrupt=1, wrong=1, lookup_us=[5], load_us=[9, 10]
    )
    life = Life("node-1", 5, [{"descriptors": 9, "threads": 3, "memory_bytes": 1 << 20}], {"locks": 2})
    figures = document(run, tally, settled, [life])
    promised = (
        "requests hit_local hit_peer recomputed stale late corrupt peer_bytes failed_requests lookup_p50_us lookup_p99_us "
        "load_p50_us load_p99_us hit_ratio hit_ratio_without_peers streams_synced views_trusted "
        "views_equal_owner_counts untrusted_seconds repairs streams leaks leaks_watched processes"
    )
    assert set(promised.split()) <= set(figures)
    assert (figures["corrupt"], figures["hit_ratio"], figures["load_p99_us"]) == (2, 0.3, 10)
    assert (figures["leaks"], figures["leaks_watched"]) == (["node-1: 2 locks left at the end"], 0)
    assert view(figures) is not None


def life_with(descriptors: Sequence[int]) -> Life:
    return Life("node-1", 5, [{"descriptors": count, "threads": 3, "memory_bytes": 1 << 20} for count in descriptors])


def test_growth_is_named_when_a_process_holds_more_than_half_way() -> None:
    assert life_with(range(60)).faults() == ["node-1: descriptors grew from 36 half way to 59"]
    assert life_with([*range(20), *[20] * 40]).faults() == [], "pools fill first"
    assert life_with([5] * 25 + [90] + [5] * 34).faults() == [], "a moment is no growth"
    assert (life_with(range(19)).tells, life_with(range(0, 190, 10)).faults()) == (False, [])


def test_nothing_is_known_when_a_process_has_ended() -> None:
    assert held_by(os.getpid()) is not None
    assert held_by(2**22 + 1) is None


def script(text: str) -> list[str]:
    return ["-c", f"import json, os, signal, sys, time\n{text}"]


READY = 'print(json.dumps({"pid": os.getpid(), "port": 5}), flush=True)\n'


async def test_child_is_ready_when_it_says_so_and_ends_by_its_pid(tmp_path: Path) -> None:
    child = await Child.start("sleeper", script(READY + "signal.pause()"), log=tmp_path / "log", ready_s=20)
    assert child.ready == {"pid": child.pid, "port": 5}
    assert await child.end(grace_s=20) == -signal.SIGTERM
    assert not psutil.pid_exists(child.pid)
    assert await child.end(grace_s=1) == -signal.SIGTERM


async def test_child_is_killed_when_it_ignores_the_request_to_end(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "while True: signal.pause()"
    child = await Child.start("stubborn", script(text), log=tmp_path / "log", ready_s=20)
    assert await child.end(grace_s=0.05) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("sys.exit('port 7 is in use')", "port 7 is in use"),
        ("print('no json')", "did not start"),
        ("print(json.dumps({'error': 'x'}))\nsys.exit(3)", "exit status 3"),
        ("sys.stderr.write('still loading\\n'); sys.stderr.flush()\nsignal.pause()", "not ready within"),
    ],
)
async def test_child_that_does_not_get_ready_is_ended_and_its_log_is_shown(tmp_path: Path, text: str, what: str) -> None:
    limit_s = 1.0 if "pause" in text else 20
    before = set(psutil.Process().children())
    with pytest.raises(CommandFailed, match=what) as caught:
        await Child.start("broken", script(text), log=tmp_path / "log", ready_s=limit_s)
    assert caught.value.exit is Exit.START
    assert set(psutil.Process().children()) <= before


async def test_child_does_not_inherit_our_own_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDIR_LISTEN", "nonsense")
    text = 'print(json.dumps({"found": "KVDIR_LISTEN" in os.environ}), flush=True)\nsignal.pause()'
    child = await Child.start("clean", script(text), log=tmp_path / "log", ready_s=20)
    await child.kill()
    assert child.ready == {"found": False}


async def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    command, log = script(READY + "signal.pause()"), str(tmp_path / "log")
    code = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom peer_agent.demo.processes import Child\n"
        "async def go():\n"
        f"    child = await Child.start('x', {command!r}, log=Path({log!r}), ready_s=20)\n"
        "    print(child.pid, flush=True)\n    await asyncio.Event().wait()\n"
        "asyncio.run(go())"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env=os.environ)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await eventually(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE,
        what="the child outlived its parent",
    )
