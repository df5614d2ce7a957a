"""One HiCache pool on an agent: store, load and look for its pages. Every call is bounded; an agent that is gone is a miss.

Rules: a page is True only if its bytes arrived verified, or are in the agent's memory. What went wrong is counted and logged
once a minute at most, since HiCache asks on behalf of every request. Thread-safe: HiCache reads and writes from two threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import peer_agent
from kvdir.errors import InvalidInput, KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from peer_agent.client.engine import Engine
from peer_agent.connectors.sglang.hits import leading
from peer_agent.connectors.sglang.keys import fingerprints_of
from peer_agent.connectors.sglang.pages import Pages
from peer_agent.connectors.sglang.settings import Settings
from peer_agent.core.effects import BlockState, LoadStatus

logger = logging.getLogger(__name__)

LOOKUP_PAGES = 4096
"""In one question; a prefix is not looked at beyond the first of them that is not all there."""

WORDS_EVERY_S = 60.0
_STORED = frozenset({BlockState.PRESENT, BlockState.BUSY})
"""Busy: another rank or engine is writing the very same page at this moment."""


@dataclass(slots=True)
class Figures:
    """Pages since the start. missed: asked for and not had, for whatever reason."""

    stored: int = 0
    refused: int = 0
    loaded: int = 0
    missed: int = 0


@dataclass(slots=True)
class StoredPool:
    """name: the pool's, in SGLang."""

    name: str
    namespace: Namespace
    pages: Pages
    engine: Engine
    settings: Settings
    figures: Figures = field(default_factory=Figures)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next_words_s: float = 0.0

    @classmethod
    def open(
        cls, name: str, namespace: Namespace, pages: Pages, settings: Settings, *, engine: str, wait: bool = True
    ) -> StoredPool:
        """Waits attach_timeout_s for the agent, and goes on without one: it is attached as soon as it is there.

        wait: not, where another pool has waited in vain.
        """
        made = peer_agent.connect(
            settings.agent, namespace=namespace, engine=engine, deadline_s=settings.deadline_s, timeout_s=0
        )
        pool = cls(name, namespace, pages, made, settings)
        if wait and settings.attach_timeout_s:
            try:
                made.attach(timeout_s=settings.attach_timeout_s)
            except KvdirError as error:
                pool._say(f"without an agent for now, so nothing is found and nothing kept: {error}")
        return pool

    def close(self) -> None:
        self.engine.close()

    def present(self, keys: Sequence[str], *, prefix: bool) -> bytes:
        """One byte per key: 1 if the page is here or said to be at a peer. prefix: what follows a miss may be left 0.

        Where all are in this node's replica of the directory, that costs no call; else the agent is asked, which also knows
        what it has not told anybody yet.
        """
        out = bytearray(len(keys))
        until_s = time.monotonic() + self.settings.exists_deadline_s
        for at in range(0, len(keys), LOOKUP_PAGES):
            asked = fingerprints_of(keys[at : at + LOOKUP_PAGES])
            if self.engine.directory.lookup_here(self.namespace.digest, asked).hits == len(asked):
                out[at : at + len(asked)] = b"\1" * len(asked)
                continue
            result = self.engine.lookup(asked, deadline_s=max(until_s - time.monotonic(), 0.001))
            if result.reason:
                self._say(result.reason)
            here, there = np.frombuffer(result.local, np.uint8), np.frombuffer(result.nominated, np.uint8)
            found = ((here | there) != 0).tobytes()
            out[at : at + len(found)] = found
            if (prefix and leading(found) < len(found)) or time.monotonic() >= until_s:
                break
        return bytes(out)

    def store(self, keys: Sequence[str], starts: Sequence[int]) -> list[bool]:
        """starts: first token slot of each page in the host pool."""

        def some(at: int, end: int, left_s: float) -> list[bool]:
            with self.pages.outgoing(starts[at:end]) as blocks:
                return self._put(fingerprints_of(keys[at:end]), blocks, left_s)

        return self._in_turns(len(keys), some)

    def load(self, keys: Sequence[str], starts: Sequence[int]) -> list[bool]:
        """Into these pages of the host pool."""

        def some(at: int, end: int, left_s: float) -> list[bool]:
            with self.pages.incoming(starts[at:end]) as into:
                got = self._get(fingerprints_of(keys[at:end]), into, left_s)
                self.pages.arrived(starts[at:end], into, [position for position, hit in enumerate(got) if hit])
            return got

        return self._in_turns(len(keys), some)

    def store_values(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        """values: one flat page each."""

        def some(at: int, end: int, left_s: float) -> list[bool]:
            return self._put(fingerprints_of(keys[at:end]), list(values[at:end]), left_s)

        return self._in_turns(len(keys), some)

    def load_values(self, keys: Sequence[str], into: Sequence[Any]) -> list[bool]:
        """into: one flat page each, whose bytes are unspecified where it is not a hit."""

        def some(at: int, end: int, left_s: float) -> list[bool]:
            return self._get(fingerprints_of(keys[at:end]), list(into[at:end]), left_s)

        return self._in_turns(len(keys), some)

    # internals

    def _in_turns(self, count: int, some: Callable[[int, int, float], list[bool]]) -> list[bool]:
        """All pages within one deadline, as many at a time as fit into the scratch memory; what is late is not done."""
        out: list[bool] = []
        until_s = time.monotonic() + self.settings.deadline_s
        while len(out) < count:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            at = len(out)
            try:
                out += some(at, min(at + self.pages.at_once, count), left_s)
            except (ValueError, InvalidInput) as error:
                self._say(str(error))
                break
        return out + [False] * (count - len(out))

    def _put(self, fingerprints: Fingerprints, blocks: Any, left_s: float) -> list[bool]:
        result = self.engine.store(fingerprints, blocks, deadline_s=left_s)
        whole = result.stored == result.states.count(bytes([BlockState.RESERVED]))
        kept = [BlockState(state) in _STORED or (whole and state == BlockState.RESERVED) for state in result.states]
        self._count(stored=sum(kept), refused=len(kept) - sum(kept))
        if result.reason or not all(kept):
            self._say(result.reason or f"no room for {len(kept) - sum(kept)} of {len(kept)} pages: all are locked or pinned")
        return kept

    def _get(self, fingerprints: Fingerprints, into: Any, left_s: float) -> list[bool]:
        result = self.engine.load(fingerprints, into=into, deadline_s=left_s)
        got = [LoadStatus(status).hit for status in result.statuses]
        self._count(loaded=sum(got), missed=len(got) - sum(got))
        if result.reason:
            self._say(result.reason)
        return got

    def _count(self, *, stored: int = 0, refused: int = 0, loaded: int = 0, missed: int = 0) -> None:
        with self._lock:
            self.figures.stored += stored
            self.figures.refused += refused
            self.figures.loaded += loaded
            self.figures.missed += missed

    def _say(self, words: str) -> None:
        """Once in a while: the same trouble meets every request."""
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._next_words_s:
                return
            self._next_words_s = now_s + WORDS_EVERY_S
        logger.warning("kvdir, pool %s: %s", self.name, words)
