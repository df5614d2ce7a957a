"""Copies between vLLM's host pool and the node's agent, in threads, and what became of each job.

Rules:
- every job that was submitted ends exactly once, with the keys that came or went, whatever happens meanwhile; `finished` hands
  each out once, and `pending` counts what it has not handed out yet.
- A load goes on batch by batch; one that brings nothing, or has blocks that were late after load_s, is the last. So an owner
  that died, hangs or trickles costs one load_s, and a healthy long load is not cut off.
- An agent that has not answered a call is not asked again for PAUSE_S: jobs end at once meanwhile, also those that waited.
- Loads have threads of their own, since requests wait for them, and never for a store.
- Bytes under way are bounded: beyond that a load ends at once without its keys, which are recomputed, and a store is not made.
- Bytes go between pool and arena in one copy; what is there already is not copied again (the agent says so).
Thread-safe.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvdir.fingerprint import Fingerprints
from peer_agent.client.buffers import BlockRows
from peer_agent.client.results import LoadResult, StoreResult
from peer_agent.client.tracing import named
from peer_agent.connectors.vllm.tier_keys import by_group
from peer_agent.core.effects import LoadStatus

log = logging.getLogger("vllm.kvdir")  # below "vllm", where an engine's logs are set up

BATCH_BYTES = 64 << 20
BATCH_BLOCKS = 1024
PAUSE_S = 1.0
LOAD_THREADS = 4
STORE_THREADS = 2

Rows = np.ndarray[Any, np.dtype[np.int64]]


class Session(Protocol):
    """What is needed of peer_agent.client.engine.Engine."""

    def load(self, fingerprints: Fingerprints, /, *, into: Any, deadline_s: float) -> LoadResult: ...
    def store(self, fingerprints: Fingerprints, blocks: Any, /, *, deadline_s: float) -> StoreResult: ...


@dataclass(frozen=True, slots=True)
class Job:
    """keys and the rows of the pool they are in, or are to go to."""

    number: int
    keys: Sequence[bytes]
    rows: Rows
    is_load: bool
    request_id: str = ""
    adapter: bytes = b""


@dataclass(frozen=True, slots=True)
class Ended:
    """good: keys of a load whose bytes are in their rows, or of a store that are in the arena now."""

    job: Job
    good: frozenset[bytes]
    bytes_moved: int
    took_s: float

    @property
    def complete(self) -> bool:
        return len(self.good) == len(set(self.job.keys))


class Transfers:
    """sessions: by KV cache group. pool: (rows, row bytes) uint8, vLLM's host pool, which outlives this.

    draining: loads begin no other batch.
    """

    def __init__(
        self,
        sessions: Mapping[int, Session],
        pool: np.ndarray[Any, np.dtype[np.uint8]],
        *,
        load_s: float,
        store_s: float,
        max_flight_bytes: int,
    ) -> None:
        self._sessions = sessions
        self._pool = pool
        self._load_s = load_s
        self._store_s = store_s
        self._max_flight_bytes = max_flight_bytes
        self._loading = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="kvdir-loads")
        self._storing = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="kvdir-stores")
        self._changed = threading.Condition()
        self._running = 0
        self._flight_bytes = 0
        self._ended: list[Ended] = []
        self._counts: collections.Counter[str] = collections.Counter()
        self._paused_until_s = 0.0
        self.draining = False

    @property
    def pending(self) -> int:
        """Jobs that `finished` has not handed out."""
        with self._changed:
            return self._running + len(self._ended)

    def submit(self, job: Job) -> None:
        """Returns at once."""
        size = len(job.keys) * self._pool.shape[1]
        with self._changed:
            full = self._flight_bytes and self._flight_bytes + size > self._max_flight_bytes
            if full or self._paused:
                self._counts[_refused(job)] += 1
                self._refuse(job)
                return
            self._running += 1
            self._flight_bytes += size
        (self._loading if job.is_load else self._storing).submit(self._run, job, size)

    @property
    def _paused(self) -> bool:
        return time.monotonic() < self._paused_until_s

    def refuse(self, job: Job) -> None:
        """Ends it at once, with nothing done."""
        with self._changed:
            self._refuse(job)

    def _refuse(self, job: Job) -> None:
        """Call with the lock held."""
        self._ended.append(Ended(job, frozenset(), 0, 0.0))

    def finished(self) -> list[Ended]:
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def counts(self) -> dict[str, int]:
        """What happened since the start; see COUNTERS in the shim."""
        with self._changed:
            return dict(self._counts)

    def drain(self) -> None:
        """Until nothing touches the pool; loads do not begin another batch. Bounded by load_s or store_s."""
        with self._changed:
            self.draining = True
            self._changed.wait_for(lambda: self._running == 0)
            self.draining = False

    def close(self) -> None:
        """Ends the threads and lets go of the pool. Idempotent."""
        self.drain()
        self._loading.shutdown()
        self._storing.shutdown()
        self._pool = np.empty((0, self._pool.shape[1]), np.uint8)

    def _run(self, job: Job, size: int) -> None:
        began_s = time.monotonic()
        good: set[bytes] = set()
        counts: collections.Counter[str] = collections.Counter()
        try:
            if self._paused:
                counts[_refused(job)] += 1
            else:
                (self._load if job.is_load else self._store)(job, good, counts)
        except Exception as error:  # whatever it is, the engine waits for this job
            counts["errors"] += 1
            log.error("kvdir: %s of %d blocks failed", "load" if job.is_load else "store", len(job.keys), exc_info=error)
        moved = counts.get("moved_blocks", 0) * self._pool.shape[1]
        ended = Ended(job, frozenset(good), moved, time.monotonic() - began_s)
        with self._changed:
            self._ended.append(ended)
            self._counts.update(counts)
            self._running -= 1
            self._flight_bytes -= size
            self._changed.notify_all()

    def _load(self, job: Job, good: set[bytes], counts: collections.Counter[str]) -> None:
        for part in by_group(job.keys, adapter=job.adapter):
            session = self._sessions[part.group]
            for start, count in self._batches(len(part.positions)):
                if self.draining:
                    return
                positions = part.positions[start : start + count]
                rows = BlockRows(self._pool, job.rows[positions])
                with named("", job.request_id):
                    result = session.load(part.fingerprints.slice(start, count), into=rows, deadline_s=self._load_s)
                hits = [place for place, status in enumerate(result.statuses) if LoadStatus(status).hit]
                good.update(job.keys[positions[place]] for place in hits)
                counts["moved_blocks"] += len(hits)
                counts["peer_bytes"] += result.peer_bytes
                for status in LoadStatus:
                    if number := result.count(status):
                        counts[f"load_{status.name.lower()}"] += number
                if not hits or result.count(LoadStatus.LATE):
                    self._ended_early("load", len(job.keys), result.reason)
                    return

    def _store(self, job: Job, good: set[bytes], counts: collections.Counter[str]) -> None:
        for part in by_group(job.keys, adapter=job.adapter):
            session = self._sessions[part.group]
            for start, count in self._batches(len(part.positions)):
                positions = part.positions[start : start + count]
                rows = BlockRows(self._pool, job.rows[positions])
                result = session.store(part.fingerprints.slice(start, count), rows, deadline_s=self._store_s)
                counts["moved_blocks"] += result.stored
                counts["store_stored"] += result.stored
                counts["store_present"] += result.present
                counts["store_refused"] += result.refused
                if result.stored + result.present == count:
                    good.update(job.keys[position] for position in positions)
                elif result.reason:
                    self._ended_early("store", len(job.keys), result.reason)
                    return

    def _ended_early(self, what: str, blocks: int, reason: str) -> None:
        log.info("kvdir: a %s of %d blocks ended early: %s", what, blocks, reason or "blocks did not come in time")
        if reason:
            self._paused_until_s = time.monotonic() + PAUSE_S

    def _batches(self, blocks: int) -> list[tuple[int, int]]:
        most = max(1, min(BATCH_BLOCKS, BATCH_BYTES // self._pool.shape[1]))
        return [(start, min(most, blocks - start)) for start in range(0, blocks, most)]


def _refused(job: Job) -> str:
    return "refused_loads" if job.is_load else "refused_stores"
