"""The cursor against a publisher that loses what real ones lose: never a wrong order, never a loss without a doubt.

The publisher is the oracle: it knows every batch of its present life. Once nothing is lost any more and the cursor was given
time, either everything of that life was delivered once and in order, or the cursor doubts.
"""

from __future__ import annotations

import itertools
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdir.engines import END_SEQ, AskReplay, Deliver, Doubt, EngineCursor, Lost, NewLife

PROBE_S, PATIENCE_S = 5.0, 1.0


class Engine:
    """ZMQ publisher and its replay ring, as vLLM's: sequence from 0 in every life, the ring forgets, sends are lossy."""

    def __init__(self, *, ring: int) -> None:
        self.ring = ring
        self.life = 0
        self.begin()

    def begin(self) -> None:
        self.life += 1
        self.batches: list[bytes] = []
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=self.ring)

    def publish(self) -> tuple[int, bytes]:
        seq = len(self.batches)
        payload = f"life {self.life} batch {seq}".encode()
        self.batches.append(payload)
        self.kept.append((seq, payload))
        return seq, payload

    def replay(self, first_seq: int) -> list[tuple[int, bytes]]:
        return [item for item in self.kept if item[0] >= first_seq]


class Reader:
    """A cursor and what its effects amount to."""

    def __init__(self, *, replay: bool, ring: int = 1000) -> None:
        self.engine = Engine(ring=ring)
        self.cursor = EngineCursor(replay=replay, probe_s=PROBE_S, patience_s=PATIENCE_S, max_held_batches=4)
        self.now_s = 0.0
        self.got: list[bytes] = []
        self.doubt = ""
        self.asked: AskReplay | None = None
        self.take(self.cursor.start(self.now_s))

    def take(self, effects: list[object]) -> None:
        for effect in effects:
            match effect:
                case Deliver(seq, payload):
                    assert not self.got or number(self.got[-1]) < seq, "order"
                    one_life = not self.got or life(self.got[-1]) == life(payload)
                    assert one_life or self.cursor.doubt, "lives are told apart"
                    assert number(payload) == seq
                    self.got.append(payload)
                case NewLife():
                    self.got = []
                case Doubt(reason):
                    self.doubt = reason
                case Lost(first, last):
                    assert first <= last
                case AskReplay():
                    self.asked = effect
        assert self.doubt == self.cursor.doubt

    def live(self, seq: int, payload: bytes) -> None:
        self.take(self.cursor.live(seq, payload, self.now_s))

    def answer(self, *, drop: frozenset[int] = frozenset()) -> None:
        """The replay that was asked for, without the answers at positions in `drop`."""
        asked, self.asked = self.asked, None
        if asked is None:
            return
        for position, (seq, payload) in enumerate(self.engine.replay(asked.first_seq)):
            if position not in drop:
                self.take(self.cursor.replayed(asked.request_id, seq, payload, self.now_s))
        self.take(self.cursor.replayed(asked.request_id, END_SEQ, b"", self.now_s))

    def settle(self) -> None:
        """Nothing is lost from here on, and there is time."""
        for _ in range(4):
            for _ in range(12):
                self.answer()
            assert self.asked is None, "asking comes to an end"
            self.now_s += PROBE_S
            self.take(self.cursor.tick(self.now_s))
        self.answer()

    def check(self) -> None:
        whole = self.got == self.engine.batches
        assert whole or self.doubt, (self.got, self.engine.batches)


def number(payload: bytes) -> int:
    return int(payload.split()[-1])


def life(payload: bytes) -> int:
    return int(payload.split()[1])


STEPS = ("send", "lose", "restart", "answer", "cut", "reconnect", "late")


def step(reader: Reader, what: str) -> None:
    match what:
        case "send":
            reader.live(*reader.engine.publish())
        case "lose":
            reader.engine.publish()
        case "restart":  # the connection breaks; whatever the new life says before that is noticed is lost
            reader.engine.begin()
            reader.engine.publish()
            reader.take(reader.cursor.reconnected(reader.now_s))
        case "answer":
            reader.answer()
        case "cut":
            reader.answer(drop=frozenset({1, 2}))
        case "reconnect":
            reader.engine.publish()
            reader.take(reader.cursor.reconnected(reader.now_s))
        case "late":
            reader.now_s += PATIENCE_S
            reader.take(reader.cursor.tick(reader.now_s))


def test_every_loss_is_repaired_or_doubted_when_histories_are_short() -> None:
    for steps in itertools.product(STEPS, repeat=5):
        for ring in (1000, 2):
            reader = Reader(replay=True, ring=ring)
            for what in steps:
                step(reader, what)
            reader.settle()
            reader.check()
            if ring == 1000 and "late" not in steps:
                assert not reader.doubt, steps


def test_every_loss_is_doubted_when_there_is_no_replay() -> None:
    for steps in itertools.product(("send", "lose", "restart", "reconnect"), repeat=5):
        reader = Reader(replay=False)
        for what in steps:
            step(reader, what)
        reader.live(*reader.engine.publish())  # the end of a stream is not seen before something comes after it
        reader.check()
        if set(steps) == {"send"}:
            assert not reader.doubt


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.sampled_from(STEPS), max_size=60),
    ring=st.sampled_from([1, 3, 8, 1000]),
    replay=st.booleans(),
)
def test_every_loss_is_repaired_or_doubted_when_histories_are_long(steps: list[str], ring: int, replay: bool) -> None:
    reader = Reader(replay=replay, ring=ring)
    for what in steps:
        step(reader, what)
    if replay:
        reader.settle()
    elif reader.engine.batches:
        reader.live(*reader.engine.publish())
    reader.check()
