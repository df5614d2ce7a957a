"""NUMA nodes of this machine, from sysfs; no libnuma. Binding an arena's memory to one: csrc/mapping.hpp.

A machine with one node has nothing to bind: asking for that node is right and changes nothing.
"""

from __future__ import annotations

from pathlib import Path

from kvdir.config import show_bytes
from kvdir.errors import ConfigError

SYSFS = Path("/sys/devices/system/node")


def nodes(root: Path = SYSFS) -> tuple[int, ...]:
    """Numbers of the nodes that have memory; (0,) where the kernel knows no NUMA."""
    try:
        return parse_list((root / "has_memory").read_text())
    except OSError:
        return (0,)


def cpus(node: int, root: Path = SYSFS) -> tuple[int, ...]:
    """CPUs of a node; () where it has none, or the kernel knows no NUMA."""
    try:
        return parse_list((root / f"node{node}" / "cpulist").read_text())
    except OSError:
        return ()


def available_bytes(node: int, root: Path = SYSFS) -> int | None:
    """Free memory of a node, what its file cache could give included; None if the kernel does not say.

    Binding to a node that has less ends in the kernel's out-of-memory killer instead of an error.
    """
    try:
        lines = (root / f"node{node}" / "meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = {words[2].rstrip(":"): int(words[3]) for words in (line.split() for line in lines) if len(words) >= 4}
    return (kib.get("MemFree", 0) + max(0, kib.get("FilePages", 0) - kib.get("Shmem", 0))) << 10


def check_node(node: int, arena_bytes: int, root: Path = SYSFS) -> None:
    """Raises ConfigError: no such node (lists those there are), or it has not so much memory."""
    known = nodes(root)
    if node not in known:
        raise ConfigError(
            [f"numa_node: there is no node {node} with memory; this machine has {', '.join(map(str, known))}, or -1 for any"]
        )
    available = available_bytes(node, root)
    if available is not None and available < arena_bytes:
        raise ConfigError(
            [
                f"numa_node: node {node} has {show_bytes(available)} of memory available, and the arena needs "
                f"{show_bytes(arena_bytes)}; choose another node, a smaller arena_bytes, or -1 for any node"
            ]
        )


def parse_list(text: str) -> tuple[int, ...]:
    """(0, 1, 2, 5) from the kernel's "0-2,5"."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return tuple(found)
