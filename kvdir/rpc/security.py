"""A daemon's security in one place: its policy file, its gate, and what operators hear of both.

Without TLS nobody can be told apart, and the gate lets everybody in; with TLS and no policy every certificate of the CA may
everything, which is said once at start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from kvdir.core.policy import OPEN, Policy
from kvdir.obs.logs import say
from kvdir.obs.tally import Tally
from kvdir.rpc.gate import AUDITED, LIMITS, NO_LIMITS, REFUSALS, CallLimits, Gate, Rights
from kvdir.rpc.policy_file import PolicyFile

log = logging.getLogger("kvdir.policy")


class Security:
    """policy: path of its file, empty for none. The rest as Gate has it. Raises ConfigError for a policy that cannot be used.

    file: None without a policy.
    """

    def __init__(
        self,
        *,
        policy: str,
        secured: bool,
        rights: Rights,
        limits: CallLimits = NO_LIMITS,
        carries: bool = False,
        audited: Callable[[str, Any], str | None] = lambda method, request: None,
    ) -> None:
        self.file = PolicyFile(Path(policy)) if policy else None
        self.secured = secured
        self.gate = Gate(
            rights=rights, secured=secured, policy=lambda: self.policy, limits=limits, carries=carries, audited=audited
        )

    @property
    def policy(self) -> Policy:
        return OPEN if self.file is None else self.file.policy

    def remark(self) -> str:
        """For /readyz, which anybody may read: what is not as the files say, without the faults, since they name tenants."""
        return "(the policy file is not taken; the log says why)" if self.fault else ""

    @property
    def fault(self) -> str:
        """Why the newest policy file is not in force, in words; empty when it is."""
        return self.file.fault if self.file is not None else ""

    def watched_by(self, tally: Tally) -> None:
        """Its figures are exposed from now on."""
        gate, file = self.gate, self.file
        for name, counts, labels in (
            ("auth_refused_total", gate.refused, REFUSALS),
            ("limited_total", gate.limited, LIMITS),
            ("audited_total", gate.audits, AUDITED),
        ):
            for label in labels:
                tally.watch(name, lambda counts=counts, label=label: counts[label], label)  # type: ignore[misc]
        if file is not None:
            tally.watch("policy_fault", lambda: float(bool(file.fault)))
            tally.watch("policy_reloads_total", lambda: file.reloads, "used")
            tally.watch("policy_reloads_total", lambda: file.refused_reloads, "refused")

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
