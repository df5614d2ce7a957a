"""Which role may call which method of a coordinator, and what the audit log says an admin's call was about."""

from __future__ import annotations

from typing import Any

from kvdir.core.policy import Role

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
