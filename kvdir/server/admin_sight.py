"""What an admin of some tenants is told: figures of their namespaces, and nothing that speaks of all tenants at once.

Whatever cannot be cut to his tenants takes an admin of every tenant: that refusal depends on who asks, never on what there is.
"""

from __future__ import annotations

from dataclasses import replace

from kvdir.core.namespaces import NamespaceTable
from kvdir.core.policy import Identity, Role
from kvdir.core.views import SumsView, ViewScope
from kvdir.errors import Forbidden
from kvdir.location import PROTOCOL_VERSION
from kvdir.rpc.caller import caller
from kvdir.rpc.security import Security
from kvdir.v1 import admin_pb2


def of_all_tenants() -> None:
    """Raises Forbidden for an admin who does not see every tenant."""
    identity = caller().identity
    if not identity.tenants.every:
        raise Forbidden(
            f'{identity.name} sees some tenants, and this speaks of all of them: ask as an admin with tenants = ["*"]; '
            "`kvdir policy check` says who is one"
        )


def visible_sums(sums: SumsView, namespaces: NamespaceTable) -> SumsView:
    """Of the caller's tenants: per namespace and tenant. Sums per node and tier are of all tenants together."""
    tenants = caller().tenants
    if tenants.every:
        return sums
    seen = {known.digest.hex() for known in namespaces if known.namespace.tenant in tenants}
    kept = (
        item
        for item in sums.totals
        if (item.scope is ViewScope.NAMESPACE and item.subject in seen)
        or (item.scope is ViewScope.TENANT and item.subject in tenants)
    )
    return replace(sums, totals=tuple(kept), loads=())


def who_am_i(security: Security, coordinator: str) -> admin_pb2.WhoAmIResponse:
    """What the caller is taken for, and may."""
    who, policy = caller(), security.policy
    identity = who.identity
    return admin_pb2.WhoAmIResponse(
        protocol_version=PROTOCOL_VERSION,
        coordinator=coordinator,
        identity=identity.name,
        certificate=who.claims.words() if who.claims is not None else "",
        roles=sorted(identity.roles),
        tenants=policy.tenant_names(identity.tenants),
        stores=policy.tenant_names(identity.stores),
        nodes=["*"] if identity.nodes.every else sorted(identity.nodes.names),
        remark=_remark(security, identity),
    )


def _remark(security: Security, identity: Identity) -> str:
    """A policy's faults name tenants and identities, so only an admin of every tenant hears them."""
    if not security.secured:
        return "no certificates are asked for here: everybody may everything"
    if security.file is None:
        return "no policy is set here: every certificate of the CA may everything"
    if not security.fault:
        return ""
    if not (Role.ADMIN in identity.roles and identity.tenants.every):
        return "the policy file has changed and is not taken: this is what the one before it gives"
    return f"the policy file is not taken: {security.fault}"
