"""One node of the simulation: an LRU of trace blocks with the real outbox and sender in front of it. No clock, no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvdir.core.effects import RequestSketch
from kvdir.core.event import Batch, Event, Heartbeat, HeartbeatFigures, OwnerCount, SnapshotChunk
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sender import StreamSender
from kvdir.core.sketches import OwnerSketches, SketchStatement
from kvdir.core.snapshot import snapshot_chunks
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch
from kvdir.location import Tier
from kvdir.testing.lru import LruBlocks
from kvdir.testing.trace import fingerprints_of

UNLIMITED_CREDIT = 2**62  # flow control is the transport's matter and not simulated


class SimNode:
    """Publishes every change of its memory, at most `message_blocks` blocks a message (0: no limit)."""

    def __init__(
        self, name: str, epoch: int, *, namespace_digest: bytes, capacity_blocks: int, message_blocks: int = 0
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.memory = LruBlocks(capacity_blocks)
        self._sketches = OwnerSketches(Sketch)
        self.outbox = OwnerOutbox(sketches=self._sketches)
        self.sender = StreamSender(self.outbox, max_batch_events=1) if message_blocks else StreamSender(self.outbox)
        self.total_work_blocks = 0.0
        self._digest = namespace_digest
        self._message_blocks = message_blocks
        self._work_blocks = 0.0
        self._work_at_s = 0.0
        self._counts_at_seq = [0]

    def new_sender(self) -> StreamSender:
        """One more view of the outbox, for another coordinator; hand it to whatever is to be sent there as `via`."""
        return StreamSender(self.outbox)

    def opened(self, resume_seq: int, *, via: StreamSender | None = None) -> bool:
        """The coordinator has answered the hello. False: the outbox does not reach back to resume_seq."""
        sender = via or self.sender
        return sender.opened(resume_seq=resume_seq, hello_seq=self.outbox.last_seq, credit=UNLIMITED_CREDIT)

    def blocks_at(self, seq: int) -> int:
        """How many blocks it held after event `seq`: the truth that a figure as of `seq` must equal."""
        return self._counts_at_seq[seq]

    def store(self, blocks: Iterable[int]) -> None:
        """Adds blocks, evicts what does not fit, and notes both as events."""
        held = len(self.memory)
        added, evicted = self.memory.store(blocks)
        for part in self._parts(added):
            held += len(part)
            self._append(Event.stored(Tier.CPU, self._digest, fingerprints_of(part)), held)
        for part in self._parts(evicted):
            held -= len(part)
            self._append(Event.removed(Tier.CPU, self._digest, fingerprints_of(part)), held)

    def forget_silently(self) -> None:
        """A bug: everything is evicted, and no event says so. Its own sketch knows, because it is kept beside the memory."""
        self.memory.clear()
        self._sketches.restate(())

    def _parts(self, blocks: list[int]) -> Iterator[list[int]]:
        step = self._message_blocks or len(blocks) or 1
        return (blocks[at : at + step] for at in range(0, len(blocks), step))

    def _append(self, event: Event, held: int) -> None:
        self.outbox.append(event)
        self._counts_at_seq.append(held)

    def batches(self, *, via: StreamSender | None = None) -> Iterator[Batch]:
        """What is to be sent now."""
        while (batch := (via or self.sender).next_batch()) is not None:
            yield batch

    def heartbeat(self, *, via: StreamSender | None = None) -> Heartbeat:
        counts = (OwnerCount(self._digest, Tier.CPU, len(self.memory)),) if len(self.memory) else ()
        return (via or self.sender).heartbeat(HeartbeatFigures(len(self.memory), self.memory.capacity_blocks, counts))

    def snapshot(self, snapshot_id: int, *, via: StreamSender | None = None) -> Sequence[SnapshotChunk]:
        """An absolute statement as of now."""
        at_seq = self.outbox.last_seq
        (via or self.sender).snapshot_taken(at_seq)
        held: Fingerprints = fingerprints_of(self.memory)
        entries = [Event.stored(Tier.CPU, self._digest, held)] if held.packed else []
        return list(snapshot_chunks(snapshot_id, at_seq, entries))

    def sketch(self, request: RequestSketch, *, via: StreamSender | None = None) -> SketchStatement | None:
        """Count, digest and sketch of what it holds as of now."""
        return (via or self.sender).sketch(request.request_id, cells=request.cells, parts=request.parts)

    def outstanding_blocks(self, now_s: float, blocks_per_s: float) -> float:
        """Work left, if it computes so many blocks a second."""
        self._work_blocks = max(0.0, self._work_blocks - (now_s - self._work_at_s) * blocks_per_s)
        self._work_at_s = now_s
        return self._work_blocks

    def add_work(self, blocks: float) -> None:
        self._work_blocks += blocks
        self.total_work_blocks += blocks
