"""The mapped memory file that a node's blocks live in: create, open, verify, close. Byte layout: layout.py.

Rules and invariants:
- One owner. It holds an exclusive flock on the file for as long as it lives, so a second owner gets an error that names the
  first, and the file of a dead one (the kernel dropped its lock) is told apart and replaced, never reused: a slot that an
  engine was writing when the owner died must not come back. The old file's superblock gets epoch 0 first, so that whoever
  still maps it stops believing it.
- The path always names a complete, locked arena: it is written under another name and renamed or linked into place.
- All memory is there before `create` returns (posix_fallocate; with `prefault` also zeroed and mapped), so a full
  /dev/shm is an error at start and never a SIGBUS in the middle of a write.
- Huge pages and the NUMA node are decided before the first page is there. `pages` says what the kernel really gave.
- Nobody ever changes the size of an arena file; readers depend on it. Classes are added to its spare part (`add_class`), and
  never removed.

The path lies on tmpfs or hugetlbfs (pages.py).

Does not: hand out slots (peer_agent/core), write headers (csrc/copy.cpp), plan capacities (slots.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from array import array
from collections.abc import Sequence
from typing import Self

from kvdir.config import show_bytes
from kvdir.errors import KvdirError, NoSpace
from peer_agent import _native
from peer_agent.memory import numa
from peer_agent.memory.layout import (
    SIZE_CLASSES_AT,
    SUPERBLOCK_BYTES,
    SizeClass,
    Superblock,
    lay_out,
    pack_class,
    pack_superblock,
    place,
    unpack_superblock,
)
from peer_agent.memory.pages import HUGE_BYTES, HugePages, Pages, free_pool_bytes, pages_at

_EPOCH_AT = 32
_PREFAULT_THREADS = 8  # beyond that the memory is the limit
_RETRIES = 8  # each one means that another process replaced the file in between


class ArenaError(KvdirError):
    """The arena cannot be had; the message says why and what to do."""

    code = "arena"


class ArenaTooLarge(ArenaError, NoSpace):
    """Shared memory does not suffice; the message says how much is needed and free."""

    code = "no-space"


class Arena:
    """One mapped arena. Made by `create` (owner) or `open` (engine or peer)."""

    def __init__(
        self, path: str, fd: int, mapping: _native.Mapping, superblock: Superblock, *, owner: bool, writable: bool
    ) -> None:
        self.path = path
        self.arena_id = superblock.arena_id
        self.epoch = superblock.epoch
        self.classes = superblock.classes
        self.arena_bytes = superblock.arena_bytes
        self.owner = owner
        self.writable = writable
        self._fd = fd
        self._mapping: _native.Mapping | None = mapping
        self._region: memoryview | None = memoryview(mapping)[: superblock.arena_bytes]
        self._epoch_now = self._region[_EPOCH_AT : _EPOCH_AT + 8].cast("Q")  # little endian, as all machines that we run on
        self._pages = pages_at(mapping.address, len(self._region)) if owner else None

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        classes: Sequence[SizeClass],
        *,
        epoch: int,
        prefault: bool = False,
        huge_pages: HugePages = HugePages.AUTO,
        numa_node: int = -1,
        spare_bytes: int = 0,
    ) -> Self:
        """Owner: a new arena at `path` (mode 0600). `first` of the classes is ignored and set. spare_bytes: for `add_class`.

        prefault: zero and map every page now, seconds per 10 GiB, instead of a page fault at each first touch; what makes
        huge pages of memory that the system would give as small ones. numa_node: where all memory comes from; -1: anywhere.
        Raises ArenaError (in use, no huge pages), ArenaTooLarge (no room), ConfigError (no such node, or it is too full) and
        ValueError (impossible classes).
        """
        if epoch == 0:
            raise ValueError("epoch 0 marks an arena whose owner is gone; use a random non-zero one")
        placed, arena_bytes = lay_out(classes, spare_bytes=spare_bytes)
        if numa_node >= 0:
            numa.check_node(numa_node, arena_bytes)
        path = os.path.abspath(path)
        superblock = Superblock(secrets.token_bytes(16), epoch, arena_bytes, os.getpid(), placed)
        stale_fd = _take_over(path)
        try:
            temporary = f"{path}.{secrets.token_hex(4)}.new"
            try:
                fd, mapping = _new_file(temporary, arena_bytes, prefault=prefault, huge_pages=huge_pages, numa_node=numa_node)
                with memoryview(mapping) as region:
                    region[:SUPERBLOCK_BYTES] = pack_superblock(superblock)
                _put_in_place(temporary, path, replace=stale_fd is not None)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
        finally:
            if stale_fd is not None:
                os.close(stale_fd)
        return cls(path, fd, mapping, superblock, owner=True, writable=True)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writable: bool) -> Self:
        """Maps somebody else's arena after verifying its superblock. Raises ArenaError."""
        path = os.path.abspath(path)
        flags = os.O_NONBLOCK | (os.O_RDWR if writable else os.O_RDONLY)  # a FIFO that a peer named must not hold us
        try:
            fd = os.open(path, flags | os.O_CLOEXEC)
        except OSError as error:
            hint = "does its agent run, and as the same user?"
            raise ArenaError(f"cannot open arena {path}: {error.strerror}; {hint}") from error
        try:
            head = os.pread(fd, SIZE_CLASSES_AT, 0)  # the number of classes before the classes, see layout.py
            rest = os.pread(fd, SUPERBLOCK_BYTES - SIZE_CLASSES_AT, SIZE_CLASSES_AT)
            superblock = unpack_superblock(head + rest)
            if os.fstat(fd).st_size < superblock.arena_bytes:
                raise ValueError("the file is shorter than its superblock says")
            if superblock.epoch == 0:
                raise ValueError("its owner closed it")
            mapping = _native.Mapping(fd, superblock.arena_bytes, writable=writable)
        except (ValueError, OSError) as error:
            os.close(fd)
            raise ArenaError(f"cannot use arena {path}: {error}") from error
        mapping.advise_huge(True)
        return cls(path, fd, mapping, superblock, owner=False, writable=writable)

    @property
    def region(self) -> memoryview:
        """The whole mapping. ValueError after close."""
        if self._region is None:
            raise ValueError(f"arena {self.path} is closed")
        return self._region

    @property
    def pages(self) -> Pages:
        """Of the owner: what the kernel gave when it was created."""
        if self._pages is None:
            raise ValueError(f"only the owner of {self.path} knows how it got its memory")
        return self._pages

    @property
    def file_identity(self) -> tuple[int, int]:
        """Device and inode of the mapped file: whether a path means this very arena."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    @property
    def fd(self) -> int:
        """The open file, for presence locks (presence.py); valid until close."""
        return self._fd

    @property
    def spare_bytes(self) -> int:
        """Behind the last class."""
        return self.arena_bytes - (self.classes[-1].end if self.classes else SUPERBLOCK_BYTES)

    def placed(self, size_class: SizeClass) -> SizeClass:
        """Where `add_class` would place it now."""
        return place(size_class, self.arena_bytes - self.spare_bytes)

    def add_class(self, size_class: SizeClass) -> None:
        """Owner: one more class in the spare part; its slots are as new. ValueError when it does not fit."""
        placed = self.placed(size_class)
        _native.add_class(self.region, pack_class(placed))
        self.classes += (placed,)

    def epoch_now(self) -> int:
        """What the superblock says at this moment; differs from `epoch` (0) once the owner closed or was replaced."""
        return int(self._epoch_now[0])

    def close(self) -> None:
        """Ends this use; idempotent. The owner also marks the arena closed and unlinks it.

        Buffers that others still hold stay mapped until they let go of them; only then the memory is freed.
        """
        if self._region is None:
            return
        if self.owner:
            self._region[_EPOCH_AT : _EPOCH_AT + 8] = bytes(8)
            _unlink_own(self.path, self._fd)
        self._epoch_now.release()
        region, mapping = self._region, self._mapping
        self._region = self._mapping = None
        with contextlib.suppress(BufferError):  # exported: the mapping goes with its last holder
            region.release()
            if mapping is not None:
                mapping.close()
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _take_over(path: str) -> int | None:
    """Locks what is at `path`. None: nothing there. A descriptor: a dead owner's file, now marked closed and ours."""
    for _ in range(_RETRIES):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArenaError(f"cannot open {path}: {error.strerror}; remove it or choose another arena path") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, fd):
                _mark_closed(path, fd)
                return fd
        except BlockingIOError:
            raise ArenaError(_in_use(path, fd)) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise ArenaError(f"{path} keeps being replaced; do several agents use the same arena path?")


def _in_use(path: str, fd: int) -> str:
    try:
        pid = unpack_superblock(os.pread(fd, SUPERBLOCK_BYTES, 0)).owner_pid
        owner = f"the agent with pid {pid}"
    except ValueError:
        owner = "another process"
    finally:
        os.close(fd)
    return f"arena {path} is in use by {owner}; stop it, or give this agent another arena path"


def _mark_closed(path: str, fd: int) -> None:
    """Epoch 0 into a dead owner's superblock. Refuses to touch a file that is not an arena."""
    head = os.pread(fd, SUPERBLOCK_BYTES, 0)
    try:
        epoch = unpack_superblock(head).epoch
    except ValueError as error:
        raise ArenaError(f"{path} exists and is no arena ({error}); remove it or choose another arena path") from error
    if epoch == 0:  # by an attempt that failed later: to write its slots again would take memory, which may be what is missing
        return
    mapping = _native.Mapping(fd, os.fstat(fd).st_size, writable=True)  # hugetlbfs knows no write()
    with memoryview(mapping) as region:
        region[_EPOCH_AT : _EPOCH_AT + 8] = bytes(8)
        with contextlib.suppress(ValueError, OSError):  # damaged, or a file system without holes
            _give_back(mapping, region)
    mapping.close()


def _give_back(mapping: _native.Mapping, region: memoryview) -> None:
    """Frees the memory of a dead owner's slots now: who still maps the file would keep it, and there may be no room for two.

    Every generation goes odd before the first page goes, so a reader in the middle of a copy finds it torn, never zeros.
    """
    for item in unpack_superblock(region[:SUPERBLOCK_BYTES].tobytes()).classes:
        ends = item.first + item.slots * item.stride
        _native.begin_write(region, array("Q", range(item.first, ends, item.stride)).tobytes())
    mapping.remove(SUPERBLOCK_BYTES)


def _new_file(path: str, size: int, *, prefault: bool, huge_pages: HugePages, numa_node: int) -> tuple[int, _native.Mapping]:
    directory = os.path.dirname(path) or "."
    free = free_bytes(directory)
    if size > free:
        raise ArenaTooLarge(no_room(directory, size, free))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file_bytes = -(-size // os.fstat(fd).st_blksize) * os.fstat(fd).st_blksize  # whole pages, which hugetlbfs insists on
        os.ftruncate(fd, file_bytes)
        mapping = _native.Mapping(fd, size, writable=True)
        if numa_node >= 0:
            mapping.bind(numa_node)
        mapping.advise_huge(huge_pages is not HugePages.OFF)
        if prefault:  # what it cannot have is refused by the next line
            mapping.prefault(huge=huge_pages is not HugePages.OFF, threads=min(_PREFAULT_THREADS, os.cpu_count() or 1))
        os.posix_fallocate(fd, 0, file_bytes)
        pages = pages_at(mapping.address, size)
        if huge_pages is HugePages.REQUIRE and not pages.complete:
            raise ArenaError(f"huge_pages is require, and the arena at {directory} has {pages.in_words()}: {pages.advice()}")
    except ArenaError:
        os.close(fd)
        raise
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise ArenaTooLarge(no_room(directory, size, free)) from error
        raise ArenaError(f"cannot create an arena of {size:,} bytes at {path}: {error.strerror}") from error
    return fd, mapping


def free_bytes(directory: str) -> int:
    """What an arena in `directory` could take. Raises ArenaError when it is none."""
    try:
        stats = os.statvfs(directory)
    except OSError as error:
        raise ArenaError(f"no arena in {directory}: {error.strerror}; create it or choose another arena path") from error
    if stats.f_blocks == 0 and stats.f_bsize >= HUGE_BYTES:  # hugetlbfs without a limit of its own: the machine's pool
        return free_pool_bytes(stats.f_bsize)
    return stats.f_bavail * stats.f_frsize


def no_room(directory: str, size: int, free: int) -> str:
    """Why an arena of `size` bytes is refused, and what to do."""
    return (
        f"an arena of {size:,} bytes does not fit: {free:,} bytes are free in {directory} "
        f"({show_bytes(size)} against {show_bytes(free)}); configure a smaller arena, "
        "free memory there, or enlarge it (docker: --shm-size, Kubernetes: emptyDir sizeLimit, hugetlbfs: vm.nr_hugepages)"
    )


def _put_in_place(temporary: str, path: str, *, replace: bool) -> None:
    if replace:
        os.rename(temporary, path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise ArenaError(f"another agent created {path} at the same moment; give this one another arena path") from None


def _is_at(path: str, fd: int) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _unlink_own(path: str, fd: int) -> None:
    if _is_at(path, fd):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
