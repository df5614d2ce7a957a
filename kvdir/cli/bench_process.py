"""A real coordinator process for benches: started on free ports, its CPU time read from /proc, ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvdir.cli.output import CommandFailed, Exit
from kvdir.namespace import Namespace, StateGroup

_READY_S = 20.0
_END_S = 10.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

BENCH_NAMESPACE = Namespace(
    model="bench",
    weights="none",
    kv_dtype="bfloat16",
    layout="NHD",
    block_tokens=16,
    groups=(StateGroup(kind="full", layers=1, kv_heads=1, head_dim=8),),
    position="none",
    parallel="replicated",
    adapter="none",
    tenant="none",
    hash_scheme="random",
    hash_seed="0",
    cache_policy="exact",
)


@dataclass(frozen=True, slots=True)
class CoordinatorProcess:
    """pid and gRPC address of a coordinator that is ready. Figures include its lookup workers."""

    pid: int
    address: str

    def cpu_s(self) -> float:
        """CPU time so far, user and system, all threads."""
        return sum(cpu_s(pid) for pid in (self.pid, *self.children()))

    def children(self) -> list[int]:
        """Process ids of the lookup workers."""
        with open(f"/proc/{self.pid}/task/{self.pid}/children") as children:
            return [int(pid) for pid in children.read().split()]

    def rss_bytes(self) -> int:
        """Resident memory now."""
        with open(f"/proc/{self.pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """CPU time of one process so far, user and system, all its threads."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@contextlib.contextmanager
def coordinator_process(*flags: str) -> Iterator[CoordinatorProcess]:
    """`kvdir serve` in a process of its own, on free ports. CommandFailed if it does not get ready."""
    command = [sys.executable, "-m", "kvdir", "serve", "--listen", "127.0.0.1:0", "--http-listen", "", "--output", "json"]
    # The child must find the same kvdir as we did, installed or not; variables of ours would change what is measured.
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVDIR_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (entry or os.getcwd() for entry in sys.path)))
    process = subprocess.Popen([*command, "--log-level", "error", *flags], stdout=subprocess.PIPE, env=env)
    try:
        ready = _hear_ready(process, command)
        yield CoordinatorProcess(process.pid, ready["grpc"])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _hear_ready(process: subprocess.Popen[bytes], command: Sequence[str]) -> dict[str, Any]:
    assert process.stdout is not None
    end_s = time.monotonic() + _READY_S
    readable, _, _ = select.select([process.stdout], [], [], _READY_S)
    line = process.stdout.readline() if readable and time.monotonic() < end_s else b""
    try:
        said: dict[str, Any] = msgspec.json.decode(line)
    except msgspec.DecodeError:
        said = {}
    if said.get("event") != "ready":
        raise CommandFailed(f"`{' '.join(command)}` did not get ready within {_READY_S:g} s", exit=Exit.START)
    return said
