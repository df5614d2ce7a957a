"""One side of a library that the bench compares with: `peer_program.py nixl|nixl-threads|mooncake owner|reader`.

A program of its own, run by a Python that need not have kvdir, so it imports nothing of ours. It answers each JSON line on
stdin with one on the stdout it was started with; whatever a library prints goes to stderr. It ends when stdin does, with
os._exit: NIXL crashes in a destructor at exit beside a system libibverbs.

    {"do": "serve", "path": ...}                     owner: registers this file's pages      -> what a reader needs
    {"do": "connect", "path": ..., "offer": ...}     reader: registers its file and connects -> null
    {"do": "prepare", "first": ..., "stride": ..., "slots": ..., "length": ..., "blocks": ..., "into": ...}     -> null
    {"do": "read", "slots": [...]}                   reads blocks to `into`, block after block -> seconds

What is timed is what an application would do for a new sparse read: build the transfer from prepared descriptors, post it, wait
for its end by polling without a pause. Releasing the handle is not in it. `nixl-threads` is NIXL as installed; `nixl` has its
progress threads off, and its owner polls.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

Json = dict[str, Any]


class Mapped:
    """A file's pages, shared and present. `address` is where they are."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        view = np.frombuffer(self._mapping, np.uint8)
        self.address, self.size = view.ctypes.data, view.nbytes


class Nixl:
    def __init__(self, side: str, *, threads: bool) -> None:
        api = importlib.import_module("nixl_cu12._api")
        self._agent = api.nixl_agent(side, api.nixl_agent_config(enable_prog_thread=threads))
        self.polls = side == "owner" and not threads

    def poll(self) -> None:
        self._agent.get_new_notifs()

    def serve(self, path: str) -> Json:
        self._mapped = self._register(path)
        return {"metadata": self._agent.get_agent_metadata().hex(), "address": self._mapped.address}

    def connect(self, path: str, offer: Json) -> None:
        self._mapped = self._register(path)
        self._remote = self._agent.add_remote_agent(bytes.fromhex(offer["metadata"]))
        self._remote_address = offer["address"]
        self._agent.make_connection(self._remote)

    def prepare(self, first: int, stride: int, slots: int, length: int, blocks: int, into: int) -> None:
        theirs = self._descriptors(self._remote_address + first, stride, slots, length)
        ours = self._descriptors(self._mapped.address + into, length, blocks, length)
        self._theirs = self._agent.prep_xfer_dlist(self._remote, theirs, "DRAM")
        self._ours = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM")

    def read(self, slots: list[int]) -> float:
        remote, local = np.array(slots, np.int32), np.arange(len(slots), dtype=np.int32)
        start = time.perf_counter()
        handle = self._agent.make_prepped_xfer("READ", self._ours, local, self._theirs, remote)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        elapsed = time.perf_counter() - start
        if state != "DONE":
            raise RuntimeError(f"NIXL's transfer ended in state {state}")
        self._agent.release_xfer_handle(handle)
        return elapsed

    def _register(self, path: str) -> Mapped:
        mapped = Mapped(path)
        self._agent.register_memory([(mapped.address, mapped.size, 0, "")], "DRAM")
        return mapped

    @staticmethod
    def _descriptors(first: int, stride: int, count: int, length: int) -> Any:
        rows = np.zeros((count, 3), np.uint64)
        rows[:, 0] = first + np.arange(count, dtype=np.uint64) * stride
        rows[:, 1] = length
        return rows


class Mooncake:
    polls = False

    def __init__(self, side: str) -> None:
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake's engine did not initialize")

    def poll(self) -> None: ...

    def serve(self, path: str) -> Json:
        self._mapped = self._register(path)
        return {"target": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": self._mapped.address}

    def connect(self, path: str, offer: Json) -> None:
        self._mapped, self._offer = self._register(path), offer

    def prepare(self, first: int, stride: int, slots: int, length: int, blocks: int, into: int) -> None:
        self._theirs = [self._offer["address"] + first + i * stride for i in range(slots)]
        self._ours = [self._mapped.address + into + i * length for i in range(blocks)]
        self._length = length

    def read(self, slots: list[int]) -> float:
        remote, local = [self._theirs[slot] for slot in slots], self._ours[: len(slots)]
        lengths = [self._length] * len(slots)
        start = time.perf_counter()
        code = self._engine.batch_transfer_sync_read(self._offer["target"], local, remote, lengths)
        elapsed = time.perf_counter() - start
        if code:
            raise RuntimeError(f"Mooncake's read ended with {code}")
        return elapsed

    def _register(self, path: str) -> Mapped:
        mapped = Mapped(path)
        if self._engine.register_memory(mapped.address, mapped.size):
            raise RuntimeError(f"Mooncake did not register {mapped.size} bytes")
        return mapped


def main() -> None:
    _die_with_the_bench()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    library, side = sys.argv[1:]
    make: Callable[[str], Nixl | Mooncake] = (
        Mooncake if library == "mooncake" else partial(Nixl, threads=library == "nixl-threads")
    )
    peer: Nixl | Mooncake | None = None
    try:
        while line := _next_line(peer):
            message = json.loads(line)
            try:
                if peer is None:
                    peer = make(side)
                answer = {"ok": getattr(peer, message.pop("do"))(**message)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        os._exit(0)


def _next_line(peer: Nixl | Mooncake | None) -> bytes:
    while peer is not None and peer.polls and not select.select([0], [], [], 0)[0]:
        peer.poll()
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1 << 16)):
            return b""
        line += byte
    return bytes(line)


def _die_with_the_bench() -> None:
    """A stopped process would not notice that stdin has ended."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
