"""One read from one owner: its turn, slots, the verified read into them, commit of what arrived, and the rest given back.

Rules: a slot that did not get its block is freed only once the transfer has settled, else quarantined; what is here is locked
for the engine at once, so that it is not evicted by the next read of the same load; a hedge writes into slots of its own
beside the read that it doubles, and a block that the other one has committed meanwhile counts as here.
Does not: ask owners (owners.py), choose what to read (peer_agent/core/plan.py), or wait for other writers (load_work.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvdir.obs.spans import AnySpan, Kind, span
from peer_agent.core.effects import BlockState, Reserved
from peer_agent.core.leases import AGENT
from peer_agent.core.orders import Fetch, Outcome
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.core.schedule import Priority
from peer_agent.server.load import Load, ReaderCounters
from peer_agent.server.owners import Source
from peer_agent.server.peers import Peers
from peer_agent.server.store import Store
from peer_agent.server.turns import Turns
from peer_agent.transport.base import ReadList, ReadOutcome, ReadStatus

Array = np.ndarray[Any, Any]

_OUTCOMES = np.zeros(len(ReadStatus), np.uint8)
_OUTCOMES[ReadStatus.OK] = Outcome.HERE
_OUTCOMES[[ReadStatus.ABSENT, ReadStatus.STALE]] = Outcome.STALE
_OUTCOMES[[ReadStatus.TORN, ReadStatus.CORRUPT]] = Outcome.CORRUPT
_OUTCOMES[ReadStatus.LATE] = Outcome.LATE
_OUTCOMES[ReadStatus.PEER_LOST] = Outcome.LOST


@dataclass(slots=True, eq=False)
class Reading:
    """One fetch while it runs. outcome: an Outcome per position of the fetch, UNREAD until something is known.

    begun: its task runs. needless: nobody waits for it any more. flew_s: when its turn came; beside_bytes: other
    reads that were under way at the peer just then. asked_bytes: of the blocks that the peer was asked for, which are those
    that got a slot.
    """

    fetch: Fetch
    source: Source
    reservation: int = 0
    begun: bool = False
    needless: bool = False
    flew_s: float | None = None
    beside_bytes: int = 0
    asked_bytes: int = 0
    outcome: Array = field(init=False)

    def __post_init__(self) -> None:
        self.outcome = np.full(len(self.fetch.positions), Outcome.UNREAD, np.uint8)


class Fetcher:
    """See the module docstring."""

    def __init__(
        self, store: Store, peers: Peers, turns: Turns, counters: ReaderCounters, *, clock: Callable[[], float]
    ) -> None:
        self._turns = turns
        self._store = store
        self._peers = peers
        self._counters = counters
        self._clock = clock

    async def fetch(self, load: Load, reading: Reading, *, twin_of: Callable[[], int]) -> None:
        """Fills reading.outcome, also when cancelled. twin_of: the reservation to write beside when it begins, 0 for none."""
        fetch, peer = reading.fetch, reading.source.peer
        if peer.broken:
            reading.outcome[:] = Outcome.LOST
            return
        async with self._turns.turn(
            peer=peer.node,
            request=load.number,
            priority=load.priority,
            size_bytes=fetch.size_bytes,
            until_s=fetch.until_s,
        ) as mine:
            if not mine:
                reading.outcome[:] = Outcome.LATE  # other reads had the peer's whole budget until now
                return
            reading.flew_s = self._clock()
            reading.beside_bytes = self._beside_bytes(reading)
            with span("read", Kind.CLIENT) as told:
                outcome = await self._read(load, reading, twin_of())
                _describe(told, reading, outcome)
            if outcome is not None:
                self._judge(reading, outcome, block_bytes=load.block_bytes, took_s=self._clock() - reading.flew_s)

    def overdue(self, reading: Reading) -> None:
        """It takes longer than predicted: other loads need not find that out for themselves."""
        if reading.flew_s is not None:
            self._observe(reading, reading.asked_bytes, took_s=self._clock() - reading.flew_s, complete=False)

    async def _read(self, load: Load, reading: Reading, twin_of: int) -> ReadOutcome | None:
        """None: there was nothing to be read."""
        fetch, source = reading.fetch, reading.source
        left_s = fetch.until_s - self._clock()
        wanted = load.fingerprints.select(fetch.positions)
        reserved, _ = self._store.reserve(load.namespace_digest, wanted, session=AGENT, lease_s=left_s, twin_of=twin_of)
        reading.reservation = reserved.reservation
        outcome: ReadOutcome | None = None
        try:
            self._sort_out(load, reading, reserved)
            if reserved.positions:
                reading.asked_bytes = len(reserved.positions) * load.block_bytes
                blocks = _read_list(load, reading, reserved)
                outcome = await source.peer.read(blocks, timeout_s=left_s)
        finally:
            # Also when cancelled: a plane's read ends, cancelled or not, only when its native call has.
            if reserved.reservation:
                self._finish(load, reading, reserved, outcome)
        return outcome

    def _finish(self, load: Load, reading: Reading, reserved: Reserved, outcome: ReadOutcome | None) -> None:
        """Commits what arrived; the other slots are freed, or quarantined until nothing can write to them."""
        number, at = reserved.reservation, np.array(reserved.positions, np.intp)
        arrived = np.zeros(len(at), np.bool_)
        if outcome is not None:
            statuses = np.frombuffer(outcome.statuses, np.uint8)
            arrived = statuses == ReadStatus.OK
            reading.outcome[at] = _OUTCOMES[statuses]
        committed = self._commit(reading, reserved, at[arrived])
        load.peer_bytes += len(committed) * load.block_bytes
        self._counters.peer_bytes += len(committed) * load.block_bytes
        if len(committed):
            node = reading.source.peer.node
            self._counters.sources.add(node, blocks=len(committed), bytes=len(committed) * load.block_bytes)
        if load.priority is Priority.PREFETCH and len(committed):
            brought = load.fingerprints.select(np.array(reading.fetch.positions, np.intp)[committed].tolist())
            self._counters.tally.prefetched.bring(load.namespace_digest, brought, block_bytes=load.block_bytes)
        elif reading.needless or self._clock() > load.until_s:
            self._counters.tally.unwanted_bytes += len(committed) * load.block_bytes
        self._counters.hedged_bytes += (int(np.count_nonzero(arrived)) - len(committed)) * load.block_bytes
        if outcome is None or outcome.settled.done():
            self._store.abort(number, session=AGENT)
        else:
            self._counters.quarantined += self._store.quarantine(number, outcome.settled)
        self._note_here(load, reading, at[arrived])

    def _commit(self, reading: Reading, reserved: Reserved, arrived: Array) -> Array:
        """Makes visible what arrived and no twin has committed; returns that part."""
        granted = self._store.granted_positions(reserved.reservation, session=AGENT)
        mine = arrived if len(granted) == len(reserved.positions) else arrived[np.isin(arrived, granted)]
        if len(mine):
            positions = np.array(reading.fetch.positions, np.intp)[mine]
            checksums = reading.source.records["checksum"][positions].tobytes()
            self._store.commit(reserved.reservation, session=AGENT, positions=mine.tolist(), checksums=checksums)
        return mine

    def _sort_out(self, load: Load, reading: Reading, reserved: Reserved) -> None:
        """Blocks for which we got no slot: here by now, being written by somebody, or no room."""
        states = np.frombuffer(reserved.states, np.uint8)
        if len(reserved.positions) == len(states):
            return
        reading.outcome[states == BlockState.BUSY] = Outcome.BUSY
        if reading.fetch.hedges is None:  # else the first read has its slots, and goes on
            reading.outcome[states == BlockState.NO_SPACE] = Outcome.NO_ROOM
            self._counters.no_space += int(np.count_nonzero(states == BlockState.NO_SPACE))
        self._note_here(load, reading, np.flatnonzero(states == BlockState.PRESENT))

    def _note_here(self, load: Load, reading: Reading, at: Array) -> None:
        """Blocks of the fetch that should be here: locked for the engine, or gone again (UNREAD)."""
        if not len(at):
            return
        positions = np.array(reading.fetch.positions, np.intp)[at]
        here = np.isin(positions, self.lock_here(load, positions.tolist()))
        reading.outcome[at] = np.where(here, Outcome.HERE, Outcome.UNREAD)

    def lock_here(self, load: Load, positions: Sequence[int]) -> Sequence[int]:
        """Locks for the engine what is here now among `positions`; returns those."""
        wanted = load.fingerprints.select(positions)
        if load.session == AGENT or not self._store.is_attached(load.session):
            flags = self._store.present(load.namespace_digest, wanted)
            return [position for position, flag in zip(positions, flags, strict=True) if flag]
        locked = self._store.lock(load.namespace_digest, wanted, session=load.session, lease_s=load.lease_s, lock=load.lock)
        if locked.lock:
            load.lock = locked.lock
        found = np.frombuffer(locked.records, BLOCK_RECORD)
        here = np.flatnonzero(found["state"] == 1)
        hits = np.array(positions, np.intp)[here]
        np.frombuffer(load.records, BLOCK_RECORD)[hits] = found[here]
        chosen: list[int] = hits.tolist()
        return chosen

    def _judge(self, reading: Reading, outcome: ReadOutcome, *, block_bytes: int, took_s: float) -> None:
        """What a read says about the peer. One that delivered a part of it in time is slow, not dead; one that had less time
        than was predicted had no chance; blocks that it did not have say nothing about its bandwidth.
        """
        peer, statuses = reading.source.peer, outcome.statuses
        self._counters.tally.read(peer.plane, took_s=took_s, size_bytes=statuses.count(ReadStatus.OK) * block_bytes)
        if ReadStatus.PEER_LOST in statuses:
            self._peers.lost(peer)
            return
        late = ReadStatus.LATE in statuses
        if late and ReadStatus.OK not in statuses and took_s >= reading.fetch.predicted_s:
            self._peers.late(peer, waited_s=took_s)
        moved = len(statuses) - statuses.count(ReadStatus.ABSENT) - statuses.count(ReadStatus.STALE)
        self._observe(reading, moved * block_bytes, took_s=took_s, complete=not late)

    def _observe(self, reading: Reading, size_bytes: int, *, took_s: float, complete: bool) -> None:
        if not size_bytes:
            return
        self._peers.observed(
            reading.source.peer,
            size_bytes=size_bytes,
            took_s=took_s,
            queued_bytes=(reading.beside_bytes + self._beside_bytes(reading)) // 2,
            complete=complete,
        )

    def _beside_bytes(self, reading: Reading) -> int:
        """Other reads under way at the same peer now."""
        return self._turns.flying_bytes(reading.source.peer.node) - reading.fetch.size_bytes


def _describe(mine: AnySpan, reading: Reading, outcome: ReadOutcome | None) -> None:
    """Of the read that a span stands for."""
    if not mine:
        return
    mine.set("kvdir.peer", reading.source.peer.node)
    mine.set("kvdir.source", reading.source.peer.plane)
    mine.set("kvdir.blocks", len(reading.fetch.positions))
    mine.set("kvdir.bytes", reading.asked_bytes)
    mine.set("kvdir.hits", 0 if outcome is None else outcome.statuses.count(ReadStatus.OK))
    if reading.fetch.hedges is not None:
        mine.set("kvdir.hedge", True)


def _read_list(load: Load, reading: Reading, reserved: Reserved) -> ReadList:
    positions = [reading.fetch.positions[at] for at in reserved.positions]
    chosen = load.fingerprints.select(positions)
    answer = reading.source.answer
    return ReadList(
        lock=answer.lock,
        epoch=answer.epoch,
        namespace_digest=load.namespace_digest,
        fingerprints=chosen.packed,
        width=chosen.width,
        records=reading.source.records[positions].tobytes(),
        destinations=reserved.offsets,
        capability=answer.capability,
    )
