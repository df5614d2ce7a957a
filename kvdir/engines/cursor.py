"""The cursor of an engine's own numbering: delivers batches once and in order, repairs holes by replay, and says what is lost.

    delivered ... | next_seq .. hole .. | held (live, waiting) ...
            anchor^                                  engine: PUB (lossy, no end) + ROUTER (its last batches, then an end marker)

What an engine's stream does not say, and how it is found out:
- restart: numbers begin at 0 again and there is no incarnation id. A live number that is not above the last live one, or a
  batch replayed under a number that we have with other content, is a new life. Whenever numbers jump or the connection was
  broken, the replay is asked from the last delivered batch (the anchor) on, so that its content is compared first.
- a replay drops silently: holes inside it are asked for again; what it begins behind is gone from the engine's ring.
- the end of a silent stream may be lost: an idle stream is asked for its replay from the anchor on, at intervals.
- without a replay socket none of this can be repaired: every hole and every broken connection is a doubt.

`doubt` says in words why what was delivered may not be all; empty: it is. What was lost stays in doubt until the engine clears
its cache (`cleared`) or begins a new life. Pure: time comes in, effects come out; payloads are opaque. Bounded: batches that
find no room while waiting are a hole again. Sources: facts of vLLM 0.32 and SGLang 0.5.23, docs/engines/events.md.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

from kvdir.engines.effects import AskReplay, CursorEffect, Deliver, Doubt, Lost, NewLife
from kvdir.engines.waiting import Waiting
from kvdir.engines.wire import END_SEQ

MAX_ASKS = 3
"""Replays of one hole without progress before it is lost; probes without an answer before that is a doubt."""
MAX_SEQ = 1 << 62
MAX_AHEAD = 65_536
FLAP_LIVES, FLAP_S = 4, 10.0
"""So many lives in so short a time are not one engine that restarts."""
LONG_REPLAY_BATCHES = 256
"""A replay that brought so many may have lost its end (vLLM's ROUTER drops above 1,000, silently): ask once more."""


@dataclass(slots=True)
class _Asking:
    request_id: int
    anchor: int | None
    anchor_payload: bytes
    next_seq: int
    deadline_s: float
    survey: bool = False
    answers: int = 0
    taken: int = 0


class EngineCursor:
    """See the module docstring. replay: the engine has a replay socket.

    patience_s: a replay that says nothing for so long has failed. probe_s: silence after which the end is asked for.
    Figures: lives (1 at the start), duplicates, lost_batches, replays, unanswered (replays in a row).
    """

    def __init__(
        self,
        *,
        replay: bool,
        patience_s: float = 2.0,
        probe_s: float = 5.0,
        max_held_batches: int = 4096,
        max_held_bytes: int = 64 * 2**20,
    ) -> None:
        self._replay = replay
        self._patience_s = patience_s
        self._probe_s = probe_s
        self._held = Waiting(max_batches=max_held_batches, max_bytes=max_held_bytes)
        self._request_id = 0
        self._heard_s = 0.0
        self._said = ""
        self._effects: list[CursorEffect] = []
        self._ring_seen = False
        self._births: deque[float] = deque(maxlen=FLAP_LIVES)
        self._flaps = False
        self.lives = 0
        self.duplicates = 0
        self.lost_batches = 0
        self.replays = 0
        self.unanswered = 0
        self._begin_life()

    def _begin_life(self) -> None:
        self.lives += 1
        self.next_seq = 0
        self._joined = False
        self._last_live = -1
        self._last_live_payload = b""
        self._last_seq, self._last_payload = -1, b""
        self._ahead: dict[int, bytes] = {}
        self._held.clear()
        self._lost = ""
        self._lost_seq = -1
        self._suspect = False
        self._asking: _Asking | None = None
        self._attempts = 0
        self._empty = 0

    @property
    def doubt(self) -> str:
        """Why what was delivered may not be all that the engine said; empty if it is."""
        if self._flaps:
            return f"the engine began anew {FLAP_LIVES} times within {FLAP_S:g} s: do two engines publish to this endpoint?"
        if self._lost:
            return self._lost
        if not self._joined:
            return "what the engine holds from before is not known yet"
        if self._held or self._suspect:
            return f"batches from {self.next_seq} on are missing and were asked for again"
        if self.unanswered >= MAX_ASKS:
            return f"the replay socket did not answer {self.unanswered} times: a loss at the end would not be seen"
        return ""

    @property
    def lost(self) -> str:
        """What of this life is lost for good, in words, until the engine clears its cache; empty: nothing."""
        return self._lost

    @property
    def held_batches(self) -> int:
        """Live ones that wait for what is missing before them."""
        return len(self._held)

    @property
    def wake_s(self) -> float | None:
        """When `tick` has something to do; None: only when something comes in."""
        due = [self._births[-1] + FLAP_S] if self._flaps else []
        if self._asking is not None:
            due.append(self._asking.deadline_s)
        elif self._replay:
            due.append(self._heard_s + self._probe_s)
        return min(due, default=None)

    def start(self, now_s: float) -> list[CursorEffect]:
        """Connected for the first time."""
        self._heard_s = now_s
        if self._replay:
            self._ask(now_s)
        return self._done()

    def reconnected(self, now_s: float) -> list[CursorEffect]:
        """The connection had been broken: it may be another life, and batches may be missing."""
        if self._replay:
            self._held.clear()  # of whichever life: the replay brings them again
            self._suspect = self._joined
            self._ask(now_s)
        elif self._joined:
            self._lose("the connection was broken, and without a replay socket nobody knows what was said meanwhile")
        return self._done()

    def live(self, seq: int, payload: bytes, now_s: float) -> list[CursorEffect]:
        """A batch from the live socket."""
        self._heard_s = now_s
        if seq > MAX_SEQ:
            self._lose(f"a batch came with the number {seq}, which no engine reaches")
        elif seq <= self._last_live:
            if seq == self._last_live and payload == self._last_live_payload:
                self.duplicates += 1
            else:
                self._new_life(f"numbers began again: {seq} came after {self._last_live}", now_s)
                self._follow(seq, payload, now_s)
        elif seq < self.next_seq:
            self._check_ahead(seq, payload, now_s)
        else:
            self._follow(seq, payload, now_s)
        return self._done()

    def replayed(self, request_id: int, seq: int, payload: bytes, now_s: float) -> list[CursorEffect]:
        """An answer to AskReplay, or its end marker (seq END_SEQ). Answers to an older request are ignored."""
        asking = self._asking
        if asking is None or asking.request_id != request_id:
            return []
        self._heard_s, self.unanswered = now_s, 0
        asking.deadline_s = now_s + self._patience_s
        if seq == END_SEQ:
            self._ended(asking, now_s)
            return self._done()
        asking.answers += 1
        if asking.answers > 1 or self._first_answer(asking, seq, payload, now_s):
            self._take(asking, seq, payload)
        self._ring_seen = True
        return self._done()

    def failed(self, request_id: int, now_s: float) -> list[CursorEffect]:
        """The replay could not be asked for, or its connection broke: as if its deadline had passed."""
        if self._asking is not None and self._asking.request_id == request_id:
            self._expired(now_s)
        return self._done()

    def tick(self, now_s: float) -> list[CursorEffect]:
        """Deadlines and probes. Call it no later than `wake_s`."""
        self._flaps = self._flaps and now_s < self._births[-1] + FLAP_S
        if self._asking is not None and now_s >= self._asking.deadline_s:
            self._expired(now_s)
        if self._asking is None and self._replay and now_s >= self._heard_s + self._probe_s:
            self._heard_s = now_s
            self._ask(now_s)
        return self._done()

    def uncertain(self, seq: int, reason: str) -> list[CursorEffect]:
        """A delivered batch could not be taken as a whole, in words."""
        self._lose(reason, seq)
        return self._done()

    def cleared(self, seq: int) -> list[CursorEffect]:
        """A delivered batch left the engine with nothing: what was lost before it does not matter any more."""
        if seq > self._lost_seq:
            self._lost, self._joined = "", True
        return self._done()

    def _follow(self, seq: int, payload: bytes, now_s: float) -> None:
        """A live batch that is not below next_seq."""
        self._last_live, self._last_live_payload = seq, payload
        if seq == 0 and self.next_seq == 0:
            self._joined, self._lost = True, ""
        if not self._replay:
            if seq > self.next_seq:
                self._skip(seq, "without a replay socket they cannot be asked for")
            self._joined = True
            self._deliver(seq, payload)
            return
        if seq == self.next_seq and self._joined and not self._suspect and not self._held:
            self._deliver(seq, payload)
            return
        self._held.add(seq, payload)
        if self._asking is None:
            self._suspect = self._joined
            self._ask(now_s)

    def _check_ahead(self, seq: int, payload: bytes, now_s: float) -> None:
        """A live batch of which the replay was quicker: the same, unless this is another life."""
        known = self._ahead.pop(seq, None)
        if known is not None and known != _digest(payload):
            self._new_life(f"number {seq} came with other content than before", now_s)
            self._follow(seq, payload, now_s)
            return
        self.duplicates += 1
        self._last_live, self._last_live_payload = seq, payload

    def _first_answer(self, asking: _Asking, seq: int, payload: bytes, now_s: float) -> bool:
        """Compares the anchor, and sees where the engine's ring begins. Whether the answer is to be taken as a batch."""
        self._empty = 0
        if asking.survey:
            self._began_anew(asking, now_s)
        if asking.anchor is not None and seq == asking.anchor:
            if payload != asking.anchor_payload:
                self._new_life(f"number {seq} was replayed with other content than before", now_s)
                self._ask(now_s)
                return False
            self._suspect = False
            self._drain()
            return False
        if asking.next_seq == 0 and seq == 0:
            self._lost = ""
        if seq > asking.next_seq or (asking.anchor is not None and self._suspect):
            if seq > self.next_seq:
                self._skip(seq, f"the engine's replay reaches back to {seq} only")
            else:
                self._lose(f"whether the engine restarted is not known: its replay reaches back to {seq} only")
        self._suspect, self._joined = False, True
        return True

    def _take(self, asking: _Asking, seq: int, payload: bytes) -> None:
        """A replayed batch."""
        if seq < self.next_seq:
            self.duplicates += 1
            return
        self._joined = True
        if seq > self.next_seq:
            self._held.add(seq, payload)
            return
        asking.taken += 1
        self._deliver(seq, payload)
        self._drain()

    def _ended(self, asking: _Asking, now_s: float) -> None:
        self._asking = None
        if not asking.answers and (asking.anchor is not None or asking.survey) and self._nothing_there(asking, now_s):
            return
        self._joined, self._suspect = True, False
        self._drain()
        self._attempts = 0 if self.next_seq > asking.next_seq else self._attempts + 1
        if not self._held:
            self._attempts = 0
            if asking.taken >= LONG_REPLAY_BATCHES:
                self._suspect = True
                self._ask(now_s)
            return
        if self._attempts >= MAX_ASKS:
            self._attempts = 0
            self._skip(self._held.first_seq, f"{MAX_ASKS} replays did not bring them")
            self._drain()
        if self._held:
            self._ask(now_s)

    def _began_anew(self, asking: _Asking, now_s: float) -> None:
        """A survey is answered after the anchor was not known twice: all that the engine has is older, so of a new life."""
        self._new_life(f"the engine's replay does not know number {asking.next_seq - 1}, but older ones", now_s)
        self._asking, asking.next_seq = asking, 0

    def _nothing_there(self, asking: _Asking, now_s: float) -> bool:
        """The engine has neither the anchor nor anything after it. Once may be an accident; twice: see what it has at all."""
        if not asking.survey:
            self._empty += 1
            self._ask(now_s, survey=self._empty >= 2)
            return True
        self._empty = 0
        if self._ring_seen:  # in one life the ring never becomes empty again
            self._new_life("the engine's replay became empty", now_s)
        else:
            self._lose("the engine's replay is empty though it said something, no loss can be seen: set buffer_steps above 0")
        return False

    def _expired(self, now_s: float) -> None:
        """The replay under way is given up."""
        self._asking = None
        self.unanswered += 1
        if self._joined and not self._held and not self._suspect:
            return
        self._attempts += 1
        if self._attempts < MAX_ASKS:
            self._ask(now_s)
            return
        self._attempts = 0
        if self._held:
            self._skip(self._held.first_seq, "the replay socket does not answer")
        else:
            self._lose("the replay socket does not answer: what was said before is not known")
        self._joined, self._suspect = True, False
        self._drain()
        if self._held:
            self._ask(now_s)

    def _ask(self, now_s: float, *, survey: bool = False) -> None:
        """Asks from the anchor on; survey: from 0 on, because the engine knows nothing of the anchor."""
        self._request_id += 1
        self.replays += 1
        anchor = self._last_seq if self._last_seq >= 0 and self._last_seq == self.next_seq - 1 and not survey else None
        first_seq = 0 if survey else self.next_seq if anchor is None else anchor
        self._asking = _Asking(
            self._request_id, anchor, self._last_payload, self.next_seq, now_s + self._patience_s, survey=survey
        )
        self._effects.append(AskReplay(self._request_id, first_seq))

    def _new_life(self, reason: str, now_s: float) -> None:
        self._begin_life()
        self._births.append(now_s)
        self._flaps = len(self._births) == FLAP_LIVES and now_s - self._births[0] < FLAP_S
        self._effects.append(NewLife(reason))

    def _deliver(self, seq: int, payload: bytes) -> None:
        self.next_seq = seq + 1
        self._last_seq, self._last_payload = seq, payload
        if seq > self._last_live:
            self._ahead[seq] = _digest(payload)
            if len(self._ahead) > MAX_AHEAD:
                del self._ahead[next(iter(self._ahead))]
        self._effects.append(Deliver(seq, payload))

    def _drain(self) -> None:
        if self._suspect:
            return
        while (payload := self._held.take(self.next_seq)) is not None:
            self._deliver(self.next_seq, payload)
        self._held.drop_below(self.next_seq)

    def _skip(self, to_seq: int, why: str) -> None:
        """Goes on behind a hole that cannot be repaired."""
        first, last = self.next_seq, to_seq - 1
        self.next_seq = to_seq
        self.lost_batches += last - first + 1
        self._effects.append(Lost(first, last))
        self._lose(f"batches {first} to {last} are lost: {why}", last)

    def _lose(self, reason: str, seq: int | None = None) -> None:
        self._lost = reason
        self._lost_seq = max(self._lost_seq, self.next_seq - 1 if seq is None else seq)

    def _done(self) -> list[CursorEffect]:
        if self.doubt != self._said:
            self._said = self.doubt
            self._effects.append(Doubt(self._said))
        effects, self._effects = self._effects, []
        return effects


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=8).digest()
