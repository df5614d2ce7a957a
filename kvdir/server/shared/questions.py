"""What is asked of the directory in a shared store: lookups, and feedback of readers.

Rules: a lookup never waits for the store longer than store_lookup_s, and not at all while that has just failed: it is answered
without hits and says so, because its caller recomputes rather than waits. No lookup fails because of the store.
Feedback removes what no later store contradicts, as far as one coordinator of many can tell; if it was wrong, the owner's next
counts differ and the stream is restated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from kvdir.core.admission import Counters
from kvdir.core.answer import Lookup
from kvdir.core.feedback import Feedback, StaleReport
from kvdir.core.policy import ALL, Grant
from kvdir.core.shared_answer import SharedAnswers
from kvdir.errors import TooLarge, Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.location import MinTrust
from kvdir.server.config import CoordinatorConfig
from kvdir.server.shared.link import StoreLink
from kvdir.server.shared.session import Session
from kvdir.store.base import StoreLost, StoreRefused

NAMESPACES_S = 0.1
"""Lookups of a namespace that nobody announced ask the store for it no more often than this."""


class Questions:
    """sessions: by node, those of this coordinator. warming: said in answers. without_store: lookups it did not answer."""

    def __init__(self, link: StoreLink, config: CoordinatorConfig, sessions: Mapping[str, Session]) -> None:
        self.counters = Counters()
        self.warming = True
        self.without_store = 0
        self._link = link
        self._config = config
        self._sessions = sessions
        self._asking = asyncio.Lock()
        self._asked_s = float("-inf")
        self._answers = SharedAnswers(link.fleet)

    async def lookup(
        self, namespace_digest: bytes, fingerprints: Fingerprints, *, prefix: bool, min_trust: MinTrust, tenants: Grant = ALL
    ) -> Lookup:
        """As Directory.lookup; without hits, and saying so, when the store does not answer in time."""
        asked = len(fingerprints)
        if asked > self._config.max_fingerprints:
            raise TooLarge(
                f"{asked} fingerprints in one list, max_fingerprints is {self._config.max_fingerprints}: split the list"
            )
        answer = await self._ask(namespace_digest, fingerprints, prefix=prefix, min_trust=min_trust, tenants=tenants)
        if answer is None:
            self.without_store += 1
            answer = Lookup(b"", (), (), 0, asked, warming=True, incomplete=True)
        counters = self.counters
        counters.lookups += 1
        counters.lookup_blocks += asked
        counters.lookup_hits += answer.hits
        counters.lookup_nodes_below_trust += answer.below_trust
        return answer

    async def _ask(
        self, namespace_digest: bytes, fingerprints: Fingerprints, *, prefix: bool, min_trust: MinTrust, tenants: Grant
    ) -> Lookup | None:
        """None: the store did not answer, or is not asked because it has just not answered."""
        link, now_s = self._link, time.monotonic()
        if link.opened_s is None or not link.breaker.allows(now_s):
            return None
        end_s = now_s + self._config.store_lookup_s
        try:
            await self._know(namespace_digest, tenants)
            namespace = link.namespaces.require(namespace_digest, tenants)
            call = link.store.lookup(
                fingerprints.packed,
                fingerprints.width,
                scope=namespace.scope,
                prefix=prefix,
                deadline_s=end_s - time.monotonic(),
            )
            found = await link.timed("lookup", call)
        except (Unavailable, StoreLost, StoreRefused, TimeoutError):
            link.breaker.failed(time.monotonic(), asked_s=now_s)
            return None
        link.breaker.answered()
        return self._answers.build(
            found[:3],
            found.roster.holders,
            version=found.roster.version,
            asked=len(fingerprints),
            prefix=prefix,
            warming=self.warming,
            incomplete=link.evicting or found.lost_buckets > 0,
            min_trust=min_trust,
            now_s=time.monotonic(),
        )

    async def know(self, namespace_digest: bytes, tenants: Grant = ALL) -> None:
        """Another coordinator may have announced it; when the store does not say in time, it stays unknown."""
        link, now_s = self._link, time.monotonic()
        if link.opened_s is None or not link.breaker.allows(now_s):
            return
        try:
            await self._know(namespace_digest, tenants)
        except (Unavailable, StoreLost, StoreRefused, TimeoutError):
            link.breaker.failed(time.monotonic(), asked_s=now_s)

    async def _know(self, namespace_digest: bytes, tenants: Grant = ALL) -> None:
        """Another coordinator may have announced it a moment ago; so may one that is not of these tenants, for as much work.
        Raises TimeoutError.
        """
        link = self._link
        if link.namespaces.seen(namespace_digest, tenants) is not None:
            return
        async with asyncio.timeout(self._config.store_lookup_s), self._asking:  # who comes meanwhile waits for the same answer
            if link.namespaces.seen(namespace_digest, tenants) is None and time.monotonic() - self._asked_s >= NAMESPACES_S:
                await link.read_namespaces()
                self._asked_s = time.monotonic()

    async def report_stale(self, report: StaleReport, *, tenants: Grant = ALL) -> Feedback:
        """Negative feedback of a reader: as core/feedback.py, as far as one coordinator of many can tell. Of others than these
        tenants nothing is held.
        """
        if self._link.namespaces.seen(report.namespace_digest, tenants) is None and not tenants.every:
            report = replace(report, namespace_digest=b"")
        self.counters.stale_reports += 1
        try:
            feedback = await self._feedback(report)
        except (Unavailable, StoreLost, StoreRefused, TimeoutError) as error:
            feedback = Feedback(0, f"the store did not take it: {error}")
        self.counters.stale_blocks += feedback.removed
        self.counters.stale_reports_ignored += bool(feedback.ignored_reason)
        return feedback

    async def _feedback(self, report: StaleReport) -> Feedback:
        store, timeout_s = self._link.store, self._config.store_timeout_s
        session, fingerprints = self._sessions.get(report.node), report.fingerprints
        key = (report.namespace_digest, report.tier)
        if session is not None:
            kept = session.stream.not_newer(report)
            if isinstance(kept, Feedback):
                return kept
            fingerprints = kept
        else:
            saved = self._link.fleet.saved(report.node)
            if saved is None or saved.left:
                return Feedback(0, "unknown node")
            if saved.epoch != report.epoch:
                return Feedback(0, "old epoch")
            if saved.view.announced_seq > report.owner_seq:
                return Feedback(0, f"coordinator {saved.coordinator} may have heard a newer store")
        await self._know(report.namespace_digest)
        known = self._link.namespaces.get(report.namespace_digest)
        if known is None:
            return Feedback(0)
        roster = await store.roster(deadline_s=timeout_s)
        for line in roster.holders.values():
            if (line.node, line.epoch, line.namespace, line.tier) == (report.node, report.epoch, *key) and line.visible:
                removed = await store.retract(
                    line.number, fingerprints.packed, fingerprints.width, scope=known.scope, deadline_s=timeout_s
                )
                if session is not None:
                    session.stream.retracted(key, removed)
                return Feedback(removed)
        return Feedback(0)
