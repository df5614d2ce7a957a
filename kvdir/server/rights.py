"""Which role may call which method of a coordinator, and what the audit log says an admin's call was about."""

from __future__ import annotations

from typing import Any

from kvdir.core.policy import ALL, NOTHING, Grant, Role
from kvdir.namespace import NO_TENANT
from kvdir.rpc.security import Security
from kvdir.server.config import CoordinatorConfig

_EVERY = frozenset(Role)
_READERS = frozenset((Role.AGENT, Role.ROUTER, Role.ENGINE, Role.ADMIN))
_AGENT = frozenset((Role.AGENT,))
_ADMIN = frozenset((Role.ADMIN,))
_ADMIN_CALLS = ("Nodes", "Views", "Status", "Story", "Quotas", "Digests", "Dump", "Reconcile")

RIGHTS = {
    **{f"/kvdir.v1.Directory/{name}": _READERS for name in ("Lookup", "LookupBatch", "LookupStream", "Score")},
    "/kvdir.v1.Directory/Watch": _AGENT,
    "/kvdir.v1.Events/Publish": _AGENT,
    "/kvdir.v1.Events/ReportStale": _AGENT | {Role.ENGINE},
    **{f"/kvdir.v1.Admin/{name}": _ADMIN for name in _ADMIN_CALLS},
    "/kvdir.v1.Admin/WhoAmI": _EVERY,
}

_AUDITED = frozenset(f"/kvdir.v1.Admin/{name}" for name in _ADMIN_CALLS)


def audited(method: str, request: Any) -> str | None:
    """What the call was about, without fingerprints; None: not an admin's."""
    if method not in _AUDITED:
        return None
    digest = getattr(request, "namespace_digest", b"")
    parts = (
        f"node={request.node}" if getattr(request, "node", "") else "",
        f"namespace={digest.hex()[:16]}" if digest else "",
        "of a fingerprint" if getattr(request, "fingerprint", b"") else "",
    )
    return " ".join(filter(None, parts))


def coordinator_security(config: CoordinatorConfig) -> Security:
    """Of the main process. Raises ConfigError."""
    return Security(
        policy=config.policy,
        secured=bool(config.tls_cert),
        rights=RIGHTS,
        limits=config.call_limits,
        carries=config.lookup_workers > 0,
        audited=audited,
    )


def indexer_tenants(security: Security, identity: str) -> Grant:
    """Whose namespaces the indexer answers about. identity: a name of the policy; empty: none was given."""
    if security.file is None:
        return ALL
    if not identity:
        return Grant(frozenset((NO_TENANT,)))
    found = security.policy.named(identity)
    return NOTHING if found is None else found.tenants
