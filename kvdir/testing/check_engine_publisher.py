"""What we rely on in an engine's event publisher: the suite that the fake and vLLM's own pass.

Each check is given a `Publisher` that nobody has used, and two sockets' addresses. Raises AssertionError.
Source: vllm/distributed/kv_events.py 0.32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from kvdir.engines import END_SEQ, Frame, decode, read_frame

WAIT_MS = 5_000


class Publisher(Protocol):
    """endpoint, replay_endpoint: where to connect. publish: one batch with one BlockStored of these hashes."""

    endpoint: str
    replay_endpoint: str

    def publish_stored(self, hashes: list[int]) -> None: ...


class _Subscriber:
    def __init__(self, publisher: Publisher) -> None:
        self._context = zmq.Context()
        self._publisher = publisher
        self._sub: Any = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(publisher.endpoint)
        self._dealers: list[Any] = []

    def __enter__(self) -> _Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in (self._sub, *self._dealers):
            opened.close(0)
        self._context.term()

    def next(self, timeout_ms: int = WAIT_MS) -> Frame | None:
        if not self._sub.poll(timeout_ms):
            return None
        frame = read_frame(self._sub.recv_multipart())
        assert frame is not None, "a live message has no known form"
        return frame

    def joined(self) -> Frame:
        """The first message that arrives: those before the subscription did are not for us."""
        deadline_s = time.monotonic() + WAIT_MS / 1000
        while time.monotonic() < deadline_s:
            self._publisher.publish_stored([1])
            frame = self.next(50)
            if frame is not None:
                return frame
        raise AssertionError("nothing arrived")

    def replay(self, first_seq: int) -> list[Frame]:
        dealer: Any = self._context.socket(zmq.DEALER)
        self._dealers.append(dealer)
        dealer.connect(self._publisher.replay_endpoint)
        dealer.send_multipart([b"", first_seq.to_bytes(8, "big")])
        frames: list[Frame] = []
        while dealer.poll(WAIT_MS):
            frame = read_frame(dealer.recv_multipart())
            assert frame is not None, "a replayed message has no known form"
            if frame.seq == END_SEQ:
                return frames
            frames.append(frame)
        raise AssertionError("the replay has no end")


def numbers_go_up_by_one(publisher: Publisher) -> None:
    with _Subscriber(publisher) as subscriber:
        first = subscriber.joined()
        for number in range(20):
            publisher.publish_stored([number])
        seen = [subscriber.next() for _ in range(20)]
        assert [frame.seq - first.seq for frame in seen if frame] == list(range(1, 21))


def a_late_subscriber_misses_what_was_before(publisher: Publisher) -> None:
    for number in range(5):
        publisher.publish_stored([number])
    with _Subscriber(publisher) as subscriber:
        assert subscriber.joined().seq >= 5


def a_replay_has_everything_from_a_number_on_and_an_end(publisher: Publisher) -> None:
    for number in range(10):
        publisher.publish_stored([number])
    with _Subscriber(publisher) as subscriber:
        last = subscriber.joined()
        assert [frame.seq for frame in subscriber.replay(0)][: last.seq + 1] == list(range(last.seq + 1))
        assert [frame.seq for frame in subscriber.replay(7)][:3] == [7, 8, 9]
        assert not subscriber.replay(10_000)


def a_replayed_batch_is_the_live_one(publisher: Publisher) -> None:
    with _Subscriber(publisher) as subscriber:
        live = subscriber.joined()
        (again,) = [frame for frame in subscriber.replay(live.seq) if frame.seq == live.seq]
        assert again.payload == live.payload


def a_batch_says_what_was_stored(publisher: Publisher) -> None:
    with _Subscriber(publisher) as subscriber:
        subscriber.joined()
        publisher.publish_stored([2**64 - 1, 7])
        frame = subscriber.next()
        assert frame is not None
        batch = decode("vllm", frame.payload)
        assert not batch.rejected
        assert batch.events[0].packed == (2**64 - 1).to_bytes(8, "big") + (7).to_bytes(8, "big")  # type: ignore[union-attr]
        assert batch.dp_rank == 0


CHECKS: tuple[Callable[[Publisher], None], ...] = (
    numbers_go_up_by_one,
    a_late_subscriber_misses_what_was_before,
    a_replay_has_everything_from_a_number_on_and_an_end,
    a_replayed_batch_is_the_live_one,
    a_batch_says_what_was_stored,
)
