"""One picture a second for everybody who watches, over server-sent events.

    coordinator's loop: copies plain values ──▶ this thread: document, one encoding ──▶ the viewers' sockets

Rules: nothing is copied while nobody watches; pictures come more rarely when they cost much (at most BUSY of the time). A
picture stands alone: who has not taken the last one yet is not sent the next, so a slow viewer costs one picture's memory and
nobody's time; one that takes nothing for STALL_S is dropped. Viewers are bounded. Sockets never block; a viewer costs no
thread. Format: WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import logging
import queue
import selectors
import socket
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

import msgspec

from kvdir.obs.logs import say
from kvdir.server.page.copies import PageSource
from kvdir.server.page.document import document
from kvdir.server.page.rates import Rates

log = logging.getLogger("kvdir.page")

MAX_VIEWERS = 64
INTERVAL_S = 1.0
BUSY = 0.1
"""Share of the time that pictures may take."""
COPY_S = 2.0
STALL_S = 15.0
_HEAD = b"retry: 2000\n\n"


@dataclass(slots=True, eq=False)
class _Viewer:
    """pending: of what it was sent last, what its socket has not taken. skipped: pictures."""

    socket: socket.socket
    took_s: float
    pending: memoryview = field(default_factory=lambda: memoryview(b""))
    skipped: int = 0

    def offer(self, event: bytes, now_s: float) -> bool:
        """Sends it, or skips it when the last one is still under way. Returns whether the viewer is still there."""
        if self.pending:
            self.skipped += 1
            return now_s - self.took_s < STALL_S
        self.pending = memoryview(event)
        return self.flush(now_s)

    def flush(self, now_s: float) -> bool:
        """Sends what it takes now. Returns whether it is still there."""
        try:
            while self.pending:
                sent = self.socket.send(self.pending)
                self.pending, self.took_s = self.pending[sent:], now_s
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def listens(self) -> bool:
        """Whether it is still there: there is something to read of it, and a viewer has nothing more to say."""
        try:
            return bool(self.socket.recv(1024))
        except BlockingIOError:
            return True
        except OSError:
            return False


class Feed:
    """Runs from construction until `close`. loop: where the source is asked."""

    def __init__(
        self,
        source: PageSource,
        loop: asyncio.AbstractEventLoop,
        *,
        max_viewers: int = MAX_VIEWERS,
        interval_s: float = INTERVAL_S,
        busy: float = BUSY,
    ) -> None:
        self._source = source
        self._loop = loop
        self._max_viewers = max_viewers
        self._interval_s = interval_s
        self._busy = busy
        self._joining: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._viewers: set[_Viewer] = set()
        self._closed = False
        self._door = threading.Lock()
        self._rates = Rates()
        self._number = 0
        self._due_s = 0.0
        self._soonest_s = 0.0
        self.cost_s = 0.0
        """Of the newest picture, in this thread and on the loop."""
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)
        self._thread.start()

    @property
    def viewers(self) -> int:
        """Who watches now."""
        return len(self._viewers) + self._joining.qsize()

    def full(self) -> str:
        """Why nobody more may watch, in words; empty when there is room."""
        if self.viewers < self._max_viewers:
            return ""
        return f"{self._max_viewers} windows watch this page already: close one of them"

    def join(self, connection: socket.socket) -> bool:
        """Takes the connection over, whose head was sent. False: there is no room, and it is the caller's still."""
        with self._door:
            if self._closed or self.viewers >= self._max_viewers:
                return False
            connection.setblocking(False)
            self._joining.put(connection)
            self._waker.send(b"j")
            return True

    async def close(self) -> None:
        """Ends every stream; clients come back by themselves. On the loop, which goes on turning for a copy under way."""
        with self._door:
            if not self._closed:
                self._closed = True
                self._waker.send(b"c")
        await asyncio.to_thread(self._thread.join)

    # -- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
        finally:
            with self._door:  # nobody joins any more
                self._closed = True
            for viewer in tuple(self._viewers):
                self._leave(viewer)
            while not self._joining.empty():
                self._joining.get().close()
            self._selector.close()
            self._woken.close()
            self._waker.close()

    def _turn(self) -> None:
        """Waits until a picture is due or a socket has something, and does that."""
        wait_s = max(0.0, self._due_s - time.monotonic()) if self._viewers else None
        for key, events in self._selector.select(wait_s):
            viewer = key.data
            if viewer is None:
                self._woken.recv(1024)
            elif (events & selectors.EVENT_READ and not viewer.listens()) or not viewer.flush(time.monotonic()):
                self._leave(viewer)
            else:
                self._attend(viewer)
        while not self._joining.empty():
            self._welcome(self._joining.get())
        if self._viewers and not self._closed and time.monotonic() >= self._due_s:
            self._picture()

    def _welcome(self, connection: socket.socket) -> None:
        """The picture that everybody gets next comes at once, but no sooner than BUSY allows: windows that come and go all the
        time cost no more than one that stays."""
        viewer = _Viewer(connection, time.monotonic())
        self._viewers.add(viewer)
        self._selector.register(connection, selectors.EVENT_READ, viewer)
        self._due_s = self._soonest_s
        self._send(viewer, _HEAD + _event("history", list(self._rates.points)))

    def _picture(self) -> None:
        began_s = time.monotonic()
        event = self._next_event()
        for viewer in tuple(self._viewers):
            self._send(viewer, event)
        self.cost_s = time.monotonic() - began_s
        self._soonest_s = began_s + self.cost_s / self._busy
        self._due_s = max(self._soonest_s, began_s + self._interval_s)

    def _send(self, viewer: _Viewer, event: bytes) -> None:
        if viewer.offer(event, time.monotonic()):
            self._attend(viewer)
        else:
            self._leave(viewer)

    def _attend(self, viewer: _Viewer) -> None:
        """Told when it takes more, as long as there is more."""
        self._selector.modify(viewer.socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if viewer.pending else 0), viewer)

    def _leave(self, viewer: _Viewer) -> None:
        self._viewers.discard(viewer)
        self._selector.unregister(viewer.socket)
        viewer.socket.close()

    def _next_event(self) -> bytes:
        """A picture; or that there is none, because the coordinator's loop does not turn."""
        try:
            copied = asyncio.run_coroutine_threadsafe(self._source.copy(), self._loop)
            try:
                copy = copied.result(COPY_S)
            finally:
                copied.cancel()
        except (TimeoutError, CancelledError, RuntimeError):  # RuntimeError: the loop is closed
            return _event("stuck", {"words": f"the coordinator did not answer within {COPY_S:g} s"})
        except Exception as error:
            say(log, logging.ERROR, "no picture", error=repr(error))
            return _event("stuck", {"words": "the coordinator failed to say what it knows; its log has the reason"})
        self._number += 1
        point = self._rates.add(copy)
        return _event("picture", document(copy, point, number=self._number, viewers=self.viewers))


def _event(name: str, content: object) -> bytes:
    """JSON has no line ends of its own, so one data line holds it."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"
