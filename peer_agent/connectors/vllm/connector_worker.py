"""The worker half of the connector: moves blocks between the engine's pages and the agent, in threads of its own.

Rules:
- Each job ends by its deadline, counted from when it was handed in, and is reported exactly once, whatever happens.
- A load is reported only when nothing writes to its pages any more, late copies of a device included.
- A failed load is reported by blocks where the engine can use that (one KV cache group), else by request. Blocks that arrived
  are verified; the rest is recomputed.
- `start_*`, `results` and `report` never wait: they are the engine's steps. A step with nothing to compute waits a moment for a
  job to end (`await_news`), instead of being repeated as fast as the processor can.
Saves and loads have a thread pool each, so that a save never stands before a load that a request waits for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvdir.errors import KvdirError
from kvdir.obs.logs import say
from peer_agent.client.device import DeviceBlocks
from peer_agent.client.engine import Engine
from peer_agent.client.results import LoadResult
from peer_agent.client.tracing import named
from peer_agent.connectors.vllm.connector_values import Blocks, SaveJob, StepPlan, StepReport
from peer_agent.core.effects import LoadStatus
from peer_agent.memory.device import DevicePool, Event

log = logging.getLogger(__name__)

NEWS_S = 0.002
IDLE_S = 5.0
"""How long a late copy is waited for at a time; until it has ended, the load is not reported."""


@dataclass(slots=True)
class Results:
    """Loads that have ended since the last step. bad_blocks: ids in the engine's pages, only with one group."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Group:
    """A session with the agent for one group, and the pages. saves: whether this rank stores it (one of those that hold the
    same does).
    """

    engine: Engine
    pool: DevicePool
    saves: bool = True


@dataclass(slots=True)
class _Load:
    """A request's load, its groups side by side. missing: groups that have not ended. bad: blocks that did not come."""

    request_id: str
    ready: Event
    until_s: float
    missing: int
    bad: set[int] = field(default_factory=set)


class WorkerHalf:
    """load_s, save_s: deadlines of jobs. threads: groups being loaded at once."""

    def __init__(self, groups: Sequence[Group], *, load_s: float, save_s: float, threads: int = 4) -> None:
        self._groups = groups
        self._load_s, self._save_s = load_s, save_s
        self._lock = threading.Condition()
        self._jobs = 0  # handed in and not ended
        self._results = Results()
        self._report = StepReport()
        self._loads = ThreadPoolExecutor(threads, thread_name_prefix="kvdir-load")
        self._saves = ThreadPoolExecutor(1, thread_name_prefix="kvdir-save")

    def start_loads(self, plan: StepPlan, *, ready: Event) -> None:
        """ready: done once nothing of earlier steps uses the pages that are to be filled."""
        until_s = time.monotonic() + self._load_s
        for job in plan.loads:
            load = _Load(job.request_id, ready, until_s, missing=len(job.groups))
            self._begin()
            if not job.groups:  # nothing to wait for, but the request waits to hear it
                with self._lock:
                    self._end(load)
            for blocks in job.groups:
                self._loads.submit(self._load_group, load, blocks)

    def start_saves(self, plan: StepPlan, *, ready: Event) -> None:
        """ready: done once this step's kernels have filled the pages."""
        until_s = time.monotonic() + self._save_s
        for job in plan.saves:
            self._begin()
            self._saves.submit(self._save, job, ready, until_s)

    def drop_saves(self, plan: StepPlan) -> None:
        """Of a step that failed: its pages hold anything. The jobs have ended, and nothing was saved."""
        blocks = sum(len(group) for job in plan.saves for group in job.groups)
        with self._lock:
            self._report.add(StepReport(Counter(job.number for job in plan.saves), counts=Counter(unsaved_blocks=blocks)))

    def await_news(self) -> None:
        """Returns as soon as there is something to report; at once when nothing is under way, and after NEWS_S at most."""
        with self._lock:
            self._lock.wait_for(lambda: not self._jobs or self._results.loaded or self._report, NEWS_S)

    def results(self) -> Results:
        """Of loads, each once."""
        with self._lock:
            taken, self._results = self._results, Results()
        return taken

    def report(self) -> StepReport:
        """What the scheduler half should know since the last time."""
        with self._lock:
            taken, self._report = self._report, StepReport()
        return taken

    def close(self) -> None:
        """Waits for the jobs handed in, by their deadlines. Idempotent."""
        self._loads.shutdown(wait=True)
        self._saves.shutdown(wait=True)

    def _begin(self) -> None:
        with self._lock:
            self._jobs += 1

    def _ended(self) -> None:
        """With the lock held."""
        self._jobs -= 1
        self._lock.notify_all()

    # loads

    def _load_group(self, load: _Load, blocks: Blocks) -> None:
        began_s, report = time.monotonic(), StepReport()
        try:
            bad = self._arriving(blocks, load, report)
        except Exception:  # whatever it is: a request must not wait for ever
            log.exception("load failed; its request recomputes")
            bad = set(blocks.block_ids)
            report.counts["failed_blocks"] += len(bad)
        report.counts["load_us"] += int((time.monotonic() - began_s) * 1e6)
        with self._lock:
            self._report.add(report)
            load.bad |= bad
            load.missing -= 1
            if not load.missing:
                self._end(load)

    def _end(self, load: _Load) -> None:
        """With the lock held, when its last group has ended."""
        self._ended()
        self._results.loaded.add(load.request_id)
        if not load.bad:
            return
        self._report.failed.add(load.request_id)
        self._report.counts["failed_loads"] += 1
        if len(self._groups) == 1:
            self._results.bad_blocks |= load.bad
        else:
            self._results.failed.add(load.request_id)

    def _arriving(self, blocks: Blocks, load: _Load, report: StepReport) -> set[int]:
        """Ids of the blocks that did not arrive."""
        group, bad = self._groups[blocks.group], set[int]()
        for piece in blocks.pieces(group.engine.max_fingerprints):
            into = DeviceBlocks(group.pool, piece.block_ids, ready=load.ready)
            try:
                with named("", load.request_id):
                    result = group.engine.load(piece.fingerprints, into=into, deadline_s=load.until_s - time.monotonic())
            finally:
                _await_idle(into)
            bad.update(piece.block_ids[position] for position in result.recompute)
            report.silent += bool(result.reason) and not result.hits
            report.counts.update(_load_counts(result, group.pool.block_bytes))
            if result.recompute:
                say(log, logging.INFO, "blocks did not come; their request recomputes them", result=str(result))
        return bad

    # saves

    def _save(self, job: SaveJob, ready: Event, until_s: float) -> None:
        began_s, counts = time.monotonic(), Counter[str]()
        try:
            for blocks in job.groups:
                self._save_group(blocks, ready, until_s, counts)
        except KvdirError as error:
            say(log, logging.WARNING, "blocks were not saved", error=error)
        except Exception:
            log.exception("save failed")
        counts["save_us"] += int((time.monotonic() - began_s) * 1e6)
        with self._lock:
            self._report.add(StepReport(saved=Counter({job.number: 1}), counts=counts))
            self._ended()

    def _save_group(self, blocks: Blocks, ready: Event, until_s: float, counts: Counter[str]) -> None:
        group = self._groups[blocks.group]
        if not group.saves:
            return
        for piece in blocks.pieces(group.engine.max_fingerprints):
            source = DeviceBlocks(group.pool, piece.block_ids, ready=ready)
            try:
                result = group.engine.store(piece.fingerprints, source, deadline_s=until_s - time.monotonic())
            finally:
                _await_idle(source)
            counts["saved_blocks"] += result.stored
            counts["present_blocks"] += result.present
            counts["unsaved_blocks"] += len(piece) - result.stored - result.present


def _await_idle(blocks: DeviceBlocks) -> None:
    """Until nothing uses the pages any more; a device that stands still holds its engine up anyway."""
    while not blocks.wait_idle(IDLE_S):
        say(log, logging.WARNING, "a device copy is still under way, and its blocks with it", blocks=len(blocks))


def _load_counts(result: LoadResult, block_bytes: int) -> dict[str, int]:
    return {
        "loaded_blocks": result.hits,
        "loaded_bytes": result.hits * block_bytes,
        "peer_bytes": result.peer_bytes,
        "failed_blocks": len(result) - result.hits,
        **{f"{status.name.lower()}_blocks": result.count(status) for status in (LoadStatus.STALE, LoadStatus.CORRUPT)},
    }
