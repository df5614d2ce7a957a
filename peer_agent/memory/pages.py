"""Huge pages of an arena: what was asked for, what the kernel really gave, and what to change on the machine.

Where they come from: tmpfs (/dev/shm) gives them transparently, by its own setting or, since Linux 6.1, because we ask for
each 2 MiB (csrc/mapping.hpp); hugetlbfs gives nothing else, out of a pool that somebody has to reserve. The kernel's word
counts, not what madvise returned: /proc/self/smaps. Reading that walks the page tables, so it is done once, at start.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from kvdir.config import show_bytes

HUGE_BYTES = 2 << 20
SMAPS = "/proc/self/smaps"
POOLS = Path("/sys/kernel/mm/hugepages")

_HUGE_FIELDS = frozenset({"ShmemPmdMapped", "FilePmdMapped", "AnonHugePages", "Shared_Hugetlb", "Private_Hugetlb"})


class HugePages(enum.StrEnum):
    """auto: where they can be had. off: never. require: or no arena."""

    AUTO = "auto"
    OFF = "off"
    REQUIRE = "require"


@dataclass(frozen=True, slots=True)
class Pages:
    """How `mapped_bytes` of an arena are mapped. huge_bytes: of them, by huge pages."""

    mapped_bytes: int
    huge_bytes: int

    @property
    def complete(self) -> bool:
        """Everything but a tail that is shorter than a huge page."""
        return self.huge_bytes >= self.mapped_bytes // HUGE_BYTES * HUGE_BYTES

    def in_words(self) -> str:
        if self.huge_bytes == 0:
            return "small pages"
        return f"{show_bytes(self.huge_bytes)} of {show_bytes(self.mapped_bytes)} in huge pages"

    def advice(self) -> str:
        """What to do on the machine to get more."""
        pool = -(-self.mapped_bytes // HUGE_BYTES)
        return (
            "before Linux 6.1 say echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled; "
            "when memory is fragmented, echo 1 > /proc/sys/vm/compact_memory; "
            f"or sysctl vm.nr_hugepages={pool} and an arena_path on a hugetlbfs"
        )


def pages_at(address: int, mapped_bytes: int, *, smaps: str = SMAPS) -> Pages:
    """What the mapping that begins at `address` consists of now. The kernel may have split it into several."""
    huge_kib = 0
    inside = False  # of the lines of one of its parts
    with open(smaps) as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                inside = address <= int(name.partition("-")[0], 16) < address + mapped_bytes
            elif inside and name[:-1] in _HUGE_FIELDS:
                huge_kib += int(rest.split()[0])
    return Pages(mapped_bytes, min(huge_kib << 10, mapped_bytes))


def free_pool_bytes(page_bytes: int, *, pools: Path = POOLS) -> int:
    """What hugetlbfs with pages of this size can still give."""
    pool = pools / f"hugepages-{page_bytes >> 10}kB"
    try:
        free, reserved = (int((pool / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
    except OSError:
        return 0
    return (free - reserved) * page_bytes
