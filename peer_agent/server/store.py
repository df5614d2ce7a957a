"""The shell around the inventory: whatever it decides is done here, to memory, to the event stream, and to the data planes.

Order that everything rests on, without an await in between:
  reserve  inventory picks slots -> headers odd (out of sight) -> REMOVED published -> slots handed to the writer
  commit   header written, generation even -> visible in the inventory -> STORED published
  lock     inventory pins -> capability made -> planes may serve these slots to who shows it, until it expires
  unlock   planes stop -> slots may be reused
What is published of the ranks of a split is what all of them hold (peer_agent/core/completeness.py).
Owns: that order, and waking those who wait for another writer's block. Does not: choose peers or know gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvdir.core.event import Event
from kvdir.core.policy import ALL, Grant
from kvdir.errors import InvalidInput, Overloaded, TooLarge, UnknownNamespace
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from kvdir.namespace import Namespace
from peer_agent import _native
from peer_agent.core.capability import CapabilityMint
from peer_agent.core.completeness import Completeness
from peer_agent.core.effects import Ended, Locked, Occupancy, Reserved
from peer_agent.core.inventory import AGENT, PEERS, Inventory
from peer_agent.core.records import RESERVE_RECORD
from peer_agent.core.slot_table import SlotTable
from peer_agent.transport.base import Transport


class Store:
    """What this node holds, with its bytes. Times are monotonic seconds of `clock`."""

    def __init__(
        self,
        inventory: Inventory,
        region: memoryview,
        namespaces: Mapping[bytes, Namespace],
        *,
        publish: Callable[[Event], object],
        clock: Callable[[], float],
        max_locks: int,
        max_fingerprints: int,
        mint: CapabilityMint,
    ) -> None:
        self.namespaces = dict(namespaces)
        self.planes: Sequence[Transport] = ()
        self._inventory = inventory
        self._region = region
        self.completeness = Completeness()
        for namespace in self.namespaces.values():
            self.completeness.serve(namespace.digest, _family(namespace))
        self._publish = publish
        self._clock = clock
        self._max_locks = max_locks
        self._max_fingerprints = max_fingerprints
        self._mint = mint
        self._done: dict[int, asyncio.Event] = {}
        self.told: Callable[[Event], None] = lambda _: None
        """Of every block in memory that comes or goes, whatever the other ranks of its split hold."""
        inventory.tick(clock())  # so that the age of the first blocks counts from now

    def add(self, namespace: Namespace, table: SlotTable) -> None:
        """Serves one more namespace from now on, from slots that are in the region. Announce it first."""
        table.now_s = self._clock()
        self.namespaces[namespace.digest] = namespace  # first: metrics name every table from their own thread
        self._inventory.add_table(table)
        for event in self.completeness.serve(namespace.digest, _family(namespace)):
            self._publish(event)

    def publish(self, event: Event) -> None:
        """Blocks of this node have changed so, in whatever tier: tells of what that made, or unmade, complete."""
        for told in self.completeness.publish(event):
            self._publish(told)

    # sessions

    def open_session(self, session: int) -> None:
        self._inventory.open_session(session)

    def end_session(self, session: int, *, writing: bool) -> None:
        """See Inventory.end_session."""
        self._inventory.end_session(session, writing=writing)
        self._wake()

    def is_attached(self, session: int) -> bool:
        return self._inventory.is_attached(session)

    def settle_sessions(self, is_writing: Callable[[int], bool]) -> int:
        """Frees quarantined slots of engines that are not writing now, gone or not. Returns slots freed."""
        quiet = [session for session in self._inventory.unsettled_sessions() if not is_writing(session)]
        return sum(self._inventory.settle_session(session) for session in quiet)

    # writers

    def reserve(
        self, namespace_digest: bytes, fingerprints: Fingerprints, *, session: int, lease_s: float, twin_of: int = 0
    ) -> tuple[Reserved, bytes]:
        """Slots to write to, and the ReserveResponse.blocks records that say so. twin_of: see Inventory.reserve."""
        self._check(fingerprints)
        answer = self._inventory.reserve(
            namespace_digest, fingerprints, session=session, now_s=self._clock(), lease_s=lease_s, twin_of=twin_of
        )
        generations = _native.begin_write(self._region, answer.offsets)
        self._publish_all(answer.events)
        records = np.zeros(len(fingerprints), RESERVE_RECORD)
        records["state"] = np.frombuffer(answer.states, np.uint8)
        granted = np.array(answer.positions, np.intp)
        records["offset"][granted] = np.frombuffer(answer.offsets, "<u8")
        records["generation"][granted] = np.frombuffer(generations, "<u8").astype("<u4")
        return answer, records.tobytes()

    def commit(
        self, reservation: int, *, session: int, positions: Sequence[int] | None = None, checksums: bytes
    ) -> tuple[int, int]:
        """Makes blocks visible. checksums: u64 LE per chosen position, ascending. Returns (committed, rejected)."""
        granted = self._inventory.granted(reservation, session=session, positions=positions)
        if granted is None:
            return 0, self.abort(reservation, session=session)  # the writer says that it has finished
        if len(checksums) != 8 * len(granted.positions):
            raise InvalidInput(f"{len(checksums)} bytes of checksums for {len(granted.positions)} blocks: 8 bytes a block")
        namespace = self.namespaces[granted.namespace_digest]
        records = _native.commit(
            self._region,
            granted.offsets,
            granted.namespace_digest,
            granted.fingerprints.packed,
            granted.fingerprints.width,
            namespace.block_bytes,
            checksums,
        )
        self._publish_all(self._inventory.commit(reservation, granted, records))
        self._wake(everybody=granted.contested)
        return len(granted.positions), 0

    async def checksums(self, reservation: int, *, session: int, positions: Sequence[int] | None) -> bytes:
        """XXH3-64 of what was written, for writers that did not compute it. In a thread: it reads every byte."""
        granted = self._inventory.granted(reservation, session=session, positions=positions)
        if granted is None:
            return b""
        length = self.namespaces[granted.namespace_digest].block_bytes
        return await asyncio.to_thread(_native.payload_checksums, self._region, granted.offsets, length)

    def granted_positions(self, reservation: int, *, session: int) -> tuple[int, ...]:
        """Positions that may still be committed; empty when the reservation is gone."""
        granted = self._inventory.granted(reservation, session=session)
        return granted.positions if granted else ()

    def abort(self, reservation: int, *, session: int) -> int:
        """The writer has finished and wants nothing (more) committed. Returns slots freed."""
        freed = self._inventory.abort(reservation, session=session)
        self._wake()
        return freed

    def quarantine(self, reservation: int, settled: asyncio.Future[None]) -> int:
        """A transfer may still write to what is open of our own `reservation`; free again once `settled` is done."""
        if settled.done():
            return self.abort(reservation, session=AGENT)
        slots = self._inventory.quarantine(reservation)
        self._wake()
        settled.add_done_callback(lambda _: self._inventory.settle(reservation))
        return slots

    async def wait_for_writers(self, namespace_digest: bytes, fingerprints: Fingerprints, *, timeout_s: float) -> None:
        """Until nobody is writing any of these blocks, or the time is up. Says nothing about the outcome."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        while writers := self._inventory.writers(namespace_digest, fingerprints):
            event = self._done.setdefault(writers.pop(), asyncio.Event())
            try:
                async with asyncio.timeout_at(until_s):
                    await event.wait()
            except TimeoutError:
                return

    # readers

    def present(self, namespace_digest: bytes, fingerprints: Fingerprints) -> bytes:
        """One byte per fingerprint: 1 if it is visible here."""
        self._check(fingerprints)
        return self._inventory.present(namespace_digest, fingerprints)

    def lock(
        self,
        namespace_digest: bytes,
        fingerprints: Fingerprints,
        *,
        session: int,
        lease_s: float,
        lock: int = 0,
        reader: str = "",
        holder: str = "",
    ) -> Locked:
        """Locks what is here, for the whole list. For peers, the planes serve it to `reader` from now on, by its capability.

        holder: the identity behind a peer; nobody else can use the lock over gRPC.
        """
        self._check(fingerprints)
        locked = self._inventory.lock(
            namespace_digest, fingerprints, session=session, now_s=self._clock(), lease_s=lease_s, lock=lock, holder=holder
        )
        if session != PEERS or not locked.lock:
            return locked
        number, records, expires_s = locked.lock, locked.records, locked.expires_s
        capability = self._mint.capability(number, records, reader=reader, expires_s=expires_s)
        for plane in self.planes:
            plane.grant(number, records, expires_s=expires_s, capability=capability)
        return replace(locked, capability=capability)

    def admit_lock(self, *, for_peers: bool) -> None:
        """Raises Overloaded when peers, or engines, hold as many locks as either may: neither crowds out the other."""
        peers = self._inventory.peer_locks
        held = peers if for_peers else self._inventory.locks - peers
        if held >= self._max_locks:
            raise Overloaded(f"{self._max_locks} locks are held: release some, wait for leases to end, or raise max_locks")

    def unlock(self, locks: Iterable[int], *, session: int, holder: str = "") -> int:
        """Ends locks early; returns how many were not (or no longer) this session's and holder's."""
        return self._end(self._inventory.unlock(locks, session=session, holder=holder)).unknown

    def locked_records(self, lock: int, *, session: int, holder: str = "") -> set[bytes]:
        """The BLOCK_RECORDs that a live lock of this session and holder covers; empty when it has ended."""
        return self._inventory.locked_records(lock, session=session, holder=holder)

    def pin(self, namespace_digest: bytes, fingerprints: Fingerprints, *, pin_s: float) -> int:
        """See Inventory.pin."""
        self._check(fingerprints)
        return self._inventory.pin(namespace_digest, fingerprints, now_s=self._clock(), pin_s=pin_s)

    def discard(self, namespace_digest: bytes, fingerprints: Fingerprints) -> int:
        """Takes blocks that failed verification out of sight, here and in the directory. Returns how many were here."""
        self._check(fingerprints)
        offsets, events = self._inventory.discard(namespace_digest, fingerprints)
        _native.retire(self._region, offsets)
        self._publish_all(events)
        return len(offsets) // 8

    def evict(self, namespace_digest: bytes, *, max_blocks: int, keep_blocks: int, older_than_s: float) -> int:
        """Takes the least recently used blocks out of sight; see Inventory.evict. Returns how many.

        keep_blocks: of those that were published, since who asks knows of no others.
        """
        offsets, events = self._inventory.evict(
            namespace_digest,
            max_blocks=max_blocks,
            keep_blocks=keep_blocks + self.incomplete(namespace_digest),
            unused_since_s=self._clock() - older_than_s,
        )
        _native.retire(self._region, offsets)
        self._publish_all(events)
        return len(offsets) // 8

    def tick(self) -> None:
        """Ends leases that have run out."""
        self._end(self._inventory.tick(self._clock()))
        self._wake()

    # figures

    def held(self, namespace_digest: bytes, max_blocks: int | None = None) -> tuple[Fingerprints, ...]:
        """See Inventory.held."""
        return self._inventory.held(namespace_digest, max_blocks)

    def incomplete(self, namespace_digest: bytes) -> int:
        """Visible blocks that are not published, because another rank of the split lacks its part."""
        if not self.completeness.tracks(namespace_digest):
            return 0
        found = next(item for item in self.occupancy() if item.namespace_digest == namespace_digest)
        return found.committed - self.completeness.count(Tier.CPU, namespace_digest)

    def occupancy(self, tenants: Grant = ALL) -> tuple[Occupancy, ...]:
        """Of every namespace of these tenants."""
        found = self._inventory.occupancy()
        if tenants.every:
            return found
        return tuple(item for item in found if self.namespaces[item.namespace_digest].tenant in tenants)

    def oldest_use_s(self) -> float:
        """See Inventory.oldest_use_s."""
        return self._inventory.oldest_use_s(self._clock())

    @property
    def locks(self) -> int:
        return self._inventory.locks

    @property
    def sessions(self) -> int:
        return self._inventory.open_sessions

    def namespace(self, digest: bytes, tenants: Grant = ALL) -> Namespace:
        """UnknownNamespace, naming what is known of these tenants, if it is not served here, or of another tenant."""
        found = self.namespaces.get(digest)
        if found is None or found.tenant not in tenants:
            seen = (namespace for namespace in self.namespaces.values() if namespace.tenant in tenants)
            known = ", ".join(namespace.short for namespace in seen) or "none yet"
            raise UnknownNamespace(f"namespace {digest.hex()[:16]} is not served here; here: {known}")
        return found

    # internals

    def _check(self, fingerprints: Fingerprints) -> None:
        if len(fingerprints) > self._max_fingerprints:
            raise TooLarge(
                f"{len(fingerprints)} fingerprints in one request, max_fingerprints is {self._max_fingerprints}: split the list"
            )

    def _publish_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self.told(event)
            self.publish(event)

    def _end(self, ended: Ended) -> Ended:
        for lock in ended.revoked:
            for plane in self.planes:
                plane.revoke(lock)
        return ended

    def _wake(self, *, everybody: bool = False) -> None:
        """Wakes who waits for reservations that have ended. everybody: for one that lost blocks to its twin, too."""
        for reservation in [number for number in self._done if everybody or not self._inventory.is_open(number)]:
            self._done.pop(reservation).set()


def _family(namespace: Namespace) -> tuple[bytes, ...]:
    return tuple(member.digest for member in namespace.family())
