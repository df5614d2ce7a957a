"""What an agent and its mover tell each other: one message a datagram over a SOCK_SEQPACKET pair, msgpack arrays.

    agent                                   mover
      | Open ------------------------------> |   once; answered by Opened or Refused
      | Ping, Connect, Forget, Call -------> |   answered by Reply
      | Read ------------------------------> |   answered by Done, or by Late and then Settled
      | Abort -----------------------------> |   makes that Read late now

Rules:
- Every question but Open has a ticket of the agent's; the answer carries it. Late means: unanswered by its deadline, and
  something may still write to its destinations until Settled (or until the mover is dead and reaped).
- Blocks travel packed, as in ReadList; a longer list is several messages. Nothing exceeds MAX_MESSAGE_BYTES.
- Deadlines are absolute, CLOCK_MONOTONIC nanoseconds; both sides have the same clock.
- What does not decode is a bug of the other side: the mover ends, or is ended.

Does not: send or receive (child.py and main.py do).
"""

from __future__ import annotations

import enum

import msgspec

MAX_MESSAGE_BYTES = 128 << 10
MAX_READ_BLOCKS = 1024
"""Blocks of one Read: at most 72 bytes each, fingerprints included."""
MAX_BODY_BYTES = 96 << 10
MAX_READS = 256
"""Reads that a mover serves at once, so many that a few silent peers cannot hold them all; more of them wait. Each has
MAX_READ_BLOCKS headers of scratch memory, 32 MiB in all, which the system provides when they are first used (with RDMA, when
they are registered)."""

PENDING = 255
"""In place of a ReadStatus: not decided (csrc/gets.hpp kPending)."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages; `tag` is the type's number on the wire."""


class Open(Message, frozen=True, tag=1):
    """arena_fd: inherited. backend: a name of backends.py. settings: the backend's."""

    backend: str
    settings: dict[str, str]
    arena_fd: int
    arena_bytes: int


class Ping(Message, frozen=True, tag=2):
    ticket: int


class Connect(Message, frozen=True, tag=3):
    """Makes `peer` (a number of the agent's choice) known and connects it. Body of the Reply: the lanes, comma separated."""

    ticket: int
    peer: int
    incarnation: bytes
    arena_bytes: int
    descriptor: bytes
    deadline_ns: int


class Forget(Message, frozen=True, tag=4):
    """Closes the peer's link; its reads end as lost. Replied to when nothing of them writes any more."""

    ticket: int
    peer: int


class Read(Message, frozen=True, tag=5):
    """One ReadList, or a part of it."""

    ticket: int
    peer: int
    deadline_ns: int
    namespace_digest: bytes
    fingerprints: bytes
    width: int
    records: bytes
    destinations: bytes

    def under(self, ticket: int) -> Read:
        """The same Read with a ticket."""
        return msgspec.structs.replace(self, ticket=ticket)

    def part(self, blocks: slice) -> Read:
        """The same Read of these blocks only; beyond the end there are none."""

        def cut(packed: bytes, width: int) -> bytes:
            return packed[blocks.start * width : blocks.stop * width]

        fingerprints = cut(self.fingerprints, self.width)
        return msgspec.structs.replace(
            self, fingerprints=fingerprints, records=cut(self.records, 32), destinations=cut(self.destinations, 8)
        )


class Abort(Message, frozen=True, tag=6):
    """ticket: the Read's."""

    ticket: int


class Call(Message, frozen=True, tag=7):
    """For a Service."""

    ticket: int
    method: str
    body: bytes
    deadline_ns: int


class Opened(Message, frozen=True, tag=16):
    incarnation: bytes
    descriptor: bytes
    about: dict[str, str]


class Refused(Message, frozen=True, tag=17):
    """The backend cannot work here; the mover ends."""

    faults: list[str]


class Failure(enum.IntEnum):
    NONE = 0
    CONNECTION = 1  # ConnectionError
    VALUE = 2  # ValueError
    LATE = 3  # TimeoutError
    OS = 4  # OSError


class Reply(Message, frozen=True, tag=18):
    """failure, reason: the exception that the question ended with. body: what Connect and Call answer."""

    ticket: int
    failure: Failure = Failure.NONE
    reason: str = ""
    body: bytes = b""


class Done(Message, frozen=True, tag=19):
    """statuses: one ReadStatus a block. Nothing writes to the destinations any more."""

    ticket: int
    statuses: bytes


class Late(Message, frozen=True, tag=20):
    """statuses: as in Done, PENDING for blocks that are not decided; what is decided is not written any more."""

    ticket: int
    statuses: bytes


class Settled(Message, frozen=True, tag=21):
    ticket: int


Question = Open | Ping | Connect | Forget | Read | Abort | Call
Answer = Opened | Refused | Reply | Done | Late | Settled

_encoder = msgspec.msgpack.Encoder()
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    """ValueError beyond MAX_MESSAGE_BYTES."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} fit a message")
    return data


def decode_question(data: bytes) -> Question:
    """msgspec.DecodeError for anything that is none."""
    return _questions.decode(data)


def decode_answer(data: bytes) -> Answer:
    """msgspec.DecodeError for anything that is none."""
    return _answers.decode(data)
