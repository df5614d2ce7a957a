"""The engine of several state groups over engines that are slow, wrong or gone: deadlines, and whose memory it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from kvdir.obs.trace import request_id
from peer_agent.client import state
from peer_agent.client.engine import Engine
from peer_agent.client.results import LoadResult, LookupResult, StoreResult
from peer_agent.client.state import StateEngine
from peer_agent.client.tracing import named
from peer_agent.core.effects import LoadStatus

ATTENTION = {"layers": 1, "kv_heads": 1, "head_dim": 8}
NAMESPACE = Namespace.create(
    model="m", weights="w", kv_dtype="float16", layout="NHD", block_tokens=16, position="rope", parallel="replicated",
    groups=[{"kind": "full", **ATTENTION}, {"kind": "sliding_window", "window_tokens": 17, **ATTENTION}], adapter="none",
    hash_scheme="vllm:sha256", hash_seed="0", cache_policy="exact",
)  # fmt: skip
PROMPT = [Fingerprints.chain(b"%d" % number for number in range(3))] * 2
ROOMS: list[Any] = [[None] * 3] * 2
HANGS_S = 30.0
"""Of a test that fails."""


class Group:
    """An engine that has every block, and answers once `go` is set, or its deadline has passed."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Semaphore(0)
        self.working = 0
        self.deadlines: list[float] = []
        self.requests: list[str] = []
        self.fails = False

    def lookup(self, fingerprints: Fingerprints, *, deadline_s: float) -> LookupResult:
        self.deadlines.append(deadline_s)
        return LookupResult(local=b"\1" * len(fingerprints), nominated=bytes(len(fingerprints)))

    def load(self, fingerprints: Fingerprints, *, into: Any, deadline_s: float) -> LoadResult:
        if self.fails:
            raise InvalidInput("wrong memory")
        self.requests.append(request_id())
        self.working += 1
        self.begun.release()
        status = LoadStatus.HIT_LOCAL if self.go.wait(deadline_s) else LoadStatus.LATE
        self.working -= 1
        return LoadResult(statuses=bytes([status]) * len(fingerprints))

    def store(self, fingerprints: Fingerprints, blocks: Any, *, deadline_s: float) -> StoreResult:
        self.go.wait(deadline_s)
        return StoreResult(stored=len(fingerprints), states=bytes(len(fingerprints)))

    def close(self) -> None:
        self.go.set()


@pytest.fixture
def groups() -> list[Group]:
    return [Group(), Group()]


@pytest.fixture
def engine(groups: list[Group]) -> Iterator[StateEngine]:
    with StateEngine(NAMESPACE, [cast(Engine, group) for group in groups], deadline_s=HANGS_S) as made:
        yield made


def test_groups_work_for_the_request_that_the_caller_named(engine: StateEngine, groups: list[Group]) -> None:
    with named("", "cmpl-7"):
        engine.load(PROMPT, into=ROOMS)
    engine.load(PROMPT, into=ROOMS)
    assert [group.requests for group in groups] == [["cmpl-7", ""]] * 2


def test_calls_end_by_their_own_deadline_when_longer_ones_have_all_threads(engine: StateEngine, groups: list[Group]) -> None:
    for group in groups:
        group.go.clear()
    others = [threading.Thread(target=engine.load, args=(PROMPT,), kwargs={"into": ROOMS}) for _ in range(state.CALLS)]
    for thread in others:
        thread.start()
    for group in groups:
        for _ in others:
            assert group.begun.acquire(timeout=HANGS_S)
    began_s = time.monotonic()
    late = engine.load(PROMPT, into=ROOMS, deadline_s=0.05)
    assert (late.restored_tokens, late.reason) == (0, state.LATE)
    assert engine.lookup(PROMPT, deadline_s=0.05)[0].best_tokens == 0
    assert [result.stored for result in engine.store(PROMPT, ROOMS, deadline_s=0.05)] == [0, 0]
    assert time.monotonic() - began_s < HANGS_S / 2
    for group in groups:
        group.go.set()
    for thread in others:
        thread.join(HANGS_S)
    assert engine.load(PROMPT, into=ROOMS).restored_tokens == 48


def test_nothing_works_any_more_when_a_call_raises(engine: StateEngine, groups: list[Group]) -> None:
    groups[0].fails, groups[1].go = True, threading.Event()
    with pytest.raises(InvalidInput, match="wrong memory"):
        engine.load(PROMPT, into=ROOMS, deadline_s=0.1)
    assert groups[1].begun.acquire(blocking=False)
    assert groups[1].working == 0


def test_lookups_have_a_deadline_when_a_load_has_none_left(engine: StateEngine, groups: list[Group]) -> None:
    assert engine.load(PROMPT, into=ROOMS, deadline_s=0.0).restored_tokens == 0
    assert all(0 < deadline_s <= state.SOON_S for group in groups for deadline_s in group.deadlines)


def test_closed_engine_answers_with_misses(engine: StateEngine) -> None:
    engine.close()
    result = engine.load(PROMPT, into=ROOMS)
    assert (result.restored_tokens, result.rounds, result.reason) == (0, 0, state.CLOSED)
    assert [stored.reason for stored in engine.store(PROMPT, ROOMS)] == [state.CLOSED] * 2
