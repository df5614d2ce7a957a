"""What the cluster has of a request's blocks, for vLLM's scheduler: asked once for all of its keys, then known.

Rules:
- `look` never waits and never calls anybody. The node's replica answers at once; where it cannot (none, dead, too far behind),
  one thread asks the agent, and until lookup_s is over the answer is WAIT, then MISS. An agent that did not answer is not asked
  again for PAUSE_S; one that is not there costs nothing.
- An answer is a hint. What a load did not bring is MISS for that request for ever, and for others for FAILED_S, so that nobody
  waits in vain twice, and vLLM, which asks again after a failure, ends.
- An answer is asked for anew after FRESH_S: a request may wait for room much longer than that.
Not thread-safe but for the one thread of its own: the scheduler's thread calls everything.
"""

from __future__ import annotations

import enum
import itertools
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvdir.client.replica_reader import ReplicaStatus
from kvdir.core.answer import Lookup
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from peer_agent.client.results import LookupResult
from peer_agent.connectors.vllm.tier_keys import GroupKeys, by_group

log = logging.getLogger("vllm.kvdir")

FRESH_S = 0.25
FAILED_S = 2.0
PAUSE_S = 0.5
MAX_LAG_S = 1.0
FAILED_MOST = 1 << 16

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Verdict(enum.Enum):
    """WAIT: nobody has answered yet; ask again in the next step."""

    MISS = 0
    HIT = 1
    WAIT = 2


class Directory(Protocol):
    """kvdir.client.attached.Attached."""

    @property
    def replica(self) -> ReplicaStatus: ...
    def lookup_here(self, namespace_digest: bytes, fingerprints: Fingerprints, /) -> Lookup: ...


class Session(Protocol):
    """What is needed of peer_agent.client.engine.Engine."""

    @property
    def namespace(self) -> Namespace: ...
    @property
    def directory(self) -> Directory: ...
    @property
    def attached(self) -> bool: ...
    def lookup(self, fingerprints: Fingerprints, /, *, deadline_s: float) -> LookupResult: ...


@dataclass(slots=True)
class _Question:
    """For the thread: keys of one request. answer: set once, before done; None: the agent did not answer."""

    keys: Sequence[bytes]
    parts: Sequence[GroupKeys]
    until_s: float
    answer: Bools | None = None
    done: bool = False


@dataclass(slots=True)
class _Request:
    """asked: how many keys it had when it was answered. held: what is true of most of them, whether somebody is said to hold
    them; exceptions: the others. (Mostly all are held or none, and a set of all keys would cost as much as the lookup.)
    """

    adapter: bytes = b""
    excluded: bool = False
    asked: int = 0
    held: bool = False
    exceptions: set[bytes] = field(default_factory=set)
    failed: set[bytes] = field(default_factory=set)
    fresh_until_s: float = 0.0
    question: _Question | None = None

    def except_failed(self, keys: Iterable[bytes]) -> None:
        """These are not held, whatever was said."""
        if self.held:
            self.exceptions.update(keys)
        else:
            self.exceptions.difference_update(keys)


class Lookups:
    """sessions: one for each KV cache group; keys of other groups are MISS. lookup_s: longest a request waits for an answer."""

    def __init__(self, sessions: Mapping[int, Session], *, lookup_s: float) -> None:
        self._sessions = sessions
        self._digests = {group: session.namespace.digest for group, session in sessions.items()}
        self._lookup_s = lookup_s
        self._requests: dict[str, _Request] = {}
        self._failed: OrderedDict[bytes, float] = OrderedDict()  # in the order in which they end
        self._paused_until_s = 0.0
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer_all, name="kvdir-lookups", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, not the sessions. Idempotent."""
        self._questions.put(None)
        self._thread.join()

    def describe(self, request_id: str, *, adapter: bytes = b"", excluded: bool = False) -> None:
        """What is known of a request before its first look. excluded: it shares nothing."""
        self._requests[request_id] = _Request(adapter, excluded)

    def adapter(self, request_id: str) -> bytes:
        request = self._requests.get(request_id)
        return request.adapter if request is not None else b""

    def excluded(self, request_id: str) -> bool:
        request = self._requests.get(request_id)
        return request is not None and request.excluded

    def look(self, request_id: str, key: bytes, keys: Collection[bytes]) -> Verdict:
        """Whether the block is somewhere. keys: all of the request, this one among them; they may become more."""
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request()
        now_s = time.monotonic()
        if request.question is not None and not self._settled(request, now_s):
            return Verdict.WAIT
        if now_s >= request.fresh_until_s or request.asked != len(keys):
            if request.excluded:
                return Verdict.MISS
            self._ask(request, keys, now_s)
            if request.question is not None:
                return Verdict.WAIT
        return Verdict.HIT if (key in request.exceptions) != request.held else Verdict.MISS

    def failed(self, request_id: str, keys: Collection[bytes]) -> None:
        """A load did not bring these."""
        until_s = time.monotonic() + FAILED_S
        if len(self._failed) > FAILED_MOST:
            self._failed.clear()
        request = self._requests.get(request_id)
        for key in keys:
            self._failed[key] = until_s
            self._failed.move_to_end(key)
        if request is not None:
            request.failed.update(keys)
            request.except_failed(request.failed)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def _ask(self, request: _Request, keys: Collection[bytes], now_s: float) -> None:
        """Answers the request, or leaves a question open."""
        parts = by_group(keys, adapter=request.adapter)
        held = np.zeros(len(keys), np.bool_)
        for part in parts:
            here = self._from_replica(part)
            if here is None:
                break
            held[part.positions] = here
        else:
            self._answer(request, keys, held, now_s)
            return
        if now_s < self._paused_until_s or not all(session.attached for session in self._sessions.values()):
            self._answer(request, keys, None, now_s)
            return
        request.question = _Question(list(keys), parts, now_s + self._lookup_s)
        self._questions.put(request.question)

    def _settled(self, request: _Request, now_s: float) -> bool:
        """Whether the open question has been answered, or given up."""
        question = request.question
        assert question is not None
        if not question.done and now_s < question.until_s:
            return False
        if question.answer is None:
            self._paused_until_s = now_s + PAUSE_S
        request.question = None
        self._answer(request, question.keys, question.answer, now_s)
        return True

    def _answer(self, request: _Request, keys: Collection[bytes], held: Bools | None, now_s: float) -> None:
        """held: whether somebody has each of the keys; None: nobody said."""
        request.asked, request.fresh_until_s = len(keys), now_s + FRESH_S
        count = 0 if held is None else int(np.count_nonzero(held))
        request.held = 2 * count > len(keys)
        others = np.zeros(0, np.bool_) if held is None or count in (0, len(keys)) else held != request.held
        request.exceptions = set(itertools.compress(keys, others.tolist()))
        request.except_failed(request.failed)
        while self._failed and next(iter(self._failed.values())) <= now_s:
            self._failed.popitem(last=False)
        if self._failed:
            request.except_failed(filter(self._failed.__contains__, keys))

    def _from_replica(self, part: GroupKeys) -> Bools | None:
        """None: it cannot say. A namespace that is not in a live replica has no blocks anywhere yet."""
        session = self._sessions.get(part.group)
        if session is None:
            return np.zeros(len(part.positions), np.bool_)
        answer = session.directory.lookup_here(self._digests[part.group], part.fingerprints)
        if answer.source == "replica":
            return hits(answer) if answer.lag_s <= MAX_LAG_S else None
        status = session.directory.replica
        return np.zeros(answer.asked, np.bool_) if status.usable and status.lag_s <= MAX_LAG_S else None

    def _answer_all(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                question.answer = self._from_agent(question)
            except Exception as error:  # else nobody would ever be answered again
                log.error("kvdir: a lookup of %d blocks failed", len(question.keys), exc_info=error)
            finally:
                question.done = True

    def _from_agent(self, question: _Question) -> Bools | None:
        held = np.zeros(len(question.keys), np.bool_)
        for part in question.parts:
            session = self._sessions.get(part.group)
            left_s = question.until_s - time.monotonic()
            if left_s <= 0:
                return None
            if session is not None:
                answer = session.lookup(part.fingerprints, deadline_s=left_s)
                if answer.reason:
                    return None
                local, nominated = np.frombuffer(answer.local, np.uint8), np.frombuffer(answer.nominated, np.uint8)
                held[part.positions] = (local | nominated) > 0
        return held


def hits(answer: Lookup) -> Bools:
    """One bool for each position asked: whether somebody is said to hold it."""
    held = np.zeros(answer.asked, np.bool_)
    for start, count, _ in np.frombuffer(answer.runs, "<u4").reshape(-1, 3).tolist():
        held[start : start + count] = True
    return held
