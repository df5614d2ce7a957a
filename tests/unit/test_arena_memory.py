"""Huge pages and NUMA nodes of an arena: what is asked for, what the kernel gave, and what the words say."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvdir.errors import ConfigError
from peer_agent.memory import numa
from peer_agent.memory.arena import Arena, ArenaError
from peer_agent.memory.layout import SizeClass
from peer_agent.memory.pages import HUGE_BYTES, HugePages, Pages, free_pool_bytes, pages_at
from peer_agent.server.config import AgentConfig
from peer_agent.server.own_arena import create_arena, in_words, run_on_node

CLASSES = [SizeClass(b"a" * 32, 1 << 20, 8)]
KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
GIVES_HUGE_PAGES = pytest.mark.skipif(
    KERNEL < (6, 1) or "[deny]" in Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text(),
    reason="the kernel makes no huge pages of shared memory",
)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory of memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvdir-test-") as path:
        yield Path(path)


def address_of(arena: Arena) -> int:
    return int(np.frombuffer(arena.region, np.uint8).ctypes.data)


@GIVES_HUGE_PAGES
def test_arena_is_in_huge_pages_when_prefaulted(shared: Path) -> None:
    with Arena.create(shared / "arena", CLASSES, epoch=5, prefault=True) as arena:
        assert address_of(arena) % HUGE_BYTES == 0
        assert arena.pages.complete, arena.pages.advice()
        assert arena.pages.mapped_bytes == arena.arena_bytes
        assert "in huge pages" in arena.pages.in_words()
        with Arena.open(arena.path, writable=False) as reader:
            assert sum(reader.region[::4096]) >= 0  # touched
            assert pages_at(address_of(reader), reader.arena_bytes).complete, "readers map them as such, too"
            with pytest.raises(ValueError, match="only the owner"):
                _ = reader.pages


@GIVES_HUGE_PAGES
def test_arena_may_require_huge_pages_when_there_are_some(shared: Path) -> None:
    with Arena.create(shared / "arena", CLASSES, epoch=5, prefault=True, huge_pages=HugePages.REQUIRE) as arena:
        assert arena.pages.complete


def test_arena_is_in_small_pages_when_huge_ones_are_off(shared: Path) -> None:
    with Arena.create(shared / "arena", CLASSES, epoch=5, prefault=True, huge_pages=HugePages.OFF) as arena:
        assert arena.pages == Pages(arena.arena_bytes, 0)
        assert arena.pages.in_words() == "small pages"


def test_arena_is_refused_with_what_to_do_when_required_huge_pages_are_not_there(tmp_path: Path) -> None:
    """A file system on a disk has none; nor would memory have that was not prefaulted."""
    with pytest.raises(ArenaError, match=r"huge_pages is require.* small pages: .*shmem_enabled.*vm.nr_hugepages=5 "):
        Arena.create(tmp_path / "arena", CLASSES, epoch=5, huge_pages=HugePages.REQUIRE)
    assert list(tmp_path.iterdir()) == []


HUGETLBFS = """
import os, subprocess, sys
from peer_agent.memory.arena import Arena, ArenaTooLarge
from peer_agent.memory.layout import SizeClass
from peer_agent.memory.pages import HugePages
directory = sys.argv[1]
subprocess.run(["mount", "-t", "hugetlbfs", "none", directory], check=True)
path, classes = directory + "/arena", [SizeClass(b"a" * 32, 1 << 20, 5)]
if os.fork() == 0:
    Arena.create(path, classes, epoch=4)
    os._exit(0)
os.wait()
try:
    Arena.create(directory + "/more", [SizeClass(b"a" * 32, 1 << 20, 1 << 20)], epoch=5)
except ArenaTooLarge as error:
    assert "vm.nr_hugepages" in str(error), error
with Arena.create(path, classes, epoch=5, prefault=True, huge_pages=HugePages.REQUIRE) as arena:
    assert arena.pages.complete and arena.pages.huge_bytes == arena.arena_bytes
    with Arena.open(path, writable=True) as engine:
        engine.region[-1] = 9
        assert arena.region[-1] == 9
assert not os.listdir(directory)
print("fine")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system and reserves pages")
def test_arena_on_hugetlbfs_replaces_that_of_a_dead_owner(tmp_path: Path) -> None:
    reserved = Path("/proc/sys/vm/nr_hugepages")
    before = reserved.read_text()
    try:
        reserved.write_text(str(int(before) + 6))
        if int(reserved.read_text()) < int(before) + 6:
            pytest.skip("memory is too fragmented for six huge pages")
        command = ["unshare", "--mount", sys.executable, "-c", HUGETLBFS, str(tmp_path)]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=50)
    finally:
        reserved.write_text(before)
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "fine\n", done.stderr


def test_free_pool_is_what_is_not_reserved(tmp_path: Path) -> None:
    pool = tmp_path / "hugepages-2048kB"
    pool.mkdir()
    (pool / "free_hugepages").write_text("7\n")
    (pool / "resv_hugepages").write_text("3\n")
    assert free_pool_bytes(HUGE_BYTES, pools=tmp_path) == 4 * HUGE_BYTES
    assert free_pool_bytes(1 << 30, pools=tmp_path) == 0


SMAPS = """\
7f0000000000-7f0000600000 rw-s 00000000 00:1b 10                         /dev/shm/arena
Size:               6144 kB
ShmemPmdMapped:     4096 kB
VmFlags: rd wr sh
7f0000600000-7f0000800000 rw-s 00600000 00:1b 10                         /dev/shm/arena
Shared_Hugetlb:     2048 kB
7f0000800000-7f0000a00000 rw-s 00000000 00:1b 11                         /dev/shm/other
ShmemPmdMapped:     2048 kB
"""


def test_pages_are_counted_when_the_kernel_has_split_the_mapping(tmp_path: Path) -> None:
    (tmp_path / "smaps").write_text(SMAPS)
    found = pages_at(0x7F0000000000, 8 << 20, smaps=str(tmp_path / "smaps"))
    assert found == Pages(8 << 20, 6 << 20)
    assert not found.complete
    assert found.in_words() == "6.0 MiB of 8.0 MiB in huge pages"
    assert Pages((4 << 20) + 4096, 4 << 20).complete, "a tail shorter than a huge page does not count"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Three nodes, of which one has no memory and one is full."""
    (tmp_path / "has_memory").write_text("0,2\n")
    for node, cpus, free_kib in ((0, "0-1,4", 1 << 20), (1, "2-3", 0), (2, "", 1024)):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
        lines = (("MemTotal", 1 << 22), ("MemFree", free_kib), ("FilePages", 4096), ("Shmem", 1024))
        (tmp_path / f"node{node}" / "meminfo").write_text("".join(f"Node {node} {name}: {kib} kB\n" for name, kib in lines))
    return tmp_path


def test_nodes_and_their_cpus_are_read_from_sysfs(sysfs: Path) -> None:
    assert numa.nodes(sysfs) == (0, 2)
    assert [numa.cpus(node, sysfs) for node in (0, 1, 2)] == [(0, 1, 4), (2, 3), ()]
    assert numa.available_bytes(0, sysfs) == (1 << 30) + (3 << 20)
    assert numa.nodes(sysfs / "nowhere") == (0,)
    assert numa.available_bytes(0, sysfs / "nowhere") is None


def test_node_is_refused_with_those_there_are_when_it_has_no_memory(sysfs: Path) -> None:
    with pytest.raises(ConfigError, match="no node 1 with memory; this machine has 0, 2, or -1 for any"):
        numa.check_node(1, 1 << 20, sysfs)
    with pytest.raises(ConfigError, match=r"node 2 has 4.0 MiB of memory available, and the arena needs 8.0 MiB"):
        numa.check_node(2, 8 << 20, sysfs)
    numa.check_node(0, 1 << 30, sysfs)


def test_memory_is_bound_when_a_node_is_configured(shared: Path) -> None:
    node = numa.nodes()[0]
    with Arena.create(shared / "arena", CLASSES, epoch=5, prefault=True, numa_node=node) as arena:
        policies = [line.split()[1] for line in Path("/proc/self/numa_maps").read_text().splitlines() if arena.path in line]
        assert policies == [f"bind:{node}"] or not policies, "(no numa_maps without CONFIG_NUMA)"
        assert f"NUMA node {node}" in in_words(arena, node)


def test_unknown_node_is_refused_when_the_arena_is_created(shared: Path) -> None:
    with pytest.raises(ConfigError, match="numa_node: there is no node 777"):
        Arena.create(shared / "arena", CLASSES, epoch=5, numa_node=777)
    assert list(shared.iterdir()) == []


def test_process_stays_where_it_is_when_the_node_has_no_cpus() -> None:
    before = os.sched_getaffinity(0)
    try:
        run_on_node(-1)
        run_on_node(777)
        assert os.sched_getaffinity(0) == before
        run_on_node(numa.nodes()[0])
        assert os.sched_getaffinity(0) <= before
    finally:
        os.sched_setaffinity(0, before)


def test_start_says_what_memory_it_got(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = AgentConfig(node="n", arena_path=str(shared / "arena"), huge_pages="off", numa_node=numa.nodes()[0])
    with caplog.at_level("INFO"), create_arena(config, CLASSES, epoch=5):
        (record,) = [record for record in caplog.records if record.message == "arena"]
    assert record.fields["memory"].startswith(f"small pages, NUMA node {numa.nodes()[0]}")  # type: ignore[attr-defined]
