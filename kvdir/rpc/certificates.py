"""Certificate files: read, and tried before anybody relies on them.

How: the files shake hands with themselves, in memory, by Python's own OpenSSL; what that refuses, a peer would refuse, in the
same words. So no parser of certificates is needed, and none of our own is trusted (docs/adr/0022).

Rules: every fault of the three files is said at once, with the file and what to do; an encrypted key is refused, since nobody
is there to type its password. Blocking, a few ms. Does not: watch the files (tls.py), or speak TLS to anybody.
"""

from __future__ import annotations

import base64
import contextlib
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvdir.errors import ConfigError

_ROUNDS = 8
"""Of a handshake in memory; TLS 1.3 needs three."""
_EDWARDS_OIDS = (bytes.fromhex("06032b6570"), bytes.fromhex("06032b6571"))
"""Ed25519 and Ed448 in a private key (RFC 8410)."""
_TRIES = 3
"""Files that change while they are read are read again, so often."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. certificate: ours first, then intermediate ones. key: not encrypted. ca: certificates of the CAs we trust.

    server_name: that the certificate of every server must hold, whatever was dialled; empty: the name or address that was.
    """

    certificate: str
    key: str
    ca: str
    server_name: str = ""

    @classmethod
    def given(cls, certificate: str, key: str, ca: str, server_name: str = "") -> TlsFiles | None:
        """None when none is given. Raises ConfigError when only some are."""
        faults = missing({"tls_cert": certificate, "tls_key": key, "tls_ca": ca})
        if server_name and not certificate:
            faults.append("tls_server_name: needs tls_cert, tls_key and tls_ca")
        if faults:
            raise ConfigError(faults)
        return cls(certificate, key, ca, server_name) if certificate else None


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the files hold, checked. chain, key, ca: PEM. names: DNS names and IP addresses; uris: SPIFFE ids and others.

    unnamed: names that clients may dial and that it does not hold.
    """

    chain: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)
    names: tuple[str, ...]
    uris: tuple[str, ...]
    expires_unix_s: float
    unnamed: tuple[str, ...]


def missing(given: dict[str, str]) -> list[str]:
    """A fault when some of these settings are given and others are not."""
    absent = [name for name, value in given.items() if not value]
    if not absent or len(absent) == len(given):
        return []
    return [f"{' and '.join(absent)}: missing; TLS needs all of {', '.join(given)}"]


def read_certificate(files: TlsFiles, *, server: bool, names: Sequence[str] = (), perhaps: Sequence[str] = ()) -> Certificate:
    """Reads and checks. server: others dial us, so it must also be good for a server, and for these `names` or addresses.

    perhaps: names that they may dial: what it does not hold of these is no fault, but told as `unnamed`.

    Raises ConfigError with every fault that can be told apart.
    """
    problem = "kept changing while they were read"
    for _ in range(_TRIES):
        before = stamp(files)
        try:
            found = _read(files, server=server, names=names, perhaps=perhaps)
        except OSError as error:  # ssl.SSLError, too: replaced between two looks
            problem = f"cannot be used: {error}"
            continue
        if stamp(files) == before:  # else what was checked may not be what was read
            return found
    raise ConfigError([f"tls_cert: {files.certificate}, its key or its CA {problem}"])


def stamp(files: TlsFiles) -> tuple[object, ...]:
    """Differs when one of the files was written or replaced, also by a symbolic link that points elsewhere now."""
    out: list[object] = []
    for path in (files.certificate, files.key, files.ca):
        try:
            found = os.stat(path)
            out += [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]
        except OSError as error:
            out.append(error.errno)
    return tuple(out)


def _read(files: TlsFiles, *, server: bool, names: Sequence[str], perhaps: Sequence[str]) -> Certificate:
    faults: list[str] = []
    chain = _bytes("tls_cert", files.certificate, faults)
    key = _bytes("tls_key", files.key, faults)
    ca = _bytes("tls_ca", files.ca, faults)
    if chain and not _is_pem(chain):
        faults.append(f"tls_cert: {files.certificate} holds no PEM certificate")
    elif chain and key:
        faults += _key_faults(files) or _curve_faults(files, key)
    if ca and not _is_pem(ca):
        faults.append(f"tls_ca: {files.ca} holds no PEM certificate of a CA")
    if faults:
        raise ConfigError(faults)
    facts, why = _handshake(files, server=server)
    if why:
        use = "as TLS server and client" if server else "as TLS client"
        fix = f"it must be valid now, signed by a CA in {files.ca}, and allowed {use}"
        raise ConfigError([f"tls_cert: {files.certificate} would be refused by every peer: {why}; {fix}"])
    found = Certificate(
        chain,
        key,
        ca,
        names=_alternatives(facts, "DNS", "IP Address"),
        uris=_alternatives(facts, "URI"),
        expires_unix_s=float(ssl.cert_time_to_seconds(str(facts["notAfter"]))),
        unnamed=tuple(name for name in perhaps if _handshake(files, server=True, name=name)[1]),
    )
    if server:
        faults = _name_faults(files, found, names)
    if faults:
        raise ConfigError(faults)
    return found


def _bytes(setting: str, path: str, faults: list[str]) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        faults.append(f"{setting}: {path} cannot be read: {error.strerror}")
        return b""
    if not data.strip():
        faults.append(f"{setting}: {path} is empty")
        return b""
    return data


def _is_pem(data: bytes) -> bool:
    try:
        _context(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError):
        return False
    return True


def _key_faults(files: TlsFiles) -> list[str]:
    asked = False

    def password() -> str:
        nonlocal asked
        asked = True
        return ""

    try:
        _context(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(files.certificate, files.key, password)
    except ssl.SSLError as error:
        if asked:
            return [f"tls_key: {files.key} is encrypted: write it without a password, `openssl pkey -in {files.key}`"]
        if error.reason == "KEY_VALUES_MISMATCH":
            return [f"tls_key: {files.key} is not the key of the certificate in {files.certificate}"]
        if error.reason and "SMALL" in error.reason:
            return [f"tls_cert: {files.certificate} has a key that is too small: {error.reason.lower().replace('_', ' ')}"]
        return [f"tls_key: {files.key} holds no PEM private key, or {files.certificate} no whole certificate"]
    except OSError as error:
        return [f"tls_key: {files.key} cannot be read: {error.strerror}"]
    return []


def _curve_faults(files: TlsFiles, key: bytes) -> list[str]:
    """What OpenSSL speaks and gRPC's BoringSSL does not, as tried with grpcio 1.85."""
    body = b"".join(line for line in key.splitlines() if b"-" not in line and b":" not in line)
    with contextlib.suppress(ValueError):
        if any(oid in base64.b64decode(body) for oid in _EDWARDS_OIDS):
            return [f"tls_key: {files.key} is an Edwards-curve key, which gRPC does not speak: use ECDSA P-256, or RSA"]
    return []


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    if protocol == ssl.PROTOCOL_TLS_CLIENT:
        context.check_hostname = False
    return context


def _handshake(files: TlsFiles, *, server: bool, name: str | None = None) -> tuple[dict[str, object], str]:
    """The facts of our certificate as a peer sees it, or why one refuses it. name: as a client expects it."""
    listener, dialler = _context(ssl.PROTOCOL_TLS_SERVER), _context(ssl.PROTOCOL_TLS_CLIENT)
    for context in (listener, dialler):
        context.load_cert_chain(files.certificate, files.key, lambda: "")
        context.load_verify_locations(files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    if not server:
        dialler.verify_mode = ssl.CERT_NONE
    dialler.check_hostname = name is not None
    to_listener, to_dialler = ssl.MemoryBIO(), ssl.MemoryBIO()
    heard = listener.wrap_bio(to_listener, to_dialler, server_side=True)
    try:
        dialled = dialler.wrap_bio(to_dialler, to_listener, server_hostname=name)
    except ValueError:  # UnicodeError, too
        return {}, f"{name!r} is no name of a host"
    for _ in range(_ROUNDS):
        for end in (dialled, heard):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return {}, error.verify_message
            except ssl.SSLError as error:
                return {}, (error.reason or str(error)).lower().replace("_", " ")
        facts = _peer(heard)
        if facts:
            return facts, ""
    return {}, "the handshake does not end"


def _peer(heard: ssl.SSLObject) -> dict[str, object]:
    try:
        return dict(heard.getpeercert() or {})
    except ValueError:  # not done yet
        return {}


def _alternatives(facts: dict[str, object], *kinds: str) -> tuple[str, ...]:
    pairs = facts.get("subjectAltName", ())
    assert isinstance(pairs, tuple)
    return tuple(str(value) for kind, value in pairs if kind in kinds)


def _name_faults(files: TlsFiles, found: Certificate, names: Sequence[str]) -> list[str]:
    """What clients would say. gRPC checks DNS names and addresses only, never a URI."""
    if not found.names:
        has = f"only {', '.join(found.uris)}" if found.uris else "none"
        return [
            f"tls_cert: {files.certificate} holds no DNS name and no IP address ({has}), so no client can check it: "
            "add one, such as the DNS name kvdir, which clients expect with tls_server_name"
        ]
    return [
        f"tls_cert: {files.certificate} is for {', '.join(found.names)}, not for {name}: use a certificate with that name, or "
        "give all clients and servers tls_server_name, a name that is in it"
        for name in names
        if _handshake(files, server=True, name=name)[1]
    ]
