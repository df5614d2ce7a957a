"""`peer-agent bench read`: verified reads of our planes beside memcpy, a raw TCP stream, NIXL and Mooncake, all in one run.

Owner and reader are processes of their own, as agents are. Every figure comes from rounds in which all subjects take turns with
the same request (rounds.py), so a ratio is of one moment of one machine; the order turns, and each read takes other slots.
Verification is on for our planes, as in production. CPU seconds are of the processes on each side of a read, while it runs.

Does not: judge a figure (bench/read.py has the bars), install anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from typing import Any

import uvloop

from peer_agent import _native
from peer_agent.cli.bench_read.cells import Cell, Grid, offsets, size_class
from peer_agent.cli.bench_read.owner import DEADLINE_S, Offer, owner_process
from peer_agent.cli.bench_read.peers import SETUPS, Peer, PeerSetup
from peer_agent.cli.bench_read.planes import NATIVE, PLANES, PlaneSetup, mover_pids, open_planes
from peer_agent.cli.bench_read.rounds import Requests, Row, merge, rows, time_cell
from peer_agent.cli.bench_read.subjects import Memcpy, Plane, RawTcp, Subject, SubjectFailed
from peer_agent.memory.arena import Arena, ArenaTooLarge

BLOCK_BYTES = (4 << 10, 64 << 10, 512 << 10, 2 << 20)
BLOCKS = (32, 256)

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """seconds_per_cell: of one run of a cell, shared by all subjects. peers_python: a Python that has NIXL or Mooncake; "" for
    none of them. allow_emulated_rma: see PlaneSetup."""

    planes: tuple[str, ...] = PLANES
    allow_emulated_rma: bool = False
    block_bytes: tuple[int, ...] = BLOCK_BYTES
    blocks: tuple[int, ...] = BLOCKS
    seconds_per_cell: float = 3.0
    min_rounds: int = 7
    runs: int = 3
    directory: str = "/dev/shm"
    peers_python: str = ""
    peer_setups: tuple[PeerSetup, ...] = SETUPS


def run_read_bench(options: BenchOptions, *, progress: Progress = lambda share, text: None) -> dict[str, Any]:
    """{"subjects": {library: what it is}, "left_out": {name: reason}, "rows": [...]}; a row is a subject in a cell (rounds.py).

    progress(share, text): shares sum to 1. Raises ArenaTooLarge when the shared memory is not free.
    """
    grid = Grid(tuple(Cell(size, count) for size in options.block_bytes for count in options.blocks))
    _require_room(options.directory, grid.needed_bytes)
    run = _Bench(grid, options, progress, PlaneSetup.create(options.planes, allow_emulated_rma=options.allow_emulated_rma))
    measured = [run.once(number) for number in range(1, options.runs + 1)]
    setups = options.peer_setups if options.peers_python else ()
    return {
        "subjects": {setup.name: setup.says for setup in setups if setup.name not in run.left_out},
        "left_out": run.left_out,
        "rows": merge(measured),
    }


def _require_room(directory: str, needed: int) -> None:
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if needed > free:
        raise ArenaTooLarge(f"the bench needs {needed:,} bytes in {directory}, {free:,} are free; use smaller or fewer blocks")


@dataclass(slots=True)
class _Bench:
    """One run after the other, each with fresh processes, memory and connections."""

    grid: Grid
    options: BenchOptions
    progress: Progress
    setup: PlaneSetup
    left_out: dict[str, str] = field(default_factory=dict)

    def once(self, number: int) -> list[Row]:
        base = os.path.join(self.options.directory, f"kvdir-bench-{os.getpid()}")
        self.progress(0.0, f"run {number} of {self.options.runs}: filling memory")
        with ExitStack() as stack:
            reader = stack.enter_context(Arena.create(f"{base}-reader", self.grid.reader_classes(), epoch=2, prefault=True))
            offer = stack.enter_context(owner_process(self.grid, f"{base}-owner", self.options.planes, self.setup))
            self.left_out |= offer.left_out
            owner = Arena.open(offer.arena_path, writable=False)
            stack.callback(owner.close)
            return uvloop.run(self._measure(number, reader, owner, offer))

    async def _measure(self, number: int, reader: Arena, owner: Arena, offer: Offer) -> list[Row]:
        measured: list[Row] = []
        share = 1 / (len(self.grid.cells) * self.options.runs)
        async with AsyncExitStack() as stack:
            subjects = await self._open(stack, reader, owner, offer)
            for cell in self.grid.cells:
                self.progress(0.0, f"run {number} of {self.options.runs}: {cell.label}")
                _native.begin_write(reader.region, offsets(size_class(reader, cell.block_bytes), range(cell.blocks)))
                present = [subject for subject in subjects if subject.name not in self.left_out]
                await self._prepare(present, cell, owner)
                samples = await time_cell(
                    Requests(cell, offer.content[cell.block_bytes], reader, capability=offer.capability),
                    [subject for subject in present if subject.name not in self.left_out],
                    owner,
                    seconds=self.options.seconds_per_cell,
                    min_rounds=self.options.min_rounds,
                    failed=self._leave_out,
                )
                measured += rows(cell, present, samples)
                self.progress(share, f"run {number} of {self.options.runs}: {cell.label}")
        return measured

    async def _open(self, stack: AsyncExitStack, reader: Arena, owner: Arena, offer: Offer) -> list[Subject]:
        pid = os.getpid()
        subjects: list[Subject] = []
        transports, _ = open_planes(tuple(offer.planes), reader, self.setup)
        for name, transport in transports.items():
            stack.push_async_callback(transport.close)
            connection = await transport.connect(offer.planes[name].descriptor, deadline_s=DEADLINE_S)
            pids = (pid, *mover_pids(transport))
            subjects.append(Plane(name, connection, reader, reader_pids=pids, owner_pids=offer.planes[name].pids))
        subjects += [Memcpy(reader, owner, pid), stack.enter_context(RawTcp(reader, owner, offer, pid))]
        for setup in self.options.peer_setups if self.options.peers_python else ():
            if setup.name in self.left_out:
                continue
            try:
                peer = await Peer.open(setup, self.options.peers_python, owner=owner, reader=reader)
            except (SubjectFailed, OSError) as error:
                self.left_out[setup.name] = f"{error} (`make bench-read` installs what the bench compares with)"
                continue
            stack.push_async_callback(peer.close)
            subjects.append(peer)
        return subjects

    async def _prepare(self, subjects: Sequence[Subject], cell: Cell, owner: Arena) -> None:
        for peer in [subject for subject in subjects if isinstance(subject, Peer)]:
            peer.resume()
            try:
                await peer.prepare(cell.block_bytes, cell.blocks, owner)
            except SubjectFailed as error:
                self._leave_out(peer, error)
            finally:
                peer.pause()

    def _leave_out(self, subject: Subject, error: SubjectFailed) -> None:
        """A peer, or a plane that stands on a foreign library, is left out from here on; what is all our own must work."""
        if subject.kind == "yardstick" or subject.name in NATIVE:
            raise RuntimeError(f"{subject.name}: {error}") from error
        self.left_out[subject.name] = str(error)
