"""The index in a file passes the suite of the index, and the native reader and its fake that of readers; what is at a path and
cannot be used is refused with what to do.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdir.index import BlockIndex, RegionError, RegionReader, Sketch, create_region
from kvdir.testing import check_index, check_region
from kvdir.testing.check_region import OpenRegion
from kvdir.testing.fake_region import FakeReader, FakeRegion
from kvdir.testing.index_fixture import fingerprints

RETIRED_AT = 12  # RegionHeader::retired
VERSION_AT = 8
RELEASE_AT = 16
BOOT_ID_AT = 80


@pytest.mark.parametrize("check", check_index.CHECKS, ids=lambda check: check.__name__)
def test_region_keeps_the_contract_of_the_index(check: Callable[[check_index.Implementation], None], tmp_path: Path) -> None:
    numbers = itertools.count()

    def open_region(*, expected_blocks: int = 0, seed: int = 0, max_bytes: int = 0) -> BlockIndex:
        path = tmp_path / str(next(numbers))
        return create_region(path, expected_blocks=expected_blocks, seed=seed, max_bytes=max_bytes)

    check(check_index.Implementation(open_region, Sketch))


def native(path: Path) -> OpenRegion:
    region = create_region(path / "region", seed=1)
    return OpenRegion(region, region, RegionReader(path / "region"))


def fake(_: Path) -> OpenRegion:
    region = FakeRegion(seed=1)
    return OpenRegion(region.index, region, FakeReader(region))


@pytest.mark.parametrize("made", [native, fake], ids=lambda made: made.__name__)
@pytest.mark.parametrize("check", check_region.CHECKS, ids=lambda check: check.__name__)
def test_contract_of_readers(check: Callable[[OpenRegion], None], made: Callable[[Path], OpenRegion], tmp_path: Path) -> None:
    check(made(tmp_path))


# --- one path ---------------------------------------------------------------------------------------------------------------


def test_second_writer_is_refused_and_told_who_the_first_is_when_a_path_is_taken(tmp_path: Path) -> None:
    region = create_region(tmp_path / "region")
    with pytest.raises(RegionError, match=rf"has a writer already \(process {os.getpid()}\): stop it, or give"):
        create_region(tmp_path / "region")
    region.close()
    create_region(tmp_path / "region").close()
    assert os.listdir(tmp_path) == []


def test_writer_holds_the_lock_that_has_the_name_when_many_come_and_go(tmp_path: Path) -> None:
    """Whoever ends removes the lock's file, which another one may just have opened: that one would lock nobody out."""
    held: list[bool] = []

    def come_and_go() -> None:
        while len(held) < 80:
            try:
                region = create_region(tmp_path / "region")
            except RegionError:
                continue
            held.append((tmp_path / "region.lock").exists())
            region.close()

    threads = [threading.Thread(target=come_and_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(held) >= 80
    assert all(held)
    assert os.listdir(tmp_path) == []


def test_readers_stay_with_the_old_region_when_a_successor_is_not_published_yet(tmp_path: Path) -> None:
    path = tmp_path / "region"
    region = create_region(path, seed=1)
    reader = RegionReader(path)
    successor = region.successor(seed=2, expected_blocks=1000)
    assert RegionReader(path).generation == reader.generation
    assert not reader.stale
    successor.publish()
    assert reader.stale
    region.close()
    assert RegionReader(path).generation == successor.generation
    with pytest.raises(RegionError, match="has a writer already"):
        create_region(path)
    successor.close()
    assert os.listdir(tmp_path) == []


def test_only_the_newest_successor_is_published_when_there_are_several(tmp_path: Path) -> None:
    region = create_region(tmp_path / "region")
    older, newer = region.successor(), region.successor()
    with pytest.raises(RegionError, match="has a newer successor than this one: publish that"):
        older.publish()
    assert RegionReader(tmp_path / "region").generation == region.generation
    newer.publish()
    newer.publish()
    older.close()
    assert RegionReader(tmp_path / "region").generation == newer.generation


def test_mode_that_readers_would_refuse_is_refused_when_a_region_is_created(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode lets others than the writer write"):
        create_region(tmp_path / "region", mode=0o662)
    region = create_region(tmp_path / "region", mode=0o644)
    assert os.stat(region.path).st_mode & 0o777 == 0o644


def test_region_and_reader_say_so_when_they_are_used_after_close(tmp_path: Path) -> None:
    region = create_region(tmp_path / "region")
    reader = RegionReader(tmp_path / "region")
    region.close()
    region.close()
    assert reader.stale
    for call in (region.stats, region.publish, lambda: region.drop(1), lambda: region.beat(b""), region.successor):
        with pytest.raises(RegionError, match="closed: create a new one"):
            call()
    reader.close()
    reader.close()
    with pytest.raises(RegionError, match="closed: open the region again"):
        reader.lookup(b"", 8, scope=0)
    with pytest.raises(RegionError, match="there is none; does its writer run"):
        RegionReader(tmp_path / "region")


FORK = """
import os, sys
from kvdir.errors import KvdirError
from kvdir.index import RegionReader, create_region
region = create_region(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        region.store(bytes(8), 8, scope=0, holder=1, now_s=1)
    except KvdirError as error:
        del region
        os._exit(0 if "belongs to the process that forked" in str(error) else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
assert not RegionReader(sys.argv[1]).stale
assert region.store(bytes(8), 8, scope=0, holder=1, now_s=1) == 1
"""


def test_fork_of_a_writer_changes_nothing_and_takes_nothing_along_when_it_ends(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORK, tmp_path / "region"], check=True, timeout=50)


FORK_AT_WORK = """
import os, signal, sys, threading
from kvdir.errors import KvdirError
from kvdir.index import RegionReader, create_region
region = create_region(sys.argv[1])
blocks = b"".join(number.to_bytes(8, "little") for number in range(1, 100_001))
region.store(blocks, 8, scope=0, holder=1, now_s=1)
reader = RegionReader(sys.argv[1])
over = threading.Event()

def at_work(call):
    while not over.is_set():
        call()

calls = (lambda: reader.lookup(blocks, 8, scope=0), lambda: region.lookup(blocks, 8, scope=0))
threads = [threading.Thread(target=at_work, args=(call,)) for call in calls]
for thread in threads:
    thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        assert reader.lookup(blocks[:80], 8, scope=0).hits == 0
        reader.close()
        for call in (region.stats, lambda: region.beat(b""), lambda: region.drop(1)):
            try:
                call()
            except KvdirError:
                continue
            os._exit(2)
        region.close()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        break
over.set()
for thread in threads:
    thread.join()
assert status == 0, status
assert not reader.stale
"""


def test_fork_waits_for_nothing_when_threads_of_its_parent_were_at_work(tmp_path: Path) -> None:
    """They hold locks that nobody in the child gives back."""
    subprocess.run([sys.executable, "-c", FORK_AT_WORK, tmp_path / "region"], check=True, timeout=50)


def test_core_dumps_leave_out_regions_when_they_are_mapped(tmp_path: Path) -> None:
    """Address space of many gigabytes, which a dump would fill once the file has no name any more."""
    region = create_region(tmp_path / "region")
    reader = RegionReader(tmp_path / "region")
    smaps = Path("/proc/self/smaps").read_text()
    flags = [part.partition("VmFlags:")[2].partition("\n")[0].split() for part in smaps.split(region.path)[1:]]
    assert len(flags) > 2
    assert all("dd" in each for each in flags)
    reader.close()
    region.close()


def test_nothing_is_left_when_regions_and_readers_come_and_go(tmp_path: Path) -> None:
    blocks = fingerprints(range(100))

    def live() -> None:
        region = create_region(tmp_path / "region")
        region.set_node(0, b"node")
        region.set_holder(1, node=0, tier=2)
        region.store(blocks, 16, scope=0, holder=1, now_s=1)
        reader, forgotten = RegionReader(tmp_path / "region"), RegionReader(tmp_path / "region")
        assert reader.lookup(blocks, 16, scope=0).hits == forgotten.lookup(blocks, 16, scope=0, prefix=True).hits == 100
        reader.node(0), reader.nodes(), reader.namespaces(), reader.beat(), reader.stats()
        region.successor()
        with pytest.raises(RegionError):
            create_region(tmp_path / "region")
        with pytest.raises(RegionError):
            RegionReader(tmp_path)
        reader.close()

    def used() -> tuple[int, int, int]:
        """Of this test alone: threads that other tests left close what is theirs when they will."""
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count(str(tmp_path))
        return sum(map(ours, Path("/proc/self/fd").iterdir())), maps, sys.getrefcount(blocks)

    def ours(descriptor: Path) -> bool:
        try:
            return str(descriptor.readlink()).startswith(str(tmp_path))
        except FileNotFoundError:
            return False

    live()
    before = used()
    for _ in range(30):
        live()
    assert used() == before
    assert os.listdir(tmp_path) == []


def test_lookups_are_answered_or_refused_when_another_thread_closes_the_reader(tmp_path: Path) -> None:
    region = create_region(tmp_path / "region")
    region.store(fingerprints(range(3000)), 16, scope=0, holder=1, now_s=1)
    for count in (10, 3000):  # with and without the GIL
        reader = RegionReader(tmp_path / "region")
        ended: list[str] = []

        def ask(reader: RegionReader = reader, packed: bytes = fingerprints(range(count)), ended: list[str] = ended) -> None:
            try:
                while True:
                    reader.lookup(packed, 16, scope=0)
            except RegionError as error:
                ended.append(str(error))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        reader.close()
        for thread in threads:
            thread.join(timeout=20)
        assert ended == ["this reader is closed: open the region again"] * 3


# --- bad input --------------------------------------------------------------------------------------------------------------


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    """A region with some blocks, as a dead writer leaves it."""
    region = create_region(tmp_path / "live", seed=1)
    region.store(fingerprints(range(100)), 16, scope=0, holder=1, now_s=1)
    os.link(tmp_path / "live", tmp_path / "region")
    region.close()
    patch(tmp_path / "region", RETIRED_AT, bytes(4))
    RegionReader(tmp_path / "region").close()
    return tmp_path / "region"


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def other_version(file: Path) -> None:
    patch(file, VERSION_AT, struct.pack("<I", 99))
    patch(file, RELEASE_AT, b"9.8.7".ljust(32, b"\0"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_version, "written by release 9.8.7, .* restart its writer or this process"),
        (lambda file: patch(file, RETIRED_AT, b"\1"), "closed by its writer; wait"),
        (lambda file: patch(file, BOOT_ID_AT, b"other"), "before this machine was started"),
        (lambda file: patch(file, 0, b"\0"), "is not a region"),
        (lambda file: os.truncate(file, 100), "too short for a region; restart its writer"),
        (lambda file: os.truncate(file, 1 << 20), "cut short; restart its writer"),
        (lambda file: os.truncate(file, 0), "too short"),
        (lambda file: file.write_bytes(b"text" * 5000), "is not a region"),
        (lambda file: file.unlink(), "there is none; does its writer run"),
        (lambda file: (file.unlink(), file.mkdir()), "is not a file"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "is not a file"),
        (lambda file: file.chmod(0o666), "others than its owner may write to it"),
    ],
)
def test_reader_refuses_what_it_cannot_rely_on_when_it_opens(file: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(file)
    with pytest.raises(RegionError, match=message):
        RegionReader(file)


@pytest.mark.parametrize("spoil", [other_version, lambda file: os.truncate(file, 100), lambda file: os.truncate(file, 0)])
def test_writer_replaces_what_another_one_left_when_it_is_old_or_half_written(
    file: Path, spoil: Callable[[Path], object]
) -> None:
    spoil(file)
    region = create_region(file, seed=1)
    assert RegionReader(file).generation == region.generation


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda file: (file.unlink(), file.mkdir()), "remove it, or give another path"),
        (lambda file: file.write_bytes(b"precious"), "exists and is not a region: remove it, or give another path"),
        (lambda file: (file.unlink(), file.symlink_to("elsewhere")), "remove it, or give another path"),
    ],
)
def test_writer_touches_nothing_that_is_not_a_region_when_it_is_in_the_way(
    file: Path, place: Callable[[Path], object], message: str
) -> None:
    place(file)
    before = os.lstat(file)
    with pytest.raises(RegionError, match=message):
        create_region(file)
    assert os.lstat(file) == before
    with pytest.raises(RegionError, match="directory must exist and be writable"):
        create_region(file.parent / "missing" / "region")


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes users and mounts file systems")

UNPRIVILEGED = """
import os, sys
from kvdir.errors import KvdirError
from kvdir.index import RegionReader, create_region
os.setuid(65534)
for call in (RegionReader, create_region):
    try:
        call(sys.argv[1])
    except KvdirError as error:
        print(error)
"""


@as_root
def test_another_user_is_told_what_to_do_when_the_region_is_not_for_him(file: Path) -> None:
    for parent in (file.parent, file.parent.parent, file.parent.parent.parent):
        parent.chmod(0o755)
    said = subprocess.run([sys.executable, "-c", UNPRIVILEGED, file], check=True, timeout=50, capture_output=True, text=True)
    readable, writable = said.stdout.splitlines()
    assert "not readable for this user; run as the user of its writer, or give it another mode" in readable
    assert "the directory must exist and be writable for this user" in writable


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for 2 MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = tmp_path / "small"
    place.mkdir()
    if libc.mount(b"tmpfs", bytes(place), b"tmpfs", 0, b"size=2m") != 0:
        pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    yield place
    libc.umount2(bytes(place), 2)


def fill(region: BlockIndex) -> int:
    """Stores until there is no room; how many blocks that were."""
    stored = 0
    while True:
        try:
            stored += region.store(fingerprints(range(stored, stored + 5000), 8), 8, scope=0, holder=1, now_s=1)
        except MemoryError:
            return stored


@as_root
def test_full_shared_memory_is_an_error_and_never_a_signal_when_a_region_grows(small: Path) -> None:
    region = create_region(small / "region", seed=1)
    region.set_node(0, b"node")
    region.set_holder(1, node=0, tier=2)
    reader = RegionReader(small / "region")
    stored = fill(region)
    with pytest.raises(MemoryError, match="shared memory"):
        region.store(fingerprints(range(10**6, 10**6 + 100_000), 8), 8, scope=0, holder=1, now_s=1)
    assert stored >= 50_000
    assert reader.lookup(fingerprints(range(stored), 8), 8, scope=0).hits == stored
    assert region.remove(fingerprints(range(1000), 8), 8, scope=0, holder=1) == 1000
    for pages in (3, 0):  # a header would fit, or not even that
        (small / f"filler-{pages}").write_bytes(bytes((os.statvfs(small).f_bavail - pages) * 4096))
        with pytest.raises(RegionError, match=r"no room for region .* enlarge the shared memory"):
            region.successor()
    assert not reader.stale
    region.close()
    assert not list(small.glob("region*[!k]"))
    for filler in small.glob("filler-*"):
        filler.unlink()
    create_region(small / "region", seed=1).close()
