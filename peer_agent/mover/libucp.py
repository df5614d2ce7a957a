"""Where libucp is on this machine: named, or the system's, or the one of the libucx-cu12 wheel (which has no RDMA).

Does not: load it (the _ucx extension does), or set it up.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
from pathlib import Path

_CAP_IPC_LOCK = 14

VARIABLE = "KVDIR_UCP_LIBRARY"
SONAME = "libucp.so.0"
INSTALL = (
    "install UCX 1.19 or newer with verbs (the distribution's libucx, NVIDIA's HPC-X, or the engine image's own), "
    f"and name its {SONAME} in {VARIABLE} if it is in no usual place"
)


def find_libucp(named: str = "") -> str:
    """Path or soname for dlopen; "" when there is none. `named` wins, then the environment, the system, the wheel.

    The system's is loaded by this: only one UCX may be in a process, so it is that one or none, whatever its version.
    """
    if chosen := named or os.environ.get(VARIABLE, ""):
        return chosen
    try:
        ctypes.CDLL(SONAME)
    except OSError:
        return wheel_libucp()
    return SONAME


def wheel_libucp() -> str:
    """libucp of an installed libucx wheel; "" without one."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent / "lib" / SONAME
    return str(path) if path.exists() else ""


def rdma_devices() -> list[str]:
    """Names of the RDMA devices that the kernel shows this process."""
    try:
        return sorted(os.listdir("/sys/class/infiniband"))
    except OSError:
        return []


def rdma_faults(library: str, *, pinned_bytes: int) -> list[str]:
    """What this machine lacks to register pinned_bytes with an RDMA device through this library."""
    faults = []
    if not rdma_devices():
        faults.append(
            "ucx: no RDMA device: looked for lanes rc, dc and srd, and /sys/class/infiniband is empty; install the adapter's "
            "driver and rdma-core, give a container /dev/infiniband, or leave 'ucx' out of transports"
        )
    modules = Path(library).resolve().parent / "ucx"
    if modules.is_dir() and not any(modules.glob("libuct_ib*")):
        faults.append(f"ucx: {library} is built without verbs (no libuct_ib in {modules}); {INSTALL}")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY and hard < pinned_bytes and not has_ipc_lock():
        faults.append(
            f"ucx: RDMA pins the whole arena, {pinned_bytes:,} bytes, and at most {hard:,} may be locked; raise it "
            "(ulimit -l unlimited, systemd LimitMEMLOCK=infinity, docker --ulimit memlock=-1), or give "
            "the capability IPC_LOCK (in Kubernetes only a container that runs as root gets it)"
        )
    elif soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return faults


def has_ipc_lock() -> bool:
    """Whether this process may lock any memory (CAP_IPC_LOCK, as in most RDMA containers; the kernel's ib_umem_get)."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return False
    effective = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(effective.split()[1], 16) >> _CAP_IPC_LOCK & 1)
