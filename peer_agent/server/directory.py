"""The coordinators as the read path sees them: nominate, and report what was stale.

Rule: coordinators that hang cost one load its patience per pause, and not every load. After a nomination that got no answer
within timeout_s, or LATE_LIMIT in a row that had less time, all are skipped for PAUSE_S, doubling to PAUSE_MAX_S; then one load
tries, and the others go on skipping until it has had an answer. What is refused at once costs nothing and pauses nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from kvdir.client.aio import DirectoryClient
from kvdir.client.discovery import Discovery
from kvdir.core.feedback import StaleReport
from kvdir.errors import DeadlineExceeded, KvdirError, Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from kvdir.rpc.tls import PLAINTEXT, Dialer
from peer_agent.core.nominees import claims
from peer_agent.server.load import Nominations

PAUSE_S = 0.5
PAUSE_MAX_S = 5.0
LATE_LIMIT = 3
FAIR_S = 0.02
"""Who waited for less says nothing about the coordinators."""


class Coordinators:
    """Implements peer_agent.server.load.Directory over any of several coordinators. timeout_s: the longest any call waits."""

    def __init__(
        self, coordinators: Discovery, *, node: str, timeout_s: float, clock: Callable[[], float], dialer: Dialer = PLAINTEXT
    ) -> None:
        self._client = DirectoryClient(coordinators, name=node, deadline_s=timeout_s, connect_timeout_s=timeout_s, tls=dialer)
        self.races = self._client.races
        self._node = node
        self._timeout_s = timeout_s
        self._clock = clock
        self._silences = 0
        self._lates = 0
        self._skip_until_s = 0.0

    async def nominate(self, namespace_digest: bytes, fingerprints: Fingerprints, *, timeout_s: float) -> Nominations:
        began_s = self._clock()
        if began_s < self._skip_until_s:
            raise Unavailable(f"no coordinator answered lately; asked again in {self._skip_until_s - began_s:.1f} s")
        if self._silences:
            self._pause()
        try:
            found = await self._client.lookup(namespace_digest, fingerprints, deadline_s=timeout_s)
        except (DeadlineExceeded, Unavailable):
            self._unanswered(waited_s=self._clock() - began_s)
            raise
        except KvdirError:
            self._answered()
            raise
        self._answered()
        return Nominations(claims(found.runs, found.sets, found.nodes), found.nodes)

    def _answered(self) -> None:
        """Whatever it said: one that knows no namespace yet, too."""
        self._silences, self._lates, self._skip_until_s = 0, 0, 0.0

    def _unanswered(self, *, waited_s: float) -> None:
        self._lates += waited_s >= FAIR_S
        if not self._silences and (waited_s >= self._timeout_s or self._lates >= LATE_LIMIT):
            self._pause()

    def _pause(self) -> None:
        self._skip_until_s = self._clock() + min(PAUSE_S * 2**self._silences, PAUSE_MAX_S)
        self._silences = min(self._silences + 1, 16)

    async def report_stale(
        self, namespace_digest: bytes, fingerprints: Fingerprints, *, node: str, epoch: int, owner_seq: int
    ) -> None:
        report = StaleReport(
            node=node,
            epoch=epoch,
            owner_seq=owner_seq,
            namespace_digest=namespace_digest,
            tier=Tier.CPU,
            fingerprints=fingerprints,
            reporter=self._node,
        )
        await self._client.report_stale(report)

    async def close(self) -> None:
        await self._client.close()
