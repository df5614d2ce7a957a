"""Jobs between vLLM's pool and an agent: each ends exactly once, whatever happens, and says what came."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvdir.fingerprint import Fingerprints
from kvdir.testing.wait import wait_until
from peer_agent.client.buffers import BlockRows
from peer_agent.client.results import LoadResult, StoreResult
from peer_agent.connectors.vllm.tier_transfers import STORE_THREADS, Ended, Job, Transfers
from peer_agent.core.effects import BlockState, LoadStatus

ROW_BYTES = 64
ROWS = 4000


def keys(count: int, group: int = 0, *, first: int = 0) -> list[bytes]:
    return [number.to_bytes(32, "big") + group.to_bytes(4, "big") for number in range(first, first + count)]


@dataclass
class Session:
    """Scripted. status: of a block that is loaded. gate: what a call waits for. calls: how many blocks each had."""

    status: Callable[[bytes], LoadStatus] = lambda fingerprint: LoadStatus.HIT_PEER
    gate: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    present: int = 0
    reason: str = ""
    calls: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def _begin(self, blocks: BlockRows) -> None:
        self.calls.append(len(blocks.rows))
        self.rows += blocks.rows.tolist()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error

    def load(self, fingerprints: Fingerprints, /, *, into: Any, deadline_s: float) -> LoadResult:
        self._begin(into)
        if self.reason:
            return LoadResult(statuses=bytes(len(fingerprints)), reason=self.reason)
        return LoadResult(statuses=bytes(self.status(item) for item in fingerprints))

    def store(self, fingerprints: Fingerprints, blocks: Any, /, *, deadline_s: float) -> StoreResult:
        self._begin(blocks)
        made = len(fingerprints) - self.present
        states = bytes([BlockState.PRESENT] * self.present + [BlockState.RESERVED] * made)
        return StoreResult(stored=made, states=states)


@dataclass
class Rig:
    sessions: dict[int, Session]
    transfers: Transfers
    numbers: int = 0

    def submit(self, names: list[bytes], *, is_load: bool = True) -> Job:
        self.numbers += 1
        job = Job(self.numbers, tuple(names), np.arange(len(names)), is_load, "request")
        self.transfers.submit(job)
        return job

    def ended(self, count: int = 1) -> list[Ended]:
        got: list[Ended] = []

        def all_there() -> bool:
            got.extend(self.transfers.finished())
            return len(got) >= count

        wait_until(all_there, f"{count} jobs ended")
        return got


@pytest.fixture
def rig() -> Iterator[Rig]:
    sessions = {0: Session(), 1: Session()}
    pool = np.zeros((ROWS, ROW_BYTES), np.uint8)
    transfers = Transfers(sessions, pool, load_s=1.0, store_s=1.0, max_flight_bytes=ROWS * ROW_BYTES)
    yield Rig(sessions, transfers)
    for session in sessions.values():
        session.gate.set()
    transfers.close()


def test_load_is_complete_when_every_group_brings_all(rig: Rig):
    names = [*keys(3), *keys(2, group=1)]
    job = rig.submit(names)
    (ended,) = rig.ended()
    assert (ended.job, ended.complete, ended.good) == (job, True, frozenset(names))
    assert ended.bytes_moved == 5 * ROW_BYTES
    assert rig.sessions[1].rows == [3, 4]
    assert rig.transfers.pending == 0
    assert rig.transfers.finished() == []
    assert rig.transfers.counts()["load_hit_peer"] == 5


@pytest.mark.parametrize("bad", [LoadStatus.STALE, LoadStatus.CORRUPT, LoadStatus.LATE, LoadStatus.SKIPPED, LoadStatus.MISS])
def test_load_says_which_keys_came_when_some_did_not(rig: Rig, bad: LoadStatus):
    names = keys(4)
    rig.sessions[0].status = lambda item: bad if item == names[2][:32] else LoadStatus.HIT_LOCAL
    rig.submit(names)
    (ended,) = rig.ended()
    assert not ended.complete
    assert ended.good == frozenset(names) - {names[2]}


def test_load_asks_for_no_more_when_a_batch_brought_nothing(rig: Rig):
    names = keys(3000)
    rig.sessions[0].status = lambda item: LoadStatus.HIT_PEER if item < names[1024][:32] else LoadStatus.LATE
    rig.submit([*names, *keys(5, group=1)])
    (ended,) = rig.ended()
    assert rig.sessions[0].calls == [1024, 1024]
    assert rig.sessions[1].calls == []
    assert ended.good == frozenset(names[:1024])


def test_load_is_over_with_the_first_batch_that_is_late_though_some_of_it_came(rig: Rig):
    """An owner that trickles would cost load_s once for each batch otherwise."""
    names = keys(3000)
    rig.sessions[0].status = lambda item: LoadStatus.LATE if item == names[1030][:32] else LoadStatus.HIT_PEER
    rig.submit(names)
    (ended,) = rig.ended()
    assert rig.sessions[0].calls == [1024, 1024]
    assert ended.good == frozenset(names[:2048]) - {names[1030]}


def test_job_ends_without_keys_when_the_session_fails(rig: Rig):
    rig.sessions[0].error = RuntimeError("boom")
    rig.submit(keys(2))
    rig.submit(keys(2), is_load=False)
    assert [(ended.complete, ended.good) for ended in rig.ended(2)] == [(False, frozenset())] * 2
    assert rig.transfers.counts()["errors"] == 2
    assert rig.transfers.pending == 0


def test_jobs_are_refused_at_once_when_too_many_bytes_are_under_way(rig: Rig):
    rig.sessions[0].gate.clear()
    first = rig.submit(keys(ROWS))
    refused = [rig.submit(keys(1)), rig.submit(keys(1), is_load=False)]
    assert [ended.job for ended in rig.transfers.finished()] == refused
    assert rig.transfers.pending == 1
    rig.sessions[0].gate.set()
    (ended,) = rig.ended()
    assert (ended.job, ended.complete) == (first, True)
    rig.submit(keys(1))
    assert rig.ended()[0].complete


def test_nobody_else_waits_when_the_agent_did_not_answer(rig: Rig):
    rig.sessions[0].reason = "no answer"
    rig.submit(keys(2))
    assert not rig.ended()[0].complete
    refused = rig.submit(keys(2))
    assert [ended.job for ended in rig.transfers.finished()] == [refused]
    assert rig.sessions[0].calls == [2]


def test_load_waits_for_no_store_and_stores_that_waited_end_when_the_agent_did_not_answer(rig: Rig):
    rig.sessions[0].gate.clear()
    stores = [rig.submit(keys(1, first=number), is_load=False) for number in range(20)]
    wait_until(lambda: len(rig.sessions[0].calls) == STORE_THREADS, "as many stores wait for the agent as may")
    load = rig.submit(keys(1, group=1))
    assert rig.ended()[0].job == load
    rig.sessions[1].reason = "no answer"
    rig.submit(keys(1, group=1))
    assert not rig.ended()[0].complete
    rig.sessions[0].gate.set()
    assert {ended.job.number for ended in rig.ended(20)} == {store.number for store in stores}
    assert len(rig.sessions[0].calls) == STORE_THREADS


def test_refused_load_has_brought_nothing(rig: Rig):
    job = Job(1, tuple(keys(2)), np.arange(2), True)
    rig.transfers.refuse(job)
    (ended,) = rig.transfers.finished()
    assert (ended.job, ended.complete, ended.good) == (job, False, frozenset())


def test_store_is_complete_when_blocks_were_there_already(rig: Rig):
    rig.sessions[0].present = 2
    rig.submit(keys(5), is_load=False)
    (ended,) = rig.ended()
    assert ended.complete
    assert ended.bytes_moved == 3 * ROW_BYTES
    assert rig.transfers.counts() == {"moved_blocks": 3, "store_stored": 3, "store_present": 2, "store_refused": 0}


def test_drain_ends_a_load_after_the_batch_under_way(rig: Rig):
    rig.sessions[0].gate.clear()
    rig.submit(keys(3000))
    wait_until(lambda: rig.sessions[0].calls, "the first batch began")
    drained = threading.Thread(target=rig.transfers.drain)
    drained.start()
    wait_until(lambda: rig.transfers.draining, "drain began")
    rig.sessions[0].gate.set()
    drained.join(20)
    assert not drained.is_alive()
    (ended,) = rig.transfers.finished()
    assert len(ended.good) == 1024
    rig.submit(keys(1))
    assert rig.ended()[0].complete


def test_every_job_ends_once_when_many_threads_work(rig: Rig):
    jobs = [rig.submit(keys(3, first=3 * number), is_load=number % 2 == 0) for number in range(200)]
    ended = rig.ended(200)
    assert sorted(item.job.number for item in ended) == [job.number for job in jobs]
    assert all(item.complete for item in ended)
