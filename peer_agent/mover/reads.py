"""One read inside the mover: payloads, then headers, then verification; and what happens to it after its deadline.

    connecting -> groups of blocks, WINDOW at a time: payloads, headers (for a few blocks again), verdict -> Done
                        |
                        +- deadline or abort: Late, with the groups that are decided; those under way may end by themselves
                           within LINGER_S, else the link is closed, and when nothing writes any more: Settled

Rules:
- No get is posted whose range was not checked here, against the peer's arena and against the destination slot.
- Closing a link fails every other read of that peer, so a late one gets LINGER_S first. Whatever is posted is waited for.
- If a link does not close within CLOSE_S, no promise about late writes can be given but one: a dead process does not write. The
  mover ends itself, and the agent settles everything once it has reaped it.

Does not: send messages or keep tickets (main.py), or know a library (backend.py).
"""

from __future__ import annotations

import asyncio
import struct
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from peer_agent import _native
from peer_agent.memory.layout import HEADER_BYTES
from peer_agent.mover.backend import Backend, Gets, Link, Memory, PeerMemory, Unsettled
from peer_agent.mover.messages import MAX_READ_BLOCKS, MAX_READS, PENDING, Read
from peer_agent.transport.base import BLOCK_RECORD_BYTES, ReadStatus

LINGER_S = 0.25
CLOSE_S = 2.0
GROUP_BYTES = 4 << 20
WINDOW = 3
"""A read's groups under way at once: while one is verified, others travel. What is given up late is at most so much."""
THREAD_BYTES = 1 << 20
"""From this size on payloads are hashed in a thread (some 50 us per MiB), while other reads' transfers go on in the loop."""
HASH_THREADS = 2
SCRATCH_BYTES = MAX_READS * MAX_READ_BLOCKS * HEADER_BYTES

_PENDING, _LOST = bytes([PENDING]), bytes([ReadStatus.PEER_LOST])
_GENERATION = struct.Struct("<8xQ")


class HungLink(Unsettled):
    """A link did not close: only the end of this process settles its transfers."""


@dataclass(slots=True)
class Peer:
    """A peer that the agent told us about, and the link to it while there is one."""

    memory: PeerMemory
    link: Link | None = None
    connecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    forgotten: bool = False


class Reads:
    """Serves Read messages over one backend."""

    def __init__(self, backend: Backend, memory: Memory) -> None:
        self._backend = backend
        self._memory = memory
        self._cells = list(range(MAX_READS))
        self._free = asyncio.Semaphore(MAX_READS)
        self._hashing = ThreadPoolExecutor(HASH_THREADS, "hash")

    async def connect(self, peer: Peer) -> Link:
        """The peer's link, made now unless there is a whole one. Raises ConnectionError or ValueError."""
        async with peer.connecting:
            if peer.forgotten:
                raise ConnectionError("closed")
            if peer.link is not None and peer.link.broken:
                await self.drop(peer)
            if peer.link is None:
                peer.link = await self._backend.connect(peer.memory)
                if peer.forgotten:  # meanwhile
                    await self.drop(peer)
                    raise ConnectionError("closed")
            return peer.link

    async def drop(self, peer: Peer) -> None:
        """Closes the peer's link, if any. Raises HungLink."""
        link, peer.link = peer.link, None
        if link is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await link.close()
        except TimeoutError as error:
            raise HungLink(f"a link did not close within {CLOSE_S} s") from error

    def start(self, peer: Peer, wanted: Read) -> Reading:
        return Reading(self, peer, wanted)

    async def _run(self, reading: Reading) -> None:
        """Decides as many blocks as it can. Cancellable until `reading.link` is set, and not afterwards."""
        wanted = reading.wanted
        reading.verdict[:], slots, *_ = _native.plan_gets(
            self._memory.arena, wanted.records, wanted.destinations, reading.peer.memory.arena_bytes
        )
        if not slots:
            return
        async with self._free:
            cell = self._cells.pop()
            try:
                reading.link = await self.connect(reading.peer)
                groups = iter(_groups(wanted))
                await asyncio.gather(*(self._pull(reading, reading.link, groups, cell) for _ in range(WINDOW)))
            except (ConnectionError, ValueError) as error:  # no link
                reading.reason = str(error)
            finally:
                self._cells.append(cell)

    async def _pull(self, reading: Reading, link: Link, groups: Iterator[slice], cell: int) -> None:
        """Reads one group after the other, until there is none, the link is lost, or nobody waits any more."""
        for group in groups:
            if reading.stopped or link.broken:
                return
            try:
                reading.verdict[group] = await self._read(link, reading.peer, reading.wanted.part(group), cell, group.start)
            except (ConnectionError, ValueError) as error:
                reading.reason = str(error)

    async def _read(self, link: Link, peer: Peer, wanted: Read, cell: int, first: int) -> bytes:
        """Statuses of one group, whose headers go to the cell from its `first` place on. ConnectionError: the link is lost."""
        pending, slots, *packed = _native.plan_gets(
            self._memory.arena, wanted.records, wanted.destinations, peer.memory.arena_bytes
        )
        payloads = Gets(*packed)
        if not slots:
            return pending
        await link.gets(payloads)
        headers = await self._headers(link, slots, cell, first)
        verify = partial(
            _native.verify_gets,
            self._memory.arena,
            wanted.records,
            wanted.namespace_digest,
            wanted.fingerprints,
            wanted.width,
            wanted.destinations,
            headers,
            pending,
        )
        if payloads.size < THREAD_BYTES:
            statuses = verify()
        else:
            statuses = await asyncio.get_running_loop().run_in_executor(self._hashing, verify)
        due = [index for index, status in enumerate(pending) if status == PENDING and statuses[index] == ReadStatus.CORRUPT]
        return await self._doubt(link, wanted.records, statuses, due, cell, first) if due else statuses

    async def _doubt(self, link: Link, records: bytes, statuses: bytes, due: list[int], cell: int, first: int) -> bytes:
        """CORRUPT becomes TORN where the generation has moved: a writer was halfway through the header."""
        named = [struct.unpack_from("<QQ", records, index * BLOCK_RECORD_BYTES) for index in due]
        headers = await self._headers(link, b"".join(struct.pack("<Q", offset) for offset, _ in named), cell, first)
        verdict = bytearray(statuses)
        for position, (index, (_, generation)) in enumerate(zip(due, named, strict=True)):
            if _GENERATION.unpack_from(headers, position * HEADER_BYTES)[0] != generation:
                verdict[index] = ReadStatus.TORN
        return bytes(verdict)

    async def _headers(self, link: Link, slots: bytes, cell: int, first: int) -> memoryview:
        """The slot headers at these offsets of the peer's arena, in scratch memory that stays ours until the cell is freed."""
        count, begin = len(slots) // 8, (cell * MAX_READ_BLOCKS + first) * HEADER_BYTES
        address = self._memory.scratch_address + begin
        local = struct.pack(f"<{count}Q", *range(address, address + count * HEADER_BYTES, HEADER_BYTES))
        await link.gets(Gets(slots, local, struct.pack("<Q", HEADER_BYTES) * count))
        return self._memory.scratch[begin : begin + count * HEADER_BYTES]


class Reading:
    """One Read under way. link: set from the moment on when something may write to its destinations.

    verdict: a byte per block, PENDING until decided; what has been decided is written no more. stopped: no group is begun.
    """

    def __init__(self, reads: Reads, peer: Peer, wanted: Read) -> None:
        self.peer = peer
        self.wanted = wanted
        self.verdict = bytearray([PENDING]) * (len(wanted.destinations) // 8)
        self.link: Link | None = None
        self.reason = ""
        self.stopped = False
        self._reads = reads
        self._aborted = asyncio.get_running_loop().create_future()
        self._work = asyncio.create_task(reads._run(self))

    def abort(self) -> None:
        if not self._aborted.done():
            self._aborted.set_result(None)

    async def statuses(self) -> bytes | None:
        """None: late or aborted; then `verdict` says what there is, and `settle` is due. ValueError: a list that is none."""
        left_s = self.wanted.deadline_ns / 1e9 - time.monotonic()
        if left_s > 0:
            await asyncio.wait({self._work, self._aborted}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._work.done():
            self.stopped = True
            return None
        self._work.result()
        return bytes(self.verdict).replace(_PENDING, _LOST)

    async def settle(self) -> None:
        """Returns when nothing writes to the destinations any more. Raises Unsettled, and what nobody expected: the first group
        that fails so ends `_work`, while gets of the others may go on.
        """
        if self.link is None:
            self._work.cancel()
        done, _ = await asyncio.wait({self._work}, timeout=LINGER_S)
        if not done and self.peer.link is self.link:
            await self._reads.drop(self.peer)
        if not done:
            done, _ = await asyncio.wait({self._work}, timeout=CLOSE_S)
        if not done:
            raise HungLink(f"a read did not end within {CLOSE_S} s after its link was closed")
        if not self._work.cancelled():
            self._work.result()


def _groups(wanted: Read) -> list[slice]:
    """Blocks that are fetched and verified together: some GROUP_BYTES of payload by the largest of them."""
    lengths = array("I", wanted.records)[6::8]  # of each record: three u64, u32 length, u32 state
    step = max(1, GROUP_BYTES // max(1, *lengths))
    return [slice(first, first + step) for first in range(0, len(lengths), step)]
