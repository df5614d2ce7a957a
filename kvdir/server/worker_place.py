"""The private directory of a coordinator with lookup workers, in memory that processes share.

    /dev/shm/kvdir-serve-XXXXXXXX/      0700, removed at the end
        lock      held (flock) for as long as the coordinator lives
        index     the region: written by the main process, mapped read-only by workers
        main      unix socket: calls that workers pass on
        worker-N  what worker N counted

Rules: what a killed coordinator left is found by its free lock, and removed by the next start of the same user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from kvdir.config import show_bytes
from kvdir.core.region_roster import RegionRoster
from kvdir.core.roster import Beat
from kvdir.errors import ConfigError
from kvdir.index import RegionError, RegionIndex, create_region
from kvdir.server.coordinator import Coordinator

PLACE = Path("/dev/shm")
_PREFIX, _NEW = "kvdir-serve-", "kvdir-new-"


class WorkerPlace:
    """Made by the constructor, removed by `close`. Raises ConfigError when there is no such memory."""

    def __init__(self, place: Path = PLACE) -> None:
        try:
            _remove_leftovers(place)
            made = Path(tempfile.mkdtemp(prefix=_NEW, dir=place))  # under a name that nobody tidies up before it is locked
            self._lock = _lock(made)
            self.path = made.rename(place / made.name.replace(_NEW, _PREFIX))
        except OSError as error:
            raise ConfigError(
                [
                    f"lookup_workers: {place} cannot be used ({error.strerror}): workers share the index there. "
                    "Mount a tmpfs (in a container: --shm-size, or a memory-backed emptyDir), or set lookup_workers to 0"
                ]
            ) from error
        self._region: RegionIndex | None = None

    @property
    def socket(self) -> str:
        """For gRPC."""
        return f"unix:{self.path / 'main'}"

    def figures(self, number: int) -> Path:
        return self.path / f"worker-{number}"

    def new_region(self, *, expected_blocks: int, seed: int, max_bytes: int = 0) -> RegionIndex:
        """The index; one that was made before is given up. Raises ConfigError when there is no room for it, or for its bound:
        an index that cannot grow so far evicts nothing, and owners would be asked again and again for what it has no room for.
        """
        if self._region is not None:
            self._region.close()
        free_bytes = shutil.disk_usage(self.path).free
        if max_bytes > free_bytes:
            raise ConfigError(
                [
                    f"max_index_bytes: {show_bytes(max_bytes)} is more than the {show_bytes(free_bytes)} that are free in "
                    f"{self.path.parent}, where workers share the index: lower it, or give that more (in a container: "
                    "--shm-size)"
                ]
            )
        try:
            self._region = create_region(self.path / "index", expected_blocks=expected_blocks, seed=seed, max_bytes=max_bytes)
        except (RegionError, OSError, MemoryError) as error:
            raise ConfigError([f"lookup_workers: {error}"]) from error
        return self._region

    def keep_roster(self, coordinator: Coordinator) -> None:
        """The region names the directory's nodes, holders and namespaces from now on, and at every tick how current it is."""
        assert self._region is not None
        roster, directory, config = RegionRoster(self._region), coordinator.directory, coordinator.config
        directory.add_mirror(roster, now_s=coordinator.now_s())

        def beat(now_s: float) -> None:
            now_ns = round(now_s * 1e9)
            roster.beat(
                Beat(
                    beat_ns=now_ns,
                    as_of_ns=now_ns,
                    pid=os.getpid(),
                    source=coordinator.name,
                    warming=directory.warming,
                    incomplete=directory.holders.partial > 0,
                    direct=True,
                    stale_after_s=config.stale_after_s,
                    expire_after_s=config.expire_after_s,
                )
            )

        beat(coordinator.now_s())
        coordinator.on_tick.append(beat)

    def close(self) -> None:
        if self._region is not None:
            self._region.close()
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_leftovers(place: Path) -> None:
    for path in place.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or alive
            if path.lstat().st_uid != os.geteuid():
                continue  # anybody may make directories there: what is in them is not for us to open, least of all as root
            lock = _lock(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(path: Path) -> int:
    """BlockingIOError when somebody holds it."""
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
