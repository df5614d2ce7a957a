"""One picture a second for everybody who watches, over server-sent events.

    coordinator's loop: copies plain values ──▶ this thread: document, one encoding ──▶ the viewers' sockets

Rules: nothing is copied while nobody watches; pictures come more rarely when they cost much (at most BUSY of the time). A
picture stands alone: who has not taken the last one yet is not sent the next, so a slow viewer costs one picture's memory and
nobody's time; one that takes nothing for STALL_S is dropped. Viewers are bounded. Sockets never block; a viewer costs no
thread. Format: WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

import msgspec

from kvdir.obs.logs import say
from kvdir.server.page.copies import Copy, PageSource
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
    """pending: of what it was sent last, what its socket has not taken."""

    socket: socket.socket
    took_s: float
    pending: memoryview = field(default_factory=lambda: memoryview(b""))
    skipped: int = 0

    def offer(self, event: bytes, now_s: float) -> bool:
        """Sends it, or skips it when the last one is still under way. Returns whether the viewer is still there."""
        if self.pending:
            self._flush(now_s)
        if self.pending:
            self.skipped += 1
            return now_s - self.took_s < STALL_S
        self.pending = memoryview(event)
        return self._flush(now_s)

    def _flush(self, now_s: float) -> bool:
        try:
            while self.pending:
                sent = self.socket.send(self.pending)
                self.pending, self.took_s = self.pending[sent:], now_s
        except BlockingIOError:
            return True
        except OSError:
            self.took_s = float("-inf")
            return False
        return True


class Feed:
    """Runs from construction until `close`. loop: where the source is asked."""

    def __init__(
        self,
        source: PageSource,
        loop: asyncio.AbstractEventLoop,
        *,
        max_viewers: int = MAX_VIEWERS,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._source = source
        self._loop = loop
        self._max_viewers = max_viewers
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._joining: list[_Viewer] = []
        self._viewers: list[_Viewer] = []
        self._closed = False
        self._rates = Rates()
        self._number = 0
        self.copy: Copy | None = None
        """The newest one; None before anybody watched."""
        self.cost_s = 0.0
        """Of the newest picture, in this thread and on the loop."""
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)
        self._thread.start()

    @property
    def viewers(self) -> int:
        """Who watches now."""
        return len(self._viewers) + len(self._joining)

    def full(self) -> str:
        """Why nobody more may watch, in words; empty when there is room."""
        if self.viewers < self._max_viewers:
            return ""
        return f"{self._max_viewers} windows watch this page already: close one of them"

    def join(self, connection: socket.socket) -> bool:
        """Takes the connection over, whose head was sent. False: there is no room, and it is the caller's still."""
        with self._changed:
            if self._closed or self.viewers >= self._max_viewers:
                return False
            connection.setblocking(False)
            self._joining.append(_Viewer(connection, time.monotonic()))
            self._changed.notify()
        return True

    async def close(self) -> None:
        """Ends every stream; clients come back by themselves. On the loop, which goes on turning for a copy under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    # -- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                began_s = time.monotonic()
                self._picture()
                self.cost_s = time.monotonic() - began_s
                with self._changed:
                    if not self._closed and not self._joining:
                        self._changed.wait(max(self._interval_s, self.cost_s / BUSY) - self.cost_s)
        finally:
            for viewer in (*self._viewers, *self._joining):
                viewer.socket.close()

    def _wait(self) -> bool:
        """Until somebody watches. False: it is over."""
        with self._changed:
            while not (self._closed or self._joining or self._viewers):
                self._changed.wait()
            return not self._closed

    def _picture(self) -> None:
        event = self._next_event()
        now_s = time.monotonic()
        with self._changed:
            joining, self._joining = self._joining, []
        if joining:
            history = _HEAD + _event("history", list(self._rates.points))
            for viewer in joining:
                viewer.offer(history, now_s)
        watching = [*self._viewers, *joining]
        self._viewers = [viewer for viewer in watching if viewer.offer(event, now_s)]
        for viewer in watching:
            if viewer not in self._viewers:
                with contextlib.suppress(OSError):
                    viewer.socket.close()

    def _next_event(self) -> bytes:
        """A picture; or that there is none, because the coordinator's loop does not turn."""
        try:
            copied = asyncio.run_coroutine_threadsafe(self._source.copy(), self._loop)
            try:
                copy = self.copy = copied.result(COPY_S)
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
