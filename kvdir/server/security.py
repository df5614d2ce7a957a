"""A coordinator's security in one place: its policy file, its gate, and what operators hear of both.

Without TLS nobody can be told apart, and the gate lets everybody in; with TLS and no policy every certificate of the CA may
everything, which is said once at start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvdir.core.policy import LOCAL, NOTHING, Grant, Policy
from kvdir.namespace import NO_TENANT
from kvdir.obs.logs import say
from kvdir.rpc.gate import Gate
from kvdir.rpc.policy_file import PolicyFile, policy_of
from kvdir.server.rights import RIGHTS, audited

if TYPE_CHECKING:
    from kvdir.server.config import CoordinatorConfig

log = logging.getLogger("kvdir.policy")

ONLY_UNSALTED = Grant(frozenset((NO_TENANT,)))


class Security:
    """file: None without a policy. Raises ConfigError for a policy that cannot be used."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.file = PolicyFile(Path(config.policy)) if config.policy else None
        self.secured = bool(config.tls_cert)
        self._indexer_identity = config.indexer_identity
        self.gate = Gate(
            rights=RIGHTS,
            secured=self.secured,
            policy=lambda: self.policy,
            limits=config.call_limits,
            carries=config.lookup_workers > 0,
            audited=audited,
        )

    @property
    def policy(self) -> Policy:
        return policy_of(self.file)

    def remark(self) -> str:
        """For /readyz: what is not as the files say."""
        return f"(the policy file is not taken: {self.file.fault})" if self.file is not None and self.file.fault else ""

    def indexer_tenants(self) -> Grant:
        """Whose namespaces the indexer answers about: its callers have no identity of their own."""
        if self.file is None:
            return LOCAL.tenants
        if not self._indexer_identity:
            return ONLY_UNSALTED
        found = self.policy.named(self._indexer_identity)
        return NOTHING if found is None else found.tenants

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Follows the policy file inside the block."""
        if self.secured and self.file is None:
            said = "every certificate of tls_ca may do everything; --policy says who may what (docs/security.md)"
            say(log, logging.WARNING, "no policy", reason=said)
        if self.file is None:
            yield
            return
        keeping = asyncio.create_task(self.file.keep(self.gate.policy_changed), name="policy")
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
