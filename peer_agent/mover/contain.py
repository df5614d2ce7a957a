"""What a mover is denied, so that a library's accident inside it stays inside it.

- Environment: only what the libraries need; no tokens, addresses or secrets of the agent.
- Descriptors: its control socket and the arena; everything else closes at exec.
- Lifetime: the kernel kills it when its agent dies; it never outlives the memory's owner.
- Memory shortage: it is chosen before the agent is. The agent restarts it and loses no block.
- Privileges: it can gain none (no_new_privs).

It is not a sandbox against hostile code: it runs as the same user, and writes the arena, being there to do so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

PASSED_NAMES = frozenset({"LD_LIBRARY_PATH", "LD_PRELOAD", "ASAN_OPTIONS", "TZ", "KVDIR_UCP_LIBRARY", "KVDIR_CUDA_LIBRARY"})
PASSED_PREFIXES = ("UCX_", "CUDA_", "NVIDIA_", "NIXL_", "NCCL_IB_", "MLX5_", "IBV_", "RDMAV_", "FI_")

OOM_SCORE_ADJ = 1000
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """What of our environment a mover gets, and where it finds this very package."""
    passed = {name: value for name, value in ours.items() if name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)}
    return passed | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}


def command(control_fd: int) -> list[str]:
    """How a mover is started; control_fd is inherited under its number."""
    return [sys.executable, "-m", "peer_agent.mover", str(control_fd), str(os.getpid())]


def enter(*, parent: int) -> None:
    """Inside, first of all. parent: pid of the agent; if it is gone already, this process ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # died before the line above
        os._exit(1)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    with contextlib.suppress(OSError):  # no /proc, or forbidden: the kernel then chooses as always
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ), encoding="ascii")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to whole groups; the agent ends us once it has drained
