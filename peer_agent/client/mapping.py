"""The agent's arena as an engine maps it: for how long it must stay, and when nobody writes to it any more.

Rules: the mapping goes once the session is closed and the last copy has ended, in whatever order. The presence lock
(peer_agent/memory/presence.py) is held from before a Reserve until nothing of this process writes, copies of a device that
missed their deadline included; loads only read, and do not count. With a device, the mapping is page-locked for as long as it
is there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial

from kvdir.errors import Unavailable
from kvdir.obs.logs import say
from peer_agent.memory import presence
from peer_agent.memory.arena import Arena
from peer_agent.memory.device import Device, DeviceError

log = logging.getLogger(__name__)


class Mapping:
    """Of one session. Thread-safe; `close` may be called at any time."""

    def __init__(self, arena: Arena, session: int, device: Device | None) -> None:
        """Takes the arena over, also when it raises (DeviceError: it cannot be page-locked)."""
        self._arena = arena
        self._session = session
        self._device = device
        self._lock = threading.Lock()
        self._copies = 0
        self._writing = 0  # copies among them that write to the arena
        self._stores = 0
        self._present = False  # the presence lock is held
        self._closed = False
        if device is not None:
            try:
                device.pin(arena.region)
            except BaseException:
                arena.close()
                raise

    def close(self) -> None:
        """Ends the use of the arena, once copies under way have ended; the presence lock goes with it. Idempotent."""
        with self._lock:
            idle = not self._copies and not self._closed
            self._closed = True
        if idle:
            self._unmap()

    @contextlib.contextmanager
    def using(self, *, writing: bool) -> Iterator[memoryview]:
        """The mapped arena, which stays while the block runs. Raises Unavailable after `close`."""
        with self._lock:
            self._require_open()
            self._count(writing, 1)
        try:
            yield self._arena.region
        finally:
            self._let_go(writing)

    def keep(self, *, writing: bool) -> Callable[[], None]:
        """Within `using`: the arena stays beyond it until what is returned is called, once, from any thread. Also when the
        session has been closed meanwhile: the copy is under way.
        """
        with self._lock:
            if not self._copies:
                raise RuntimeError("keep outside of using: the arena may be gone")
            self._count(writing, 1)
        return partial(self._let_go, writing)

    @contextlib.contextmanager
    def storing(self) -> Iterator[None]:
        """Around a Reserve, the copy and the Commit: afterwards nothing is written any more, whatever became of the calls,
        but by copies that are still kept. Raises Unavailable after `close`.
        """
        with self._lock:
            self._require_open()
            if not self._present:
                self._take_presence()
            self._stores += 1
        try:
            yield
        finally:
            with self._lock:
                self._stores -= 1
                self._leave_if_quiet()

    # internals

    def _count(self, writing: bool, change: int) -> None:
        self._copies += change
        self._writing += writing * change

    def _let_go(self, writing: bool) -> None:
        with self._lock:
            self._count(writing, -1)
            self._leave_if_quiet()
            last = self._closed and not self._copies
        if last:
            self._unmap()

    def _require_open(self) -> None:
        if self._closed:
            raise Unavailable("the session with the agent has ended")

    def _take_presence(self) -> None:
        try:
            presence.hold(self._arena.fd, self._session)
        except OSError as error:
            raise Unavailable(f"cannot lock the arena {self._arena.path} for writing: {error}") from error
        self._present = True

    def _leave_if_quiet(self) -> None:
        """With the lock held. A copy may outlast its store: a thread goes on when its event loop is torn down."""
        if self._present and not self._stores and not self._writing and not self._closed:  # closing gives it back as well
            presence.release(self._arena.fd, self._session)
            self._present = False

    def _unmap(self) -> None:
        try:
            if self._device is not None:
                self._device.unpin(self._arena.region)
        except DeviceError as error:  # the driver is through with this process, and so with its page locks
            say(log, logging.WARNING, "arena not released by the device", error=error)
        finally:
            self._arena.close()
