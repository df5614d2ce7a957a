"""Asking owners which blocks they hold, and letting them know what follows from it: stale claims, locks that have ended.

Rules: an owner that turns out to have been restarted is asked once more; what it lacks although the directory named it is
reported to the directory in the background; an Unlock travels with the next Lock, or alone after a moment (peer.py).
Does not: choose owners (peer_agent/core/plan.py) or read blocks (fetch.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdir.errors import KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.obs.logs import say
from peer_agent.core.orders import Ask
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.server.load import Directory, Load, ReaderCounters
from peer_agent.server.peer import LockAnswer, Peer, PeerFailure
from peer_agent.server.peers import Peers
from peer_agent.server.tasks import OwnedTasks

log = logging.getLogger(__name__)

LEASE_MARGIN_S = 1.0
"""A peer's lock outlives our deadline by this, so that it never ends before a read that is in time."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An owner's answer to an ask, readable under `answer.lock`. records: BLOCK_RECORD by position of the load."""

    ask: Ask
    peer: Peer
    answer: LockAnswer
    records: np.ndarray[Any, Any]

    @classmethod
    def of(cls, ask: Ask, peer: Peer, answer: LockAnswer, *, count: int) -> Source:
        """count: blocks of the whole load."""
        records = np.zeros(count, BLOCK_RECORD)
        records[list(ask.positions)] = np.frombuffer(answer.records, BLOCK_RECORD)
        return cls(ask, peer, answer, records)

    def held(self, block_bytes: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Positions that the owner says it holds: (with the right length, with another one)."""
        present, right = self.records["state"] == 1, self.records["length"] == block_bytes
        return np.flatnonzero(present & right), np.flatnonzero(present & ~right)


class Owners:
    """See the module docstring. directory None: nothing is reported."""

    def __init__(
        self,
        peers: Peers,
        directory: Directory | None,
        counters: ReaderCounters,
        *,
        node: str,
        clock: Callable[[], float],
        tasks: OwnedTasks,
    ) -> None:
        self.directory = directory
        self._peers = peers
        self._counters = counters
        self._node = node
        self._clock = clock
        self._tasks = tasks

    async def ask(self, load: Load, ask: Ask) -> Source:
        """The owner's answer. Raises PeerFailure, by ask.until_s."""
        asked = load.fingerprints.select(ask.positions)
        for _ in range(2):
            peer = await self._peers.reach(ask.node, timeout_s=ask.until_s - self._clock())
            try:
                answer = await self._lock(load, ask, peer, asked)
            except PeerFailure as failure:
                if not failure.restarted:
                    raise
                continue
            return Source.of(ask, peer, answer, count=len(load.fingerprints))
        raise PeerFailure(f"{ask.node.node} keeps restarting")

    async def _lock(self, load: Load, ask: Ask, peer: Peer, asked: Fingerprints) -> LockAnswer:
        began_s = self._clock()
        self._counters.tally.locks += 1
        try:
            answer = await peer.lock(
                load.namespace_digest,
                asked,
                reader=self._node,
                lease_s=load.until_s - began_s + LEASE_MARGIN_S,
                timeout_s=ask.until_s - began_s,
            )
        except PeerFailure as failure:
            if failure.late:
                self._peers.late(peer, waited_s=self._clock() - began_s)
            elif peer.broken and not failure.restarted:  # a successor answers there: no reason to pause
                self._peers.failed(peer)
            raise
        self._peers.answered(peer, took_s=self._clock() - began_s)
        return answer

    def report_stale(self, load: Load, source: Source, stale: Sequence[int]) -> None:
        """Tells the directory, in the background, that these positions are not there."""
        if not stale or self.directory is None:
            return
        gone, answer = load.fingerprints.select(stale), source.answer
        self._counters.tally.reports += 1
        report = self.directory.report_stale(
            load.namespace_digest, gone, node=source.peer.node, epoch=answer.epoch, owner_seq=answer.owner_seq
        )
        if self._tasks.start(self._deliver(report, len(gone)), name="report-stale") is None:
            self._counters.stale_unreported += len(gone)

    async def _deliver(self, report: Coroutine[Any, Any, None], blocks: int) -> None:
        try:
            await report
        except KvdirError as error:
            self._counters.stale_unreported += blocks
            say(log, logging.DEBUG, "stale blocks not reported", blocks=blocks, error=error)
        else:
            self._counters.stale_reported += blocks

    def unlock(self, source: Source) -> None:
        """The owner may reuse the blocks."""
        if source.answer.lock and source.peer.unlock_soon(source.answer.lock):
            self._counters.tally.unlocks += 1
            self._tasks.start(source.peer.flush_unlocks(), name="unlock")
