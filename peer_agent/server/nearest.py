"""Whom a load asks for nominations: the replica in this host's memory, else the coordinators, else a replica grown old.

Rules: the replica costs no call and no wait, so it is asked first, and believed while it may be at most max_lag_s behind; with
no coordinator left to ask it is believed however old it is, since every answer carries the age of its nodes and the owner
decides anyway. What was found stale is told to the coordinators; the replica hears of it through them.
Within one load this asks once: a node that turned out not to have its blocks is not nominated for them again by a replica that
has not heard of that yet (peer_agent/core/plan.py asks nobody twice). Does not: keep the replica (replica.py).
"""

from __future__ import annotations

import math
from collections.abc import Coroutine
from typing import Any

from kvdir.client.replica_reader import ReplicaReader
from kvdir.core.answer import Lookup, Source
from kvdir.errors import KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.obs.spans import active
from peer_agent.core.nominees import claims
from peer_agent.server.load import Directory, Nominations


class NearestDirectory:
    """Implements peer_agent.server.load.Directory. asked: nominations by who gave them."""

    def __init__(self, coordinators: Directory, replica: ReplicaReader, *, max_lag_s: float) -> None:
        self._coordinators = coordinators
        self._replica = replica
        self._max_lag_s = max_lag_s
        self.asked: dict[Source, int] = {"replica": 0, "coordinator": 0, "none": 0}

    async def nominate(self, namespace_digest: bytes, fingerprints: Fingerprints, *, timeout_s: float) -> Nominations:
        found = self._replica.lookup(namespace_digest, fingerprints, max_lag_s=self._max_lag_s)
        if not found.reason:
            return self._nominations(found)
        try:
            nominations = await self._coordinators.nominate(namespace_digest, fingerprints, timeout_s=timeout_s)
        except KvdirError:
            found = self._replica.lookup(namespace_digest, fingerprints, max_lag_s=math.inf)
            if found.source == "replica":
                return self._nominations(found)
            self.asked["none"] += 1
            raise
        self.asked["coordinator"] += 1
        active().set("kvdir.source", "coordinator")
        return nominations

    def report_stale(
        self, namespace_digest: bytes, fingerprints: Fingerprints, *, node: str, epoch: int, owner_seq: int
    ) -> Coroutine[Any, Any, None]:
        return self._coordinators.report_stale(namespace_digest, fingerprints, node=node, epoch=epoch, owner_seq=owner_seq)

    def _nominations(self, found: Lookup) -> Nominations:
        self.asked["replica"] += 1
        active().set("kvdir.source", "replica")
        return Nominations(claims(found.runs, found.sets, found.nodes), found.nodes)
