"""One session with an agent, seen from the engine: the mapped arena, and each exchange as request, response, copy.

Rules: the arena is believed only if its id and epoch are those of the Attach answer; what is copied out is verified before and
after the copy, and counts as a hit only then. How long the arena stays is mapping.py's; how bytes are copied, buffers.py's and
device.py's. Nothing here waits for the agent: the sync and the aio engine do, each in its own way.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvdir.errors import RemoteProtocolError, TooLarge, Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.location import PROTOCOL_VERSION
from kvdir.namespace import Namespace
from kvdir.rpc.lookup_codec import decode_trust, encode_fingerprints
from peer_agent.client.buffers import CallerMemory, Wanted
from peer_agent.client.mapping import Mapping
from peer_agent.client.pool_table import PoolTable
from peer_agent.client.results import LoadResult, LookupResult, StoreResult, Timings
from peer_agent.core.effects import BlockState, LoadStatus
from peer_agent.core.records import BLOCK_RECORD, RESERVE_RECORD
from peer_agent.memory.arena import Arena
from peer_agent.memory.device import Device, DevicePool
from peer_agent.transport.base import ReadStatus
from peer_agent.v1 import engine_pb2

Array = np.ndarray[Any, Any]

RELEASE_BATCH = 256
"""Locks that travel with one request; more wait for the next one, or end with their leases."""

ANSWER_SHARE = 0.1
"""Of a deadline, kept for the agent's answer: one that arrives too late loses what has been brought here in time."""

LONGEST_S = 86_400.0
"""What "as long as it takes" comes to; the agent shortens it further."""

COPY_BYTES_PER_S = 4e9
"""A cautious rate, to keep time for the copy."""

_COPY_OUTCOMES = {ReadStatus.CORRUPT: LoadStatus.CORRUPT, ReadStatus.LATE: LoadStatus.LATE}
"""Of a block that was here and could not be copied out; any other reason means that it was replaced meanwhile: stale."""


def unanswered(address: str) -> Unavailable:
    """What stands in the way before an agent has answered, as far as this process can see; gRPC does not say so."""
    path = Path(address.removeprefix("unix:"))
    with suppress(OSError):  # gone in between
        if address.startswith("unix:") and path.exists() and not os.access(path, os.W_OK):
            return Unavailable(
                f"{address}: user {os.getuid()} may not use this socket of user {path.stat().st_uid}: "
                "run engine and agent as one user (chart: agent.runAsUser)"
            )
    return Unavailable(f"{address}: no agent has answered yet; does it run, and is the address right?")


def attach_request(
    namespace: Namespace, *, engine: str, prefill_tokens_per_s: float, probe: bytes = b""
) -> engine_pb2.AttachRequest:
    """engine: for logs and metrics; "" stands for this process. probe: see peer_agent.client.engine.Engine."""
    return engine_pb2.AttachRequest(
        protocol_version=PROTOCOL_VERSION,
        engine=engine or f"pid-{os.getpid()}",
        namespace_digest=namespace.digest,
        namespace_canonical_json=namespace.canonical().encode(),
        prefill_tokens_per_s=prefill_tokens_per_s,
        probe=probe,
    )


def bounded_s(wish_s: float | None, default_s: float) -> float:
    """A caller's time; None: the default. May be negative, which is a deadline that has passed."""
    return min(default_s if wish_s is None else wish_s, LONGEST_S)


def milliseconds(wish_s: float) -> int:
    """As requests say it: whole, never negative."""
    return max(0, int(min(wish_s, LONGEST_S) * 1000))


def told_ms(deadline_s: float) -> int:
    """What the agent is told of a caller's deadline: less, so that its answer arrives in time. 0: none, or it has passed."""
    return max(milliseconds(deadline_s * (1 - ANSWER_SHARE)), int(deadline_s > 0))


def lookup_result(answer: engine_pb2.EngineLookupResponse) -> LookupResult:
    return LookupResult(
        local=answer.local,
        nominated=answer.nominated,
        directory_reached=answer.directory_reached,
        trust=tuple(map(decode_trust, answer.nodes)),
    )


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load came to: the result, and blocks that failed verification here."""

    result: LoadResult
    corrupt: Fingerprints


class Attachment:
    """A live session. `close` may be called at any time; a copy in progress keeps the mapping until it ends."""

    def __init__(self, answer: engine_pb2.AttachResponse, namespace: Namespace, device: Device | None = None) -> None:
        """Maps the arena, for copies of `device` too. Raises KvdirError: another protocol, an arena that is not the agent's, or
        none at all.
        """
        if answer.protocol_version != PROTOCOL_VERSION:
            raise RemoteProtocolError(f"agent speaks protocol {answer.protocol_version}, engine {PROTOCOL_VERSION}")
        if answer.block_bytes != namespace.block_bytes:
            raise RemoteProtocolError(
                f"agent has blocks of {answer.block_bytes} bytes, the namespace says {namespace.block_bytes}"
            )
        self._digest = namespace.digest  # made anew at each access, for 60 us
        self.session: int = answer.session
        self.node: str = answer.node
        self.epoch: int = answer.epoch
        self.block_bytes: int = answer.block_bytes
        self.max_fingerprints: int = answer.max_fingerprints
        self.replica_path: str = answer.replica_path
        self.coordinators: str = ",".join(answer.coordinators)
        self._releases: list[int] = []
        self._tables: list[PoolTable] = []
        self._closed = False
        self._lock = threading.Lock()
        arena = Arena.open(answer.arena_path, writable=True)
        if (arena.arena_id, arena.epoch) != (answer.arena_id, answer.epoch):
            arena.close()
            raise RemoteProtocolError(f"{answer.arena_path} is not the arena of this agent: do both see the same file system?")
        self.mapping = Mapping(arena, self.session, device)

    def close(self) -> None:
        """Ends the use of the arena, once copies under way have ended, and of pools registered in this session. Idempotent."""
        with self._lock:
            self._closed = True
            tables, self._tables = self._tables, []
        for table in tables:
            table.close()
        self.mapping.close()

    def pool_table(self, pool: DevicePool, answer: engine_pb2.RegisterPoolResponse) -> PoolTable:
        """The generation table of a pool that was registered in this session; ends with it. Raises KvdirError."""
        table = PoolTable(pool, answer, session=self.session, namespace_digest=self._digest)
        with self._lock:
            if not self._closed:
                self._tables = [*(known for known in self._tables if not known.closed), table]
                return table
        table.close()
        raise Unavailable("the session with the agent has ended")

    def check_size(self, fingerprints: Fingerprints) -> None:
        """Raises TooLarge above the agent's limit."""
        if len(fingerprints) > self.max_fingerprints:
            raise TooLarge(
                f"{len(fingerprints)} fingerprints, the agent's max_fingerprints is {self.max_fingerprints}: split the list"
            )

    # store

    def storing(self) -> AbstractContextManager[None]:
        """Around a Reserve, the copy and the Commit; see Mapping.storing."""
        return self.mapping.storing()

    def reserve_request(
        self, fingerprints: Fingerprints, *, lease_s: float, from_device: bool = False
    ) -> engine_pb2.ReserveRequest:
        return engine_pb2.ReserveRequest(
            session=self.session,
            fingerprints=encode_fingerprints(fingerprints),
            lease_ms=max(1, milliseconds(lease_s)),
            release=self._take_releases(),
            from_device=from_device,
        )

    def write(
        self, answer: engine_pb2.ReserveResponse, memory: CallerMemory, *, count: int, until_s: float
    ) -> engine_pb2.CommitRequest:
        """Copies the granted ones of `count` blocks into their slots. Raises Unavailable when the session has been closed, and
        what `CallerMemory.copy_in` raises; unless `memory.late`, nothing writes to the slots any more then.
        """
        records = np.frombuffer(answer.blocks, RESERVE_RECORD)
        if len(records) != count:
            raise RemoteProtocolError(f"the agent answered {len(records)} records for {count} blocks")
        granted = np.flatnonzero(records["state"] == BlockState.RESERVED)
        offsets = records["offset"][granted].tobytes()
        keep = partial(self.mapping.keep, writing=True)
        with self.mapping.using(writing=True) as region:
            checksums = memory.copy_in(region, offsets, granted, block_bytes=self.block_bytes, until_s=until_s, keep=keep)
        return engine_pb2.CommitRequest(session=self.session, reservation=answer.reservation, checksums=checksums)

    def abort_request(self, answer: engine_pb2.ReserveResponse) -> engine_pb2.AbortRequest:
        return engine_pb2.AbortRequest(session=self.session, reservation=answer.reservation)

    def stored(self, reserved: engine_pb2.ReserveResponse, committed: int, *, reason: str = "") -> StoreResult:
        states = np.frombuffer(reserved.blocks, RESERVE_RECORD)["state"].astype(np.uint8).tobytes()
        granted = states.count(bytes([BlockState.RESERVED]))
        if not reason and committed < granted:
            reason = f"{granted - committed} blocks were written after their lease had ended"
        return StoreResult(stored=committed, states=states, reason=reason)

    # load

    def load_request(
        self, fingerprints: Fingerprints, *, deadline_s: float, lease_s: float, local_only: bool, explain: bool
    ) -> engine_pb2.LoadRequest:
        """deadline_s is the caller's; the agent gets less, so that there is time for its answer to arrive and for the copy."""
        kept_s = deadline_s * ANSWER_SHARE + len(fingerprints) * self.block_bytes / COPY_BYTES_PER_S
        return engine_pb2.LoadRequest(
            session=self.session,
            fingerprints=encode_fingerprints(fingerprints),
            deadline_ms=max(1, milliseconds(max(deadline_s - kept_s, deadline_s / 2))),
            lease_ms=max(1, milliseconds(lease_s)),
            local_only=local_only,
            release=self._take_releases(),
            explain=explain,
        )

    def read(
        self,
        answer: engine_pb2.LoadResponse,
        fingerprints: Fingerprints,
        memory: CallerMemory,
        *,
        check: bool,
        began_s: float,
        until_s: float,
    ) -> Loaded:
        """Copies what is here into the caller's memory, verified, and lets go of it, whether anybody still waits for the result
        or not. began_s: time.monotonic() when the load began.
        """
        copy_began_s = time.monotonic()
        records = np.frombuffer(answer.blocks, BLOCK_RECORD).copy()
        if len(records) != len(fingerprints):
            raise RemoteProtocolError(f"the agent answered {len(records)} records for {len(fingerprints)} blocks")
        results = records["state"].astype(np.uint8)
        hits = np.flatnonzero((results == LoadStatus.HIT_LOCAL) | (results == LoadStatus.HIT_PEER))
        wanted = self._wanted(records[hits], fingerprints.select(hits.tolist()), hits, check=check)
        lock = _ArenaLock(self, answer.lock)
        try:
            with self.mapping.using(writing=False) as region:
                copied = memory.copy_out(region, wanted, until_s=until_s, keep=lock.keep)
        finally:
            self.release_later(lock.number)
        statuses = np.frombuffer(copied, np.uint8)
        failed = hits[statuses != ReadStatus.OK]
        for position, status in zip(failed, statuses[statuses != ReadStatus.OK], strict=True):
            results[position] = _COPY_OUTCOMES.get(ReadStatus(status), LoadStatus.STALE)
        now_s = time.monotonic()
        timings = Timings(
            total_us=int((now_s - began_s) * 1e6),
            lookup_us=answer.lookup_us,
            lock_us=answer.lock_us,
            read_us=answer.read_us,
            copy_us=int((now_s - copy_began_s) * 1e6),
        )
        result = LoadResult(
            statuses=results.tobytes(),
            timings=timings,
            peer_bytes=answer.peer_bytes,
            trace_id=answer.trace_id,
            directory_reached=answer.directory_reached,
            trust=tuple(map(decode_trust, answer.nodes)),
            predicted_us=answer.predicted_us,
            net_gain_us=answer.net_gain_us,
            explanation=json.loads(answer.explanation) if answer.explanation else None,
        )
        corrupt = hits[statuses == ReadStatus.CORRUPT].tolist()
        return Loaded(result, fingerprints.select(corrupt))

    def _wanted(self, records: Array, fingerprints: Fingerprints, hits: Array, *, check: bool) -> Wanted:
        if np.any(records["length"] != self.block_bytes):
            raise RemoteProtocolError("the agent answered a block of another length than the namespace's")
        records["state"] = 1
        return Wanted(
            records=records.tobytes(),
            namespace_digest=self._digest,
            fingerprints=fingerprints.packed,
            width=fingerprints.width,
            positions=hits,
            check=check,
        )

    # other requests

    def lookup_request(self, fingerprints: Fingerprints, *, deadline_s: float) -> engine_pb2.EngineLookupRequest:
        """deadline_s: for the directory; nothing left, or 0: only what is here."""
        packed = encode_fingerprints(fingerprints)
        return engine_pb2.EngineLookupRequest(session=self.session, fingerprints=packed, deadline_ms=told_ms(deadline_s))

    def prefetch_request(self, fingerprints: Fingerprints, *, deadline_s: float) -> engine_pb2.PrefetchRequest:
        packed = encode_fingerprints(fingerprints)
        return engine_pb2.PrefetchRequest(
            session=self.session, fingerprints=packed, deadline_ms=max(1, milliseconds(deadline_s))
        )

    def pin_request(self, fingerprints: Fingerprints, *, pin_s: float) -> engine_pb2.PinRequest:
        return engine_pb2.PinRequest(
            session=self.session, fingerprints=encode_fingerprints(fingerprints), pin_ms=milliseconds(pin_s)
        )

    # release

    def release_later(self, lock: int) -> None:
        """The lock goes with the next request; a lost one ends with its lease."""
        if lock:
            with self._lock:
                self._releases.append(lock)

    def corrupt_request(self, corrupt: Fingerprints) -> engine_pb2.ReleaseRequest:
        """Tells the agent which blocks failed verification, and releases what is due."""
        return engine_pb2.ReleaseRequest(
            session=self.session, locks=self._take_releases(), corrupt=encode_fingerprints(corrupt)
        )

    def _take_releases(self) -> list[int]:
        with self._lock:
            taken, self._releases = self._releases[:RELEASE_BATCH], self._releases[RELEASE_BATCH:]
        return taken


@dataclass(slots=True)
class _ArenaLock:
    """A load's lock on its blocks: goes back after the copy, or, where a copy outlasts the load, once that has ended.

    number: to be given back when the load's own copies have ended; 0 once a late copy will.
    """

    attachment: Attachment
    number: int

    def keep(self) -> Callable[[], None]:
        let_go = self.attachment.mapping.keep(writing=False)
        held, self.number = self.number, 0

        def release() -> None:
            self.attachment.release_later(held)
            let_go()

        return release
