"""Who may do what: identities that certificates prove, their roles, the tenants and nodes that are theirs. Pure values.

    certificate --identify--> Identity(name, roles, tenants, stores, nodes)        one per call; see kvdir/rpc/gate.py

Rules:
- the first entry of the file that matches any name of the certificate is the identity; nothing is added up over entries, and
  what no entry names may do nothing;
- a tenant is what a namespace says in its canonical form: `none`, or `salt:<digest>`. A grant names tenants of the policy,
  which stand for the digests of their salts: salts themselves are never here;
- what a caller may not see is absent for him: whoever answers asks `tenant in identity.tenants` where it asks whether there is
  such a namespace at all (docs/security.md).
Does not: read files (kvdir/rpc/policy_file.py), parse (policy_parse.py), or know calls.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvdir.namespace import NO_TENANT


class Role(enum.StrEnum):
    """What a caller is for. An identity has any number of them."""

    ENGINE = "engine"
    AGENT = "agent"
    ROUTER = "router"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Grant:
    """Everything, or these; of tenants as namespaces have them, or of nodes."""

    names: frozenset[str] = frozenset()
    every: bool = False

    def __contains__(self, name: str) -> bool:
        return self.every or name in self.names

    def words(self) -> str:
        """For people."""
        return "*" if self.every else ", ".join(sorted(self.names)) or "none of them"


ALL = Grant(every=True)
NOTHING = Grant()


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who is calling. tenants: whose namespaces it sees. stores: in whose it may say that something is held. nodes: under whose
    names it may publish, the streams NODE/ENGINE of their engines included.
    """

    name: str
    roles: frozenset[Role]
    tenants: Grant
    stores: Grant
    nodes: Grant

    def may_publish(self, node: str) -> bool:
        return node in self.nodes or node.partition("/")[0] in self.nodes

    def signed(self, node: str) -> str:
        """Who is said to have done something: the node that the caller names, if that is its own; otherwise the identity."""
        return node if self.may_publish(node) else self.name


def unrestricted(name: str) -> Identity:
    """May everything, under this name."""
    return Identity(name=name, roles=frozenset(Role), tenants=ALL, stores=ALL, nodes=ALL)


ANONYMOUS = unrestricted("anonymous")
"""Callers where there are no certificates: whoever reaches the port may everything, so that is loopback (--insecure)."""
LOCAL = unrestricted("local")
"""Callers over a unix socket, unless the policy says otherwise: the file's mode is their proof."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a certificate, checked by TLS, says about its holder. spiffe_ids: at most one, by the standard (X.509-SVID 5.2).
    names: DNS names of the SAN, and the common name.
    """

    spiffe_ids: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def words(self) -> str:
        return ", ".join((*self.spiffe_ids, *dict.fromkeys(self.names))) or "a certificate without names"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A SPIFFE id or certificate name in parts, one of which may be open: `*`, or `{node}`, which says who publishes."""

    text: str

    @property
    def separator(self) -> str:
        return "/" if self.text.startswith("spiffe://") else "."

    def match(self, name: str) -> str | None:
        """What stands in the open part, empty where there is none; None: does not match."""
        want, have = self.text.split(self.separator), name.split(self.separator)
        if len(want) != len(have):
            return None
        captured = ""
        for ours, theirs in zip(want, have, strict=True):
            if ours in OPEN_PARTS:
                if not theirs or "/" in theirs:  # of a certificate name; NODE/ENGINE would be a stream of another's
                    return None
                captured = theirs
            elif ours != theirs:
                return None
        return captured


OPEN_PARTS = ("*", "{node}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One identity of the file, before it is known which node it is. nodes: names, `{node}` or `*`."""

    name: str
    patterns: tuple[Pattern, ...]
    roles: frozenset[Role]
    tenants: Grant
    stores: Grant
    nodes: tuple[str, ...]

    def match(self, claims: Claims) -> Identity | None:
        for pattern in self.patterns:
            for name in claims.spiffe_ids if pattern.separator == "/" else claims.names:
                captured = pattern.match(name)
                if captured is not None:
                    return self._identity(captured)
        return None

    def _identity(self, captured: str) -> Identity:
        names = frozenset(node.replace("{node}", captured) for node in self.nodes)
        return Identity(
            name=self.name.replace("{node}", captured),
            roles=self.roles,
            tenants=self.tenants,
            stores=self.stores,
            nodes=ALL if "*" in self.nodes else Grant(names),
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """entries: in order; None: no policy, every certificate may everything. tenants: by name, as namespaces have them."""

    entries: tuple[Entry, ...] | None = None
    local: Identity = LOCAL
    tenants: tuple[tuple[str, Grant], ...] = ()

    def identify(self, spiffe_ids: Sequence[str], names: Sequence[str]) -> Identity | None:
        """Who has this certificate; None: nobody that may do anything."""
        claims = Claims(tuple(spiffe_ids), tuple(names))
        if self.entries is None:
            return unrestricted(next(iter((*claims.spiffe_ids, *claims.names)), "certificate"))
        return next(filter(None, (entry.match(claims) for entry in self.entries)), None)

    def named(self, name: str) -> Identity | None:
        """The identity of an entry without an open part, by its name; `local` is one."""
        if name == self.local.name:
            return self.local
        found = (entry for entry in self.entries or () if entry.name == name and "{node}" not in (entry.name, *entry.nodes))
        return next((entry._identity("") for entry in found), None)

    def tenant_names(self, grant: Grant) -> list[str]:
        """The names that the file has for what is granted; `*` for everything."""
        if grant.every:
            return ["*"]
        known = [name for name, salts in self.tenants if salts.names and salts.names <= grant.names]
        return known + ([NO_TENANT] if NO_TENANT in grant.names else [])


OPEN = Policy()
"""No policy file: every certificate of the CA may everything."""


def role_words(roles: Iterable[Role]) -> str:
    return ", ".join(sorted(roles)) or "none"
