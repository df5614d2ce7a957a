"""Accepts connections of HTTP, and gives one a thread only when its request's head is here; one small thread, bounded in all.

    accepted ──▶ waits here, costs a descriptor ──head whole──▶ queue ──▶ one of THREADS ──▶ answered, closed
                        └─ HEAD_S over, closed                     └─ full: closed

Rules: whoever says nothing, or says it slowly, keeps no thread; whoever reads slowly keeps one as long as `handle` lets it.
Probes have threads of their own, so that slow scrapers cannot have a healthy process killed.
Beyond MAX_WAITING connections, or our part of the descriptors, the one that has waited longest is closed.
"""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from kvdir.rpc.open_files import part_of_open_files

HEAD_S = 5.0
MAX_HEAD_BYTES = 16 * 1024
MAX_WAITING = 512
THREADS = 6
PROBE_THREADS = 2
QUEUED = 32
_LOOK_AGAIN_S = 0.02
"""After which a head that came in part is looked at again; it cannot be waited for, since its first part makes it readable."""

Handle = Callable[[socket.socket], None]


class Door:
    """Serves from construction until `close`. Raises OSError when the address cannot be had.

    handle: answers one request and closes the connection, on one of our threads. is_probe: of the first line of a request.
    """

    def __init__(self, address: tuple[str, int], handle: Handle, *, is_probe: Callable[[bytes], bool]) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._handle = handle
        self._is_probe = is_probe
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._waiting: OrderedDict[socket.socket, float] = OrderedDict()  # since when, oldest first
        self._partial: set[socket.socket] = set()
        self._closing = False
        self._most_waiting = part_of_open_files(0.0625, most=MAX_WAITING)
        self._probes: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._others: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(asked,), name=f"http-{name}-{number}", daemon=True)
            for name, asked, count in (("probe", self._probes, PROBE_THREADS), ("page", self._others, THREADS))
            for number in range(count)
        ]
        self._threads.append(threading.Thread(target=self._watch, name="http-door", daemon=True))
        for thread in self._threads:
            thread.start()

    def close(self, *, timeout_s: float = 2.0) -> None:
        """No more connections; what is being answered may end within timeout_s."""
        self._closing = True
        self._wake.send(b".")
        until_s = time.monotonic() + timeout_s
        for thread in reversed(self._threads):  # the door first: it tells the others
            thread.join(timeout=max(0.0, until_s - time.monotonic()))
        self._wake.close()

    # the door's thread

    def _watch(self) -> None:
        look_s = time.monotonic()
        while not self._closing:
            timeout_s = _LOOK_AGAIN_S if self._partial else HEAD_S
            for key, _ in self._selector.select(timeout_s):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj is not self._woken:
                    self._look(key.fileobj)
            if (now_s := time.monotonic()) >= look_s:
                look_s = now_s + _LOOK_AGAIN_S
                for connection in tuple(self._partial):
                    self._look(connection)
                self._close_overdue(now_s)
        for connection in tuple(self._waiting):
            self._drop(connection)
        self._selector.close()
        for end in (self._listener, self._woken):
            end.close()
        for asked, count in ((self._probes, PROBE_THREADS), (self._others, THREADS)):
            for _ in range(count):
                asked.put(None)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again, or we are out of descriptors: the next one may be better
            time.sleep(_LOOK_AGAIN_S)
            return
        connection.setblocking(False)
        self._waiting[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._waiting) > self._most_waiting:
            self._drop(next(iter(self._waiting)))
        self._look(connection)

    def _look(self, connection: socket.socket) -> None:
        """Hands it on if its head is whole; else it waits on."""
        if connection not in self._waiting:
            return
        try:
            head = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            head = b""
        if not head:
            self._drop(connection)
        elif b"\r\n\r\n" in head or b"\n\n" in head:
            self._release(connection)
            asked = self._probes if self._is_probe(head.partition(b"\n")[0]) else self._others
            if asked.qsize() < QUEUED:
                asked.put(connection)
            else:
                connection.close()
        elif len(head) == MAX_HEAD_BYTES:
            self._drop(connection)
        elif connection not in self._partial:
            self._partial.add(connection)
            self._selector.unregister(connection)

    def _close_overdue(self, now_s: float) -> None:
        while self._waiting and now_s - next(iter(self._waiting.values())) > HEAD_S:
            self._drop(next(iter(self._waiting)))

    def _release(self, connection: socket.socket) -> None:
        del self._waiting[connection]
        if connection in self._partial:
            self._partial.discard(connection)
        else:
            self._selector.unregister(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._release(connection)
        connection.close()

    # threads that answer

    def _serve(self, asked: queue.SimpleQueue[socket.socket | None]) -> None:
        while (connection := asked.get()) is not None:
            try:
                self._handle(connection)
            finally:
                connection.close()
