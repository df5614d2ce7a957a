"""A device without hardware that keeps exactly the promises of memory/device.py, and none beyond: for tests on any machine.

Copies happen later and piece by piece: streams take turns by a seeded die, and within one call's blocks the pieces go in any
order, so that whoever reads before the event sees old bytes, new ones, or both. Source bytes are read when a piece is copied,
not when the copy was begun. Touching memory that was unmapped crashes the process, as it should.

    stepped=True    nothing happens but by `step` (one piece or one event), so a test chooses every interleaving
    else            a thread steps, as fast as it can; `hold` makes the device stand still, `resume` lets it go on

A pool is a file in `directory`, so another process opens it by its handle as with CUDA IPC.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from peer_agent.memory.device import HANDLE_BYTES, Array, DeviceError, DevicePool, Segment

PIECE_BYTES = 4096


class FakeEvent:
    """See memory/device.py."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._done = False
        self._failure = ""

    def done(self) -> bool:
        with self._changed:
            return self._answer()

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._failure, max(0.0, timeout_s))
            return self._answer()

    def _answer(self) -> bool:
        if self._failure:
            raise DeviceError(self._failure)
        return self._done


@dataclass(slots=True)
class _Work:
    """spans: (destination, source, bytes) still to copy; then the event is done. data: what the sources point into, if ours."""

    spans: list[tuple[int, int, int]]
    event: FakeEvent
    data: object


@dataclass(slots=True, eq=False)
class FakeStream:
    """See memory/device.py."""

    device: FakeDevice
    queue: deque[_Work] = field(default_factory=deque)
    failure: str = ""

    def record(self) -> FakeEvent:
        return self.device.enqueue(self, [])


class FakeDevice:
    """See the module docstring. faults: rules of the port that a caller has broken; a test asserts that there are none."""

    def __init__(self, *, seed: int = 0, stepped: bool = False, directory: str = "/dev/shm") -> None:
        self.name = self.identity = f"fake:{seed}"
        self.faults: list[str] = []
        self.pageable_bytes = 0
        self._directory = directory
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._streams: list[FakeStream] = []
        self._pinned: dict[int, int] = {}
        self._files: dict[int, str] = {}
        self._held = False
        self._closed = False
        self._failing = ""
        self._thread = None if stepped else threading.Thread(target=self._run, name="fake-device", daemon=True)
        if self._thread is not None:
            self._thread.start()

    @classmethod
    def at(cls, which: str) -> Self:
        """See memory/device.py make_device."""
        return cls(seed=int(which) if which.isdigit() else 0)

    # the port

    def allocate(self, *, slots: int, segment_bytes: Sequence[int]) -> DevicePool:
        descriptor, path = tempfile.mkstemp(prefix="kvdir-fake-device-", dir=self._directory)
        try:
            os.ftruncate(descriptor, max(1, slots * sum(segment_bytes)))
            os.posix_fallocate(descriptor, 0, max(1, slots * sum(segment_bytes)))
        except OSError as error:
            os.unlink(path)
            raise DeviceError(f"no room for a pool of {slots} slots: {error.strerror}; allocate fewer") from error
        finally:
            os.close(descriptor)
        offsets = [slots * sum(segment_bytes[:at]) for at in range(len(segment_bytes))]
        pool = self._map(path, slots, list(zip(offsets, segment_bytes, strict=True)))
        self._files[id(pool)] = path
        return pool

    def stream(self) -> FakeStream:
        with self._changed:
            self._streams.append(made := FakeStream(self))
            return made

    def copy_to_host(self, pool: DevicePool, slots: Array, host: Array, *, stream: Any) -> FakeEvent:
        device, addresses, lengths = pool.spans(slots, host)
        return self._copy(addresses, device, lengths, host=addresses, stream=stream)

    def copy_from_host(self, pool: DevicePool, slots: Array, host: Array, *, stream: Any) -> FakeEvent:
        device, addresses, lengths = pool.spans(slots, host)
        return self._copy(device, addresses, lengths, host=addresses, stream=stream)

    def pin(self, region: memoryview) -> None:
        address, size = _place(region)
        with self._changed:
            if address in self._pinned:
                raise DeviceError("this memory is pinned already: pin a mapping once")
            self._pinned[address] = size

    def unpin(self, region: memoryview) -> None:
        address, size = _place(region)
        with self._changed:
            self._pinned.pop(address, None)
            spans = (span for stream in self._streams for work in stream.queue for span in work.spans)
            if any(address <= at < address + size for to, source, _ in spans for at in (to, source)):
                self.faults.append("host memory was unpinned while a copy used it")

    def export_handle(self, pool: DevicePool) -> bytes:
        if id(pool) not in self._files:
            raise DeviceError("this pool is not this device's own, or closed: export it where it was allocated")
        first = min(segment.address for segment in pool.segments)
        segments = [(segment.address - first, segment.size_bytes) for segment in pool.segments]
        document = {"fake": self._files[id(pool)], "slots": pool.slots, "segments": segments}
        return json.dumps(document).encode()

    def open_handle(self, handle: bytes) -> DevicePool:
        try:
            document = json.loads(handle[:HANDLE_BYTES])
            return self._map(document["fake"], int(document["slots"]), document["segments"])
        except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
            raise DeviceError(f"this handle opens nothing here ({error}): is its owner alive?") from error

    def close_pool(self, pool: DevicePool) -> None:
        path = self._files.pop(id(pool), "")
        if path:
            os.unlink(path)

    # what a test does with it

    def fill(self, pool: DevicePool, slots: Sequence[int], blocks: Array, *, stream: FakeStream) -> FakeEvent:
        """A kernel that computes blocks, (n, block_bytes) uint8: begun here, done at some time, like any other."""
        data = np.array(blocks, np.uint8)
        host = (np.arange(len(slots), dtype=np.uint64) * np.uint64(data.shape[-1])) + np.uint64(data.ctypes.data)
        device, addresses, lengths = pool.spans(pool.checked(slots), host)
        return self.enqueue(stream, _spans(device, addresses, lengths), data)

    def content(self, pool: DevicePool, slots: Sequence[int]) -> Array:
        """What the memory holds at this moment, (n, block_bytes) uint8: old, new or mixed."""
        made = np.zeros((len(slots), pool.block_bytes), np.uint8)
        host = np.arange(len(slots), dtype=np.uint64) * np.uint64(pool.block_bytes) + np.uint64(made.ctypes.data)
        device, addresses, lengths = pool.spans(pool.checked(slots), host)
        for to, source, size in _spans(addresses, device, lengths):
            ctypes.memmove(to, source, size)
        return made

    @property
    def queued(self) -> int:
        """Copies and events that are not done."""
        with self._changed:
            return sum(len(stream.queue) for stream in self._streams)

    def step(self) -> bool:
        """One piece of a copy, or one event, of a stream chosen by the die. False: nothing to do (or held)."""
        with self._changed:
            return self._step()

    def drain(self) -> None:
        """Everything queued so far, and what is queued meanwhile."""
        while self.step():
            pass

    def hold(self) -> None:
        """The device stands still: nothing proceeds, no call fails."""
        with self._changed:
            self._held = True

    def resume(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def fail_next_copy(self, reason: str = "the copy engine reports an illegal address") -> None:
        """The next copy begun fails, and with it everything later on its stream."""
        with self._changed:
            self._failing = reason

    def close(self) -> None:
        """Stops; events that are not done fail, files of pools go. Idempotent."""
        with self._changed:
            self._closed = True
            for stream in self._streams:
                self._break(stream, "the device was closed")
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for path in self._files.values():
            os.unlink(path)
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # internals

    def enqueue(self, stream: FakeStream, spans: list[tuple[int, int, int]], data: object = None) -> FakeEvent:
        """Work and the event behind it."""
        event = FakeEvent(self._changed)
        with self._changed:
            stream.queue.append(_Work(spans, event, data))
            if spans and self._failing:
                stream.failure, self._failing = self._failing, ""
            if stream.failure or self._closed:
                self._break(stream, stream.failure or "the device was closed")
            self._changed.notify_all()
        return event

    def _copy(self, to: Array, source: Array, lengths: Array, *, host: Array, stream: FakeStream) -> FakeEvent:
        with self._changed:
            for address, size in zip(host.tolist(), lengths.tolist(), strict=True):
                if not any(first <= address < first + length for first, length in self._pinned.items()):
                    self.pageable_bytes += size
        return self.enqueue(stream, _spans(to, source, lengths))

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._step():
                    self._changed.wait()

    def _step(self) -> bool:
        """Call with the lock held."""
        ready = [stream for stream in self._streams if stream.queue]
        if not ready or self._held:
            return False
        stream = self._random.choice(ready)
        work = stream.queue[0]
        if work.spans:
            at = self._random.randrange(len(work.spans))
            to, source, size = work.spans[at]
            piece = min(size, PIECE_BYTES)
            ctypes.memmove(to, source, piece)
            if piece < size:
                work.spans[at] = (to + piece, source + piece, size - piece)
            else:
                work.spans[at] = work.spans[-1]
                work.spans.pop()
            return True
        stream.queue.popleft()
        work.event._done = True
        self._changed.notify_all()
        return True

    def _break(self, stream: FakeStream, reason: str) -> None:
        stream.failure = reason
        for work in stream.queue:
            work.event._failure = reason
        stream.queue.clear()

    def _map(self, path: str, slots: int, segments: Sequence[tuple[int, int]]) -> DevicePool:
        with open(path, "r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
        if any(offset < 0 or size < 1 or offset + slots * size > len(mapping) for offset, size in segments):
            raise ValueError("it names memory outside the pool")
        array = np.frombuffer(mapping, np.uint8)
        base = array.ctypes.data
        parts = tuple(Segment(base + offset, size, size) for offset, size in segments)
        return DevicePool(self, slots, parts, owner=array)


def _spans(to: Array, source: Array, lengths: Array) -> list[tuple[int, int, int]]:
    return list(zip(to.tolist(), source.tolist(), lengths.tolist(), strict=True))


def _place(region: memoryview) -> tuple[int, int]:
    """(address, bytes) of a buffer."""
    return int(np.frombuffer(region, np.uint8).ctypes.data), region.nbytes
