"""Keeps a checkpoint file up to date, and reads it at start. Encoding: core/checkpoint.py; what is believed: core/restore.py.

Rules: the event loop makes one page at a time and lets others run in between; bytes are written by a thread; the file is
written beside the old one, flushed, and takes its place in one step, so there is always a whole one. Readable by the owner
only: it has the seed of the index. A file that cannot be written is said and tried again; one that cannot be read is refused
with the reason, and the coordinator starts empty.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvdir.core.checkpoint import VERSION, CheckpointRefused, Head, decode_head, frames, parse
from kvdir.core.directory import Directory
from kvdir.core.restore import restore
from kvdir.obs.logs import say

log = logging.getLogger("kvdir.checkpoint")

_WRITE_BYTES = 2**20
_READ_BYTES = 2**20


@dataclass(slots=True)
class CheckpointFigures:
    """written, failed: files since the start. bytes, seconds: of the last one. refused: why the file at start was."""

    written: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    restored_nodes: int = 0
    restored_blocks: int = 0
    refused: str = ""


class Checkpointer:
    """Owns the file. `run` until cancelled, then `write` once more."""

    def __init__(self, path: Path, directory: Directory, figures: CheckpointFigures, *, seed: int, name: str) -> None:
        self._path = path
        self._directory = directory
        self._figures = figures
        self._seed = seed
        self._name = name

    async def run(self, every_s: float) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self.write()

    async def write(self) -> bool:
        """One whole file. False, logged and counted, when that did not work."""
        started_s = time.monotonic()
        try:
            size = await self._write(self._path.with_name(self._path.name + ".part"))
        except OSError as error:
            self._figures.failed += 1
            fix = "make the directory writable, or give another file with --checkpoint"
            say(log, logging.ERROR, "checkpoint not written", path=str(self._path), reason=str(error), fix=fix)
            return False
        figures = self._figures
        figures.written, figures.bytes, figures.seconds = figures.written + 1, size, time.monotonic() - started_s
        say(log, logging.INFO, "checkpoint", path=str(self._path), bytes=size, seconds=round(figures.seconds, 3))
        return True

    async def _write(self, part: Path) -> int:
        head = Head(VERSION, self._seed, int(time.monotonic()), time.time(), self._name, self._directory.index.stats().blocks)
        file = await asyncio.to_thread(_open_private, part)
        total = 0
        try:
            pending = bytearray()
            for piece in frames(self._directory, head):
                pending += piece
                if len(pending) >= _WRITE_BYTES:
                    total += await asyncio.to_thread(file.write, bytes(pending))
                    pending.clear()
                await asyncio.sleep(0)  # events and lookups go first
            total += await asyncio.to_thread(file.write, bytes(pending))
            await asyncio.to_thread(_settle, file)
        finally:
            await asyncio.to_thread(file.close)
        await asyncio.to_thread(_take_place, part, self._path)
        return total


def load(
    path: Path, make: Callable[[int, int], Directory], figures: CheckpointFigures, *, now_s: float
) -> tuple[Directory, int] | None:
    """The directory as the file had it, and the seed of its index; None when there is none, or none that can be used.

    Reads the file twice: nothing is believed before it is known to be whole. make: an empty directory, for a seed and
    so many blocks.
    """
    if not path.exists():
        return None
    try:
        head = _check(path)
        directory = make(head.seed, min(head.blocks, path.stat().st_size // 12))  # a block takes 12 bytes or more
        parsed = parse(_pieces(path))
        next(parsed)
        outcome = restore(directory, head, parsed, now_s=now_s, age_s=max(0.0, time.time() - head.unix_s))
    except (CheckpointRefused, OSError) as error:
        figures.refused = str(error)
        fix = "the coordinator starts empty and is whole again when the nodes have restated what they hold"
        say(log, logging.WARNING, "checkpoint refused", path=str(path), reason=str(error), fix=fix)
        return None
    figures.restored_nodes, figures.restored_blocks = outcome.nodes, outcome.blocks
    say(
        log, logging.INFO, "checkpoint restored", path=str(path), nodes=outcome.nodes, blocks=outcome.blocks,
        left_out=outcome.left_out,
    )  # fmt: skip
    return directory, head.seed


def _check(path: Path) -> Head:
    head: Head | None = None
    for kind, payload in parse(_pieces(path)):
        if kind == b"HEAD":
            head = decode_head(payload)
    if head is None:
        raise CheckpointRefused("it has no head")
    return head


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            yield piece


def _open_private(path: Path) -> IO[bytes]:
    path.unlink(missing_ok=True)  # left by a writer that died; its mode may be anything
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _settle(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _take_place(part: Path, path: Path) -> None:
    os.replace(part, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
