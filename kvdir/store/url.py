"""Where the store is, as one URL. Values only.

    redis://[user:password@]host[:6379][/db]                 one server (rediss:// with TLS)
    redis+cluster://[user:password@]host:port,host:port      a cluster, through any of its nodes (rediss+cluster://)
    redis+sentinel://[user:password@]host:port,.../service   a master that Sentinels name (rediss+sentinel://)

Options after "?": prefix (of all keys; "kvdir"), shards (when the store is made), db, ca, cert and key (TLS files),
connect_timeout_s, sentinel_user and sentinel_password. Parts of user and password are percent-encoded (RFC 3986).
The password is in no message and no repr.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

from kvdir.errors import ConfigError
from kvdir.store.layout import MOST_SHARDS

SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")
_OPTIONS = {"prefix", "shards", "db", "ca", "cert", "key", "connect_timeout_s", "sentinel_user", "sentinel_password"}
_PREFIX = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")


class Kind(enum.Enum):
    """How the server that has a key is found."""

    SINGLE = "single"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


@dataclass(frozen=True, slots=True)
class Credentials:
    """For AUTH; no user: the default one. The password is shown nowhere."""

    user: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; empty: the system's authorities, no client certificate."""

    ca: str = ""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A URL, taken apart. shards: 0 for the kind's own choice. text: the URL without secrets, for messages."""

    kind: Kind
    addresses: tuple[tuple[str, int], ...]
    text: str
    credentials: Credentials = field(default_factory=Credentials)
    sentinel_credentials: Credentials = field(default_factory=Credentials)
    service: str = ""
    db: int = 0
    prefix: str = "kvdir"
    shards: int = 0
    connect_timeout_s: float = 1.0
    tls: TlsFiles | None = None

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Raises ConfigError, which lists every fault and shows no secret."""
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in SCHEMES:
            raise ConfigError([f"store: the scheme of a store URL is one of {', '.join(f'{name}://' for name in SCHEMES)}"])
        rest, _, query = rest.partition("?")
        authority, _, path = rest.partition("/")
        if "@" in path + query:
            raise ConfigError(["store: user and password of a store URL are percent-encoded: %2F for /, %3F for ?, %40 for @"])
        userinfo, _, hosts = authority.rpartition("@")
        return _Parser(scheme, hosts, path.strip("/"), query).parse(_credentials(userinfo))


def _credentials(userinfo: str) -> Credentials:
    user, separator, password = userinfo.partition(":")
    return Credentials(unquote(user), unquote(password)) if separator else Credentials("", unquote(user))


class _Parser:
    """Collects every fault before it raises."""

    def __init__(self, scheme: str, hosts: str, path: str, query: str) -> None:
        self._scheme, self._hosts, self._path = scheme, hosts, path
        self._options = dict(parse_qsl(query, keep_blank_values=True))
        self._kind = Kind(scheme.partition("+")[2] or "single")
        self._faults: list[str] = []

    def parse(self, credentials: Credentials) -> StoreUrl:
        for name in sorted(self._options.keys() - _OPTIONS):
            self._faults.append(f"store: there is no option {name!r} in a store URL; there are {', '.join(sorted(_OPTIONS))}")
        service = self._path if self._kind is Kind.SENTINEL else ""
        path_db = self._path if self._kind is Kind.SINGLE else ""
        if self._kind is Kind.SENTINEL and not service:
            self._faults.append(
                "store: a redis+sentinel URL ends with the name of the master: redis+sentinel://host:26379/mymaster"
            )
        if self._kind is Kind.CLUSTER and self._path not in ("", "0"):
            self._faults.append("store: a Redis cluster has one database, 0: leave the path away")
        prefix = self._options.get("prefix", "kvdir")
        if not _PREFIX.fullmatch(prefix):
            self._faults.append("store: prefix is 1 to 64 of the characters A-Z a-z 0-9 _ . : / -")
        addresses = tuple(self._address(part) for part in self._hosts.split(",") if part)
        if not addresses:
            self._faults.append("store: the URL names no host")
        if self._kind is Kind.SINGLE and len(addresses) > 1:
            self._faults.append("store: several hosts need redis+cluster:// or redis+sentinel://")
        made = StoreUrl(
            self._kind,
            addresses,
            f"{self._scheme}://{self._hosts}{f'/{self._path}' if self._path else ''}",
            credentials,
            Credentials(self._options.get("sentinel_user", ""), self._options.get("sentinel_password", "")),
            service,
            int(self._number("db", path_db or "0", 0, 0 if self._kind is Kind.CLUSTER else 1023)),
            prefix,
            int(self._number("shards", "0", 0, MOST_SHARDS)),
            self._number("connect_timeout_s", "1", 0.01, 60),
            self._tls(),
        )
        if self._faults:
            raise ConfigError(self._faults)
        return made

    def _address(self, text: str) -> tuple[str, int]:
        host, separator, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
        if not separator:
            host, port = text, "26379" if self._kind is Kind.SENTINEL else "6379"
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            self._faults.append(f"store: {text!r} is not host:port")
            return host, 0
        return host.strip("[]"), int(port)

    def _number(self, name: str, default: str, least: float, most: float) -> float:
        text = self._options.get(name, default)
        try:
            value = float(text)
        except ValueError:
            value = least - 1
        whole = isinstance(least, int)
        if not least <= value <= most or (whole and value != int(value)):
            self._faults.append(f"store: {name} is a {'whole ' if whole else ''}number from {least} to {most}, not {text!r}")
        return value

    def _tls(self) -> TlsFiles | None:
        files = {name: self._options.get(name, "") for name in ("ca", "cert", "key")}
        if self._scheme.startswith("rediss"):
            return TlsFiles(**files)
        if any(files.values()):
            self._faults.append(
                "store: ca, cert and key belong to a TLS URL: rediss://, rediss+cluster:// or rediss+sentinel://"
            )
        return None
