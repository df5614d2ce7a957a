"""Bytes of one load from one owner: slots reserved, a verified read into them, commit of what arrived, and the rest given back.

Rules: a slot that did not get its block is freed only once the transfer has settled, else quarantined; blocks that somebody
else is writing are left to `Load.writers`; what is here is locked for the engine at once, so that it is not evicted by the
next chunk of the same load. Does not: ask owners, wait for other writers (reader.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from peer_agent.core.budget import chunks
from peer_agent.core.effects import BlockState, LoadStatus, Reserved
from peer_agent.core.inventory import AGENT
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.core.serial_plan import Ask
from peer_agent.server.load import Load, ReaderCounters
from peer_agent.server.peer import LockAnswer, Peer
from peer_agent.server.peers import Peers
from peer_agent.server.store import Store
from peer_agent.transport.base import ReadList, ReadOutcome, ReadStatus

OUTCOMES = {
    ReadStatus.OK: LoadStatus.HIT_PEER,
    ReadStatus.ABSENT: LoadStatus.STALE,
    ReadStatus.STALE: LoadStatus.STALE,
    ReadStatus.TORN: LoadStatus.CORRUPT,
    ReadStatus.CORRUPT: LoadStatus.CORRUPT,
    ReadStatus.LATE: LoadStatus.LATE,
    ReadStatus.PEER_LOST: LoadStatus.MISS,
}


@dataclass(frozen=True, slots=True)
class Source:
    """An owner's answer to an ask, readable under `answer.lock`. records: BLOCK_RECORD by position of the load."""

    ask: Ask
    peer: Peer
    answer: LockAnswer
    records: np.ndarray[Any, Any]

    @classmethod
    def of(cls, ask: Ask, peer: Peer, answer: LockAnswer, *, count: int) -> Source:
        """count: blocks of the whole load."""
        records = np.zeros(count, BLOCK_RECORD)
        records[list(ask.positions)] = np.frombuffer(answer.records, BLOCK_RECORD)
        return cls(ask, peer, answer, records)

    @property
    def held(self) -> list[int]:
        """Positions that the owner says it holds."""
        found: list[int] = np.flatnonzero(self.records["state"] == 1).tolist()
        return found


class Fetcher:
    """See the module docstring."""

    def __init__(
        self,
        store: Store,
        peers: Peers,
        counters: ReaderCounters,
        *,
        clock: Callable[[], float],
        max_chunk_bytes: int,
        max_read_bytes: int,
    ) -> None:
        self._store = store
        self._peers = peers
        self._counters = counters
        self._clock = clock
        self._max_chunk_bytes = max_chunk_bytes
        self._max_read_bytes = max_read_bytes

    async def fetch(self, load: Load, source: Source) -> None:
        """Reads what the owner holds, chunk by chunk, until the ask's time is up (then others may have it)."""
        held = source.held
        right = source.records["length"] == load.block_bytes
        whole = [position for position in held if right[position]]
        if len(whole) < len(held):
            load.plan.read(source.ask, dict.fromkeys(set(held) - set(whole), LoadStatus.CORRUPT))
        room_blocks = max(0, self._max_read_bytes - load.peer_bytes) // load.block_bytes
        for part in chunks(min(len(whole), room_blocks), block_bytes=load.block_bytes, chunk_bytes=self._max_chunk_bytes):
            late = source.ask.until_s <= self._clock()
            if source.peer.broken or late:
                status = LoadStatus.LATE if late else LoadStatus.MISS
                load.plan.read(source.ask, dict.fromkeys(whole[part.start :], status))
                return
            await self._fetch_chunk(load, source, [whole[at] for at in part])

    async def _fetch_chunk(self, load: Load, source: Source, wanted: Sequence[int]) -> None:
        began_s = self._clock()
        left_s = source.ask.until_s - began_s
        reserved, _ = self._store.reserve(
            load.namespace_digest, load.fingerprints.select(wanted), session=AGENT, lease_s=left_s
        )
        positions = [wanted[at] for at in reserved.positions]
        outcome: ReadOutcome | None = None
        try:
            self._sort_out(load, source.ask, wanted, reserved.states)
            if positions:
                blocks = _read_list(load, source, positions, reserved.offsets)
                size_bytes = len(positions) * load.block_bytes
                outcome = await source.peer.read(blocks, size_bytes=size_bytes, timeout_s=left_s)
        finally:
            # Also when cancelled at shutdown: a plane's read ends, cancelled or not, only when its native call has.
            if positions:
                self._finish(load, source, reserved, positions, outcome)
        self._judge(source.peer, outcome, waited_s=self._clock() - began_s)

    def _judge(self, peer: Peer, outcome: ReadOutcome | None, *, waited_s: float) -> None:
        """What a read says about the peer. One that delivered a part of it in time is slow, not dead."""
        if outcome is None:
            return  # other reads had the peer's whole budget
        if ReadStatus.PEER_LOST in outcome.statuses:
            self._peers.failed(peer)
        elif ReadStatus.LATE in outcome.statuses and ReadStatus.OK not in outcome.statuses:
            self._peers.late(peer, waited_s=waited_s)

    def _finish(
        self, load: Load, source: Source, reserved: Reserved, positions: Sequence[int], outcome: ReadOutcome | None
    ) -> None:
        """Commits what arrived; the other slots are freed, or quarantined until nothing can write to them."""
        statuses = outcome.statuses if outcome else bytes([ReadStatus.LATE]) * len(positions)
        arrived = [at for at, status in enumerate(statuses) if status == ReadStatus.OK]
        if arrived:
            self._store.commit(
                reserved.reservation,
                session=AGENT,
                positions=[reserved.positions[at] for at in arrived],
                checksums=source.records["checksum"][[positions[at] for at in arrived]].tobytes(),
            )
            load.peer_bytes += len(arrived) * load.block_bytes
        if outcome is None or outcome.settled.done():
            self._store.abort(reserved.reservation, session=AGENT)
        elif len(arrived) < len(statuses):
            self._counters.quarantined += self._store.quarantine(reserved.reservation, outcome.settled)
        bad = {positions[at]: OUTCOMES[ReadStatus(status)] for at, status in enumerate(statuses) if status != ReadStatus.OK}
        load.plan.read(source.ask, bad)
        self.hold(load, [positions[at] for at in arrived], LoadStatus.HIT_PEER)

    def _sort_out(self, load: Load, ask: Ask, positions: Sequence[int], states: bytes) -> None:
        """Blocks for which we got no slot: here by now, being written by somebody, or no room."""
        if states.count(BlockState.RESERVED) == len(states):
            return
        here = []
        for position, state in zip(positions, states, strict=True):
            match state:
                case BlockState.PRESENT:
                    here.append(position)
                case BlockState.BUSY:
                    load.writers[position] = ask
                case BlockState.NO_SPACE:
                    self._counters.no_space += 1
        self.hold(load, here, LoadStatus.HIT_PEER)

    def hold(self, load: Load, positions: Iterable[int], status: LoadStatus) -> None:
        """Locks for the engine what is here now among `positions`, and notes it as a hit."""
        chosen = tuple(positions)
        wanted = load.fingerprints.select(chosen)
        if load.session == AGENT or not self._store.is_attached(load.session):
            flags = self._store.present(load.namespace_digest, wanted)
            load.plan.hold([position for position, flag in zip(chosen, flags, strict=True) if flag], status)
            return
        locked = self._store.lock(load.namespace_digest, wanted, session=load.session, lease_s=load.lease_s, lock=load.lock)
        if locked.lock:
            load.lock, load.lock_expires_s = locked.lock, locked.expires_s
        found = np.frombuffer(locked.records, BLOCK_RECORD)
        here = np.flatnonzero(found["state"] == 1)
        hits = np.array(chosen, np.intp)[here]
        np.frombuffer(load.records, BLOCK_RECORD)[hits] = found[here]
        load.plan.hold(hits.tolist(), status)


def _read_list(load: Load, source: Source, positions: Sequence[int], destinations: bytes) -> ReadList:
    chosen = load.fingerprints.select(positions)
    return ReadList(
        lock=source.answer.lock,
        epoch=source.answer.epoch,
        namespace_digest=load.namespace_digest,
        fingerprints=chosen.packed,
        width=chosen.width,
        records=source.records[positions].tobytes(),
        destinations=destinations,
    )
