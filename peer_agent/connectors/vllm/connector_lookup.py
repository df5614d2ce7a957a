"""Who has what, for the scheduler half: from the node's replica at once, else asked of the agent in the background.

Rules:
- `ask` never waits and never calls anybody: where the replica cannot answer, one thread asks the agent, and until its deadline
  (a few milliseconds) the answer is "not yet", then "nothing".
- A block counts only if every part of a parallel split is there: a rank that lacks its part could not go on.
- An agent that does not answer costs one question its deadline; for PAUSE_S then nobody is asked. An agent that is not there
  costs nothing.
Bounded: one question per request, `QUESTIONS_MOST` at once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdir.core.restore_points import Bools, intersection
from kvdir.fingerprint import Fingerprints
from peer_agent.client.engine import Engine
from peer_agent.connectors.vllm.tier_lookup import hits

log = logging.getLogger(__name__)

PAUSE_S = 0.5
QUESTIONS_MOST = 256


@dataclass(slots=True)
class _Question:
    """answer: set by the thread, once."""

    wanted: tuple[Fingerprints, ...]
    until_s: float
    answer: list[Bools] | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Lookups:
    """engines: per group, the sessions of its parts (one where all ranks hold the same). deadline_s: of a question."""

    def __init__(self, engines: Sequence[Sequence[Engine]], *, deadline_s: float) -> None:
        self._engines = engines
        self._digests = [[engine.namespace.digest for engine in parts] for parts in engines]
        self._deadline_s = deadline_s
        self._questions: dict[str, _Question] = {}
        self._waiting: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._paused_until_s = 0.0
        self._thread = threading.Thread(target=self._answer_all, name="kvdir-lookups", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent; ends the thread, not the sessions."""
        self._waiting.put(None)
        self._thread.join()

    def ask(self, request_id: str, wanted: Sequence[Fingerprints]) -> list[Bools] | None:
        """See connector_scheduler.Directory."""
        asked = self._questions.get(request_id)
        if asked is not None and asked.wanted == tuple(wanted):
            return self._waited(request_id, asked)
        found = self._from_replica(wanted)
        if found is not None:
            return found
        now_s = time.monotonic()
        if now_s < self._paused_until_s or len(self._questions) >= QUESTIONS_MOST or not self._engines[0][0].attached:
            return _nothing(wanted)
        question = self._questions[request_id] = _Question(tuple(wanted), now_s + self._deadline_s)
        self._waiting.put(question)
        return None

    def forget(self, request_id: str) -> None:
        self._questions.pop(request_id, None)

    def _waited(self, request_id: str, question: _Question) -> list[Bools] | None:
        if question.done.is_set():
            del self._questions[request_id]
            return question.answer if question.answer is not None else _nothing(question.wanted)
        now_s = time.monotonic()
        if now_s < question.until_s:
            return None
        del self._questions[request_id]
        self._paused_until_s = now_s + PAUSE_S
        return _nothing(question.wanted)

    def _from_replica(self, wanted: Sequence[Fingerprints]) -> list[Bools] | None:
        """None when the node has no replica that can be used now. A namespace that is not in it is nobody's yet."""
        directory = self._engines[0][0].directory
        if not directory.replica.usable:
            return None
        found = []
        for fingerprints, digests in zip(wanted, self._digests, strict=True):
            answers = [directory.lookup_here(digest, fingerprints) for digest in digests]
            found.append(intersection([hits(answer) for answer in answers]))
        return found

    def _answer_all(self) -> None:
        while (question := self._waiting.get()) is not None:
            try:
                question.answer = self._from_agent(question)
            except Exception:  # the thread goes on: others want answers, too
                log.exception("lookup failed; its request computes everything")
            finally:
                question.done.set()

    def _from_agent(self, question: _Question) -> list[Bools] | None:
        found = []
        for fingerprints, parts in zip(question.wanted, self._engines, strict=True):
            held = []
            for engine in parts:
                left_s = question.until_s - time.monotonic()
                if left_s <= 0:
                    return None
                answer = engine.lookup(fingerprints, deadline_s=left_s)
                held.append(np.frombuffer(answer.local, np.bool_) | (np.frombuffer(answer.nominated, np.uint8) > 0))
            found.append(intersection(held))
        return found


def _nothing(wanted: Sequence[Fingerprints]) -> list[Bools]:
    return [np.zeros(len(fingerprints), np.bool_) for fingerprints in wanted]
