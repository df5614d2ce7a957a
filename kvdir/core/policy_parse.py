"""A policy file's contents -> Policy, or everything that is wrong with it. Format: docs/security.md, examples/policy.toml.

Rules: unknown keys, roles and tenants are faults, as is whatever can never match; salts are never repeated in words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvdir.core.policy import ALL, LOCAL, NOTHING, OPEN_PARTS, Entry, Grant, Identity, Pattern, Policy, Role
from kvdir.errors import ConfigError
from kvdir.namespace import NO_TENANT

SaltDigest = Callable[[str], str]
"""Path of a salt file -> digest of the salt in it. Raises ValueError in words without the salt."""

_DIGEST = re.compile(r"(?:salt:)?([0-9a-f]{32})")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}")
_ENTRY_KEYS = ("name", "spiffe", "names", "roles", "tenants", "store", "nodes")
_LOCAL_KEYS = ("roles", "tenants", "store", "nodes")
_STORING = frozenset((Role.AGENT, Role.ENGINE))
_TOP_KEYS = ("tenants", "identity", "local")


def parse_policy(document: Mapping[str, Any], *, salt_digest_of: SaltDigest) -> Policy:
    """Raises ConfigError with every fault. document: as `tomllib` gives it."""
    return _Parser(salt_digest_of).policy(document)


class _Parser:
    """Collects faults as it goes."""

    def __init__(self, salt_digest_of: SaltDigest) -> None:
        self._salt_digest_of = salt_digest_of
        self._faults: list[str] = []
        self._tenants: dict[str, Grant] = {}

    def policy(self, document: Mapping[str, Any]) -> Policy:
        self._unknown("", document, _TOP_KEYS)
        self._read_tenants(self._table(document, "tenants"))
        tables = document.get("identity", [])
        if not isinstance(tables, list) or not all(isinstance(item, dict) for item in tables):
            self._fault("identity: write each as a table of its own, [[identity]]")
            tables = []
        entries = tuple(filter(None, (self._entry(number, item) for number, item in enumerate(tables, 1))))
        self._twice(entries)
        local = self._local(self._table(document, "local"), given="local" in document)
        if not tables and not self._faults:
            self._fault("identity: there is none, so nobody could do anything; add an [[identity]]")
        if self._faults:
            raise ConfigError(self._faults)
        return Policy(entries, local, tuple(self._tenants.items()))

    # -- parts -----------------------------------------------------------------------------------------------------------

    def _read_tenants(self, table: Mapping[str, Any]) -> None:
        owner: dict[str, str] = {}
        for name, item in table.items():
            where = f"tenants.{name}"
            if name in (NO_TENANT, "*") or not _NAME.fullmatch(name):
                self._fault(f"{where}: not a name for a tenant: letters, digits, ., _ and -, and not {NO_TENANT}")
            if not isinstance(item, dict):
                self._fault(f"{where}: write {where} = {{ salts = [...] }} or {{ salt_files = [...] }}")
                continue
            self._unknown(f"{where}.", item, ("salts", "salt_files"))
            digests = [self._salt(where, text) for text in self._texts(f"{where}.salts", item.get("salts", []))]
            digests += [self._salt_file(where, path) for path in self._texts(f"{where}.salt_files", item.get("salt_files", []))]
            found = frozenset(f"salt:{digest}" for digest in digests if digest)
            if not digests:
                self._fault(f"{where}: has no salt: give salts (digests, `kvdir policy digest FILE` makes one) or salt_files")
            for tenant in found:
                if owner.setdefault(tenant, name) != name:
                    self._fault(f"{where}: has the salt of tenant {owner[tenant]!r}: each tenant needs its own")
            self._tenants[name] = Grant(found)

    def _salt(self, where: str, text: str) -> str:
        match = _DIGEST.fullmatch(text)
        if match is None:
            # Not repeated: it may be a salt that somebody put here.
            self._fault(f"{where}.salts: one is not a digest (salt: and 32 hex digits); files that hold salts are salt_files")
        return match[1] if match else ""

    def _salt_file(self, where: str, path: str) -> str:
        try:
            return self._salt_digest_of(path)
        except ValueError as error:
            self._fault(f"{where}.salt_files: {path}: {error}")
            return ""

    def _entry(self, number: int, item: Mapping[str, Any]) -> Entry | None:
        name = item.get("name", "")
        where = f"identity {name!r}" if isinstance(name, str) and name else f"identity {number}"
        before = len(self._faults)
        self._unknown(f"{where}: ", item, _ENTRY_KEYS)
        if not isinstance(name, str) or not _NAME.fullmatch(name.replace("{node}", "node")):
            self._fault(f"{where}: name: letters, digits, ., _ and -, and {{node}}")
            name = ""
        patterns = [self._spiffe(where, text) for text in self._texts(f"{where}: spiffe", item.get("spiffe", []))]
        patterns += [self._certificate(where, text) for text in self._texts(f"{where}: names", item.get("names", []))]
        if not patterns:
            self._fault(f"{where}: matches nobody: give spiffe = [...] or names = [...]")
        roles, tenants, stores, nodes = self._rights(where, item)
        texts = (name, *nodes)
        if any("{node}" in text for text in texts) and not all("{node}" in pattern.text for pattern in patterns if pattern):
            self._fault(f"{where}: {{node}} is used, but not every pattern of it says which part of the certificate that is")
        if len(self._faults) > before:
            return None
        return Entry(
            name=name, patterns=tuple(filter(None, patterns)), roles=roles, tenants=tenants, stores=stores, nodes=nodes
        )

    def _local(self, item: Mapping[str, Any], *, given: bool) -> Identity:
        if not given:
            return LOCAL
        self._unknown("local: ", item, _LOCAL_KEYS)
        roles, tenants, stores, nodes = self._rights("local", item)
        if "{node}" in nodes:
            self._fault("local: nodes: {node} comes from a certificate, and there is none; write the names")
        granted = ALL if "*" in nodes else Grant(frozenset(nodes))
        return Identity(name=LOCAL.name, roles=roles, tenants=tenants, stores=stores, nodes=granted)

    def _rights(self, where: str, item: Mapping[str, Any]) -> tuple[frozenset[Role], Grant, Grant, tuple[str, ...]]:
        roles = self._roles(where, item)
        tenants = self._grant(f"{where}: tenants", item.get("tenants", []))
        stores = self._grant(f"{where}: store", item["store"]) if "store" in item else tenants
        if not roles & _STORING:
            stores = NOTHING
        nodes = tuple(self._texts(f"{where}: nodes", item.get("nodes", [])))
        for node in nodes:
            if node not in OPEN_PARTS and ("*" in node or not node):
                self._fault(f"{where}: nodes: {node!r}: a node's name, {{node}}, or * for every node")
        publishes = Role.AGENT in roles
        if publishes and not nodes:
            self._fault(f"{where}: nodes: an agent publishes under a node's name: write nodes = [...] ({{node}}, or names)")
        for key, given in (("nodes", bool(nodes)), ("store", "store" in item)):
            if given and not roles & _STORING:
                self._fault(f"{where}: {key}: only agents and engines store; its roles: {', '.join(sorted(roles)) or '-'}")
        if not tenants.every and not tenants.names and roles:
            self._fault(f'{where}: tenants: it could see nothing: write tenants = ["none"] (namespaces without a salt) or more')
        return roles, tenants, stores, nodes

    def _roles(self, where: str, item: Mapping[str, Any]) -> frozenset[Role]:
        texts = self._texts(f"{where}: roles", item.get("roles", []))
        known = [text for text in texts if text in list(Role)]
        for text in texts:
            if text not in known:
                self._fault(f"{where}: roles: {text!r} is unknown; one of {', '.join(Role)}")
        if not texts:
            self._fault(f"{where}: roles: at least one of {', '.join(Role)}")
        return frozenset(Role(text) for text in known)

    def _grant(self, where: str, raw: object) -> Grant:
        names: set[str] = set()
        for text in self._texts(where, raw):
            if text == "*":
                return ALL
            if text == NO_TENANT:
                names.add(NO_TENANT)
            elif text in self._tenants:
                names |= self._tenants[text].names
            else:
                known = ", ".join(["*", NO_TENANT, *self._tenants])
                self._fault(f"{where}: {text!r} is not a tenant of this file; known: {known}")
        return Grant(frozenset(names)) if names else NOTHING

    # -- patterns --------------------------------------------------------------------------------------------------------

    def _spiffe(self, where: str, text: str) -> Pattern | None:
        scheme, _, path = text.partition("://")
        parts = path.split("/")
        if scheme != "spiffe" or len(parts) < 2 or not all(parts):
            self._fault(f"{where}: spiffe: {text!r} is not a SPIFFE id: spiffe://TRUST-DOMAIN/PATH")
            return None
        return self._open(where, "spiffe", text, parts, last_star=True)

    def _certificate(self, where: str, text: str) -> Pattern | None:
        if not text or "/" in text:
            self._fault(f"{where}: names: {text!r} is not a DNS name or common name; SPIFFE ids belong under spiffe")
            return None
        return self._open(where, "names", text, text.split("."), last_star=False)

    def _open(self, where: str, key: str, text: str, parts: Sequence[str], *, last_star: bool) -> Pattern | None:
        """At most one part is open, as a whole: `*` only where what it stands for is the most special."""
        free = [at for at, part in enumerate(parts) if part in OPEN_PARTS]
        halves = [part for part in parts if part not in OPEN_PARTS and ("*" in part or "{" in part or "}" in part)]
        star_at = len(parts) - 1 if last_star else 0
        misplaced = any(parts[at] == "*" and at != star_at for at in free) or (last_star and 0 in free)
        if len(free) > 1 or halves or misplaced or (len(parts) == 1 and free):
            place = "the last part" if last_star else "the first part"
            self._fault(f"{where}: {key}: {text!r}: one whole part may be {{node}}, or {place} *; never more")
            return None
        return Pattern(text)

    def _twice(self, entries: Sequence[Entry]) -> None:
        seen: dict[str, str] = {}
        names: set[str] = set()
        for entry in entries:
            if entry.name in names or entry.name == LOCAL.name:
                self._fault(f"identity {entry.name!r}: the name is taken: give each its own")
            names.add(entry.name)
            for pattern in entry.patterns:
                first = seen.setdefault(pattern.text, entry.name)
                if first != entry.name:
                    self._fault(f"identity {entry.name!r}: {pattern.text} is {first!r} already, which comes first and counts")

    # -- forms -----------------------------------------------------------------------------------------------------------

    def _fault(self, words: str) -> None:
        self._faults.append(words)

    def _unknown(self, where: str, item: Mapping[str, Any], known: Sequence[str]) -> None:
        for key in item:
            if key not in known:
                self._fault(f"{where}{key}: unknown key; known: {', '.join(known)}")

    def _table(self, document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        found = document.get(key, {})
        if not isinstance(found, dict):
            self._fault(f"{key}: must be a table, [{key}]")
            return {}
        return found

    def _texts(self, where: str, raw: object) -> list[str]:
        if isinstance(raw, str):
            raw = [raw]
        if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
            self._fault(f"{where}: must be a list of texts")
            return []
        return list(raw)
