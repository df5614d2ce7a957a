"""An engine's event publisher without an engine: ZeroMQ PUB and replay ROUTER as vLLM has them, and faults on demand.

Passes the same suite as vLLM's own ZmqEventPublisher (check_engine_publisher.py). Rules: numbers begin at 0 with every `start`;
a batch that is `lost` has a number, is in the ring, and is not sent. `held` is what an engine would hold: the truth of tests.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import zmq

EVENT_FIELDS = ("lora_id", "medium", "lora_name", "parent_block_hash")
_END = (-1).to_bytes(8, "big", signed=True)


def stored(
    hashes: Sequence[int], *, parent: int | None = None, medium: str = "GPU", block_tokens: int = 16, **fields: Any
) -> dict[str, Any]:
    """A BlockStored event as vLLM 0.32 sends it, with as many tokens as the blocks have."""
    tokens = [hashes[0] % 1000 if hashes else 0] * (len(hashes) * block_tokens)
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": tokens,
        "block_size": block_tokens, "lora_id": None, "medium": medium, "lora_name": None,
    } | fields  # fmt: skip


def removed(hashes: Sequence[int], *, medium: str = "GPU", **fields: Any) -> dict[str, Any]:
    """A BlockRemoved event."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium} | fields


CLEARED = {"type": "AllBlocksCleared"}


def batch_of(*events: dict[str, Any], rank: int = 0) -> bytes:
    """The payload of one batch."""
    return msgspec.msgpack.encode([time.time(), list(events), rank])


class FakeEngine:
    """See the module docstring. Use it from one thread; the replay has its own.

    connect: the endpoint it connects to, as vLLM does without `*`; empty: it binds a free port. replay: whether it has a socket
    for that. ring_batches: how far that reaches back. replay_loses: numbers that a replay leaves out without a word.
    """

    def __init__(self, *, connect: str = "", replay: bool = True, ring_batches: int = 10_000, rank: int = 0) -> None:
        self._context = zmq.Context()
        self._connect = connect
        self._has_replay = replay
        self._rank = rank
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=ring_batches)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pub: Any = None
        self.endpoint = connect
        self.replay_endpoint = ""
        self.replay_loses: set[int] = set()
        self.replays = 0
        self.held: Counter[int] = Counter()
        self.next_seq = 0
        self.start()

    def start(self) -> None:
        """A new life at the same addresses: nothing is held, numbers begin at 0."""
        self._stop.clear()
        self.forget()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        if self._connect:
            self._pub.connect(self._connect)
        else:
            self.endpoint = _bound(self._pub, self.endpoint)
        if self._has_replay:
            router = self._context.socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            self.replay_endpoint = _bound(router, self.replay_endpoint)
            self._thread = threading.Thread(target=self._serve, args=(router,), name="fake-engine", daemon=True)
            self._thread.start()

    def forget(self) -> None:
        """A new life, quicker than anybody could see a connection break."""
        with self._lock:
            self._ring.clear()
        self.held.clear()
        self.next_seq = 0

    def kill(self) -> None:
        """Gone without a word, and its ports free."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
            self._thread = None
        if self._pub is not None:
            self._pub.close(0)
            self._pub = None

    def close(self) -> None:
        """For good."""
        self.kill()
        self._context.destroy(0)

    def publish(self, *events: dict[str, Any], lost: bool = False) -> int:
        """One batch; returns its number."""
        for event in events:
            self._keep(event)
        return self.send(batch_of(*events, rank=self._rank), lost=lost)

    def publish_stored(self, hashes: list[int]) -> None:
        """One batch with one event (check_engine_publisher.Publisher)."""
        self.publish(stored(hashes))

    def send(self, payload: bytes, *, lost: bool = False) -> int:
        """Whatever it is, as the payload of one batch."""
        seq = self.next_seq
        self.next_seq += 1
        with self._lock:
            self._ring.append((seq, payload))
        if not lost:
            self._pub.send_multipart([b"", seq.to_bytes(8, "big"), payload])
        return seq

    def send_raw(self, *frames: bytes) -> None:
        """Frames that are no batch, perhaps."""
        self._pub.send_multipart(list(frames))

    def _keep(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                self.held.update(event["block_hashes"])
            case "BlockRemoved":
                self.held.subtract(event["block_hashes"])
                self.held = +self.held
            case "AllBlocksCleared":
                self.held.clear()

    def _serve(self, router: Any) -> None:
        while not self._stop.is_set():
            if not router.poll(20):
                continue
            client, _, first = router.recv_multipart()
            self.replays += 1
            with self._lock:
                batches = [(seq, payload) for seq, payload in self._ring if seq >= int.from_bytes(first, "big")]
            for seq, payload in batches:
                if seq not in self.replay_loses:
                    router.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), payload])
            router.send_multipart([client, b"", b"", _END, b""])
        router.close(0)


def described(engine: FakeEngine) -> dict[str, Any]:
    """What its HTTP server would say of it."""
    endpoints = {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint}
    wild = {name: endpoint.replace("127.0.0.1", "*") for name, endpoint in endpoints.items()}
    return {"enable_kv_cache_events": True, "publisher": "zmq", "topic": ""} | wild


@contextlib.contextmanager
def server_that_says(sources: dict[str, Any], model: str | list[str]) -> Iterator[str]:
    """The engine's HTTP server, as far as discovery asks it: where its events are, which models. Its URL.

    model: a list is of what it serves in one life after another, the last one now.
    """
    names = [model] if isinstance(model, str) else model

    def said(path: str) -> dict[str, Any]:
        models = {"data": [{"id": "an-adapter", "parent": names[-1]}, {"id": names[-1]}]}
        return {"/kv_event_sources": sources, "/v1/models": models}[path]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said(self.path)).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="fake-engine-http", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _bound(socket: Any, endpoint: str) -> str:
    """Binds a free port, or the one it had before as soon as that is free."""
    if not endpoint:
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    deadline_s = time.monotonic() + 5
    while True:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
        else:
            return endpoint
