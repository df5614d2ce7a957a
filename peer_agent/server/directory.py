"""The coordinators as the read path sees them: nominate, and report what was stale."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvdir.client.aio import DirectoryClient
from kvdir.core.feedback import StaleReport
from kvdir.errors import Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from kvdir.rpc.cancel import call_alone_cancelled
from peer_agent.core.plan import claims
from peer_agent.server.load import Nominations


class Coordinators:
    """Implements peer_agent.server.load.Directory over any of several coordinators."""

    def __init__(self, addresses: Sequence[str], *, node: str, timeout_s: float) -> None:
        self._client = DirectoryClient(addresses, deadline_s=timeout_s, connect_timeout_s=timeout_s)
        self._node = node

    async def nominate(self, namespace_digest: bytes, fingerprints: Fingerprints, *, timeout_s: float) -> Nominations:
        try:
            found = await self._client.lookup(namespace_digest, fingerprints, deadline_s=timeout_s)
        except asyncio.CancelledError as error:
            if not call_alone_cancelled():
                raise
            raise Unavailable("the connection to the coordinator was lost") from error
        return Nominations(claims(found.runs, found.sets, found.nodes), found.nodes)

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
        try:
            await self._client.report_stale(report)
        except asyncio.CancelledError as error:
            if not call_alone_cancelled():
                raise
            raise Unavailable("the connection to the coordinator was lost") from error

    async def close(self) -> None:
        await self._client.close()
