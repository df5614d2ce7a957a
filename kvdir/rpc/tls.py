"""TLS of the control plane: the one place that opens channels and ports, and decides whether they are encrypted.

    server:  ServerTls(files) ── bind(server, address, tls) ──▶ each handshake asks for the files' newest content
    client:  Dialer(credentials) ── aio(address) / blocking(address) ──▶ a channel with the newest certificate

Rules:
- A unix socket is always plain: the mode of its directory guards it. Anything else is TLS when there are credentials; both
  sides show certificates. There is no fallback to plaintext, in neither direction.
- Files are looked at again for every handshake and dial. What cannot be used is said (`remark`, log); the last good one stays.
- A connection that is open goes on with the certificate that it was opened with, also past its end; `Dialer.generation` tells
  holders of channels that a new one would have a newer certificate.
Does not: know identities or roles (caller.py). What of the server's name is checked, and what is not: docs/adr/0022.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from kvdir.errors import ConfigError
from kvdir.obs.logs import say
from kvdir.obs.tally import Tally
from kvdir.rpc.certificates import Certificate, TlsFiles, read_certificate, stamp
from kvdir.rpc.channel import Options, wait_ready, wait_ready_blocking

__all__ = ["PLAINTEXT", "Certificate", "Credentials", "Dialer", "ServerTls", "TlsFiles", "bind"]

log = logging.getLogger("kvdir.tls")

SOON_S = 24 * 3600.0
"""A certificate that ends so soon is remarked on."""
LOOK_S = 1.0
"""So often holders of channels look whether there is a newer certificate."""
HANDSHAKE_MS = 3_000
"""Longest a connect may take with its handshake, of which a server manages some hundreds a second when all come at once."""
_CONNECT = "grpc.min_reconnect_backoff_ms"
RETRY_S = 5.0
"""So often files that could not be used are tried again though they did not change: it may have been the clock, or a mount."""


class Credentials:
    """Three files and their newest good content. Thread-safe. Raises ConfigError at first only; arguments: read_certificate.

    clock: unix time. generation: goes up with each renewal. failure: why changed files are not used yet, in words.
    """

    def __init__(
        self, files: TlsFiles, *, server: bool = False, names: Sequence[str] = (), perhaps: Sequence[str] = ()
    ) -> None:
        self.clock = time.time
        self.files = files
        self.generation = 0
        self.failure = ""
        self.reloads = 0
        self.failed_reloads = 0
        self._read = partial(read_certificate, files, server=server, names=tuple(names), perhaps=tuple(perhaps))
        self._lock = threading.Lock()
        self._seen = stamp(files)
        self._looked_s = self._retry_s = time.monotonic()
        self._certificate = self._read()

    def current(self, *, within_s: float = 0.0) -> Certificate:
        """Looks at the files unless that was done within_s. A failed renewal leaves the last good certificate."""
        now_s = time.monotonic()
        if now_s - self._looked_s < within_s:
            return self._certificate
        with self._lock:
            self._looked_s = now_s
            seen = stamp(self.files)  # before reading: a change in between is seen next time
            if seen != self._seen or (self.failure and now_s >= self._retry_s):
                self._seen, self._retry_s = seen, now_s + RETRY_S
                self._reload()
            return self._certificate

    @property
    def expires_unix_s(self) -> float:
        """When the certificate that is in use ends."""
        return self._certificate.expires_unix_s

    def watched_by(self, tally: Tally) -> None:
        """Its figures are exposed from now on."""
        tally.watch("tls_expires_timestamp_seconds", lambda: self.current(within_s=LOOK_S).expires_unix_s, "grpc")
        tally.watch("tls_fault", lambda: float(bool(self.failure)))
        tally.watch("tls_reloads_total", lambda: self.reloads, "used")
        tally.watch("tls_reloads_total", lambda: self.failed_reloads, "refused")

    def fault(self) -> str:
        """Why nobody can connect any more, in words; empty while they can."""
        late_s = self.clock() - self.current(within_s=LOOK_S).expires_unix_s
        if late_s <= 0:
            return ""
        return f"tls_cert: {self.files.certificate} expired {late_s:.0f} s ago: {self.failure or 'renew it'}"

    def remark(self) -> str:
        """What is going to be a fault, in words: files that cannot be used, an end that is near."""
        found = self.current(within_s=LOOK_S)
        left_s = found.expires_unix_s - self.clock()
        said = [f"renewed certificates are not used: {self.failure}"] if self.failure else []
        if 0 < left_s < SOON_S:
            said.append(f"tls_cert: {self.files.certificate} expires in {left_s / 3600:.1f} h")
        if found.unnamed:
            said.append(
                f"tls_cert: {self.files.certificate} is for {', '.join(found.names)}, not for {', '.join(found.unnamed)}: "
                "clients that dial that need tls_server_name"
            )
        return f"({'; '.join(said)})" if said else ""

    def _reload(self) -> None:
        try:
            self._certificate = self._read()
        except ConfigError as error:
            said = "; ".join(error.faults)
            if said != self.failure:
                say(log, logging.ERROR, "certificate not renewed", reason=said, fix="the last good one is used meanwhile")
            self.failure = said
            self.failed_reloads += 1
            return
        self.failure = ""
        self.reloads += 1
        self.generation += 1
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._certificate.expires_unix_s))
        say(log, logging.INFO, "certificate renewed", file=self.files.certificate, expires=ends)


class ServerTls(Credentials):
    """Credentials of a process that listens, and of its own calls. names: that clients check. perhaps: that they may dial."""

    def __init__(self, files: TlsFiles, *, names: Sequence[str] = (), perhaps: Sequence[str] = ()) -> None:
        super().__init__(files, server=True, names=names, perhaps=perhaps)

    def grpc(self) -> grpc.ServerCredentials:
        """For one server, which asks for the newest content at each handshake. Clients must show a certificate."""
        given = self.current()

        def newest() -> Any:  # gRPC takes None for "go on with what you have", and its stubs do not know
            nonlocal given
            found = self.current()
            if found is given:
                return None
            given = found
            return _configuration(found)

        return grpc.dynamic_ssl_server_credentials(_configuration(given), newest, require_client_authentication=True)


class Dialer:
    """Opens channels, with TLS when there are credentials. One for all channels of a process or client.

    via: a unix socket that leads there whatever is dialled, for calls of a process to itself.
    """

    def __init__(self, credentials: Credentials | None = None, *, via: str = "") -> None:
        self._credentials = credentials
        self._via = via
        self._server_name = credentials.files.server_name if credentials is not None else ""
        self._made: tuple[Certificate, grpc.ChannelCredentials] | None = None

    @classmethod
    def of(cls, tls: TlsFiles | Dialer | None) -> Dialer:
        """For a client. None: plaintext. Raises ConfigError: the files cannot be used."""
        if tls is None:
            return PLAINTEXT
        return cls(Credentials(tls)) if isinstance(tls, TlsFiles) else tls

    def secures(self, address: str) -> bool:
        """Whether a channel to it is TLS."""
        return self._credentials is not None and not address.startswith("unix:")

    def patience_s(self, address: str, connect_s: float) -> float:
        """For a connection in the background, which would rather wait its turn than have its handshake begin anew."""
        return max(connect_s, HANDSHAKE_MS / 1000) if self.secures(address) else connect_s

    @property
    def generation(self) -> int:
        """A channel opened under another one has an older certificate. Looks at the files at most every LOOK_S."""
        if self._credentials is None:
            return 0
        self._credentials.current(within_s=LOOK_S)
        return self._credentials.generation

    def aio(self, address: str, *, options: Options, server_name: str = "") -> grpc.aio.Channel:
        """server_name: that this server's certificate must hold; empty: as for all."""
        if not self.secures(address):
            return grpc.aio.insecure_channel(self._via or address, options=options)
        name = server_name or self._server_name
        return grpc.aio.secure_channel(address, self._channel_credentials(), options=_secured(options, name))

    async def connected(self, channel: grpc.aio.Channel, *, target: str, timeout_s: float) -> None:
        """See wait_ready."""
        await wait_ready(channel, target=target, timeout_s=timeout_s, secure=self.secures(target))

    def connected_blocking(self, channel: grpc.Channel, *, target: str, timeout_s: float) -> None:
        """See wait_ready_blocking."""
        wait_ready_blocking(channel, target=target, timeout_s=timeout_s, secure=self.secures(target))

    def blocking(self, address: str, *, options: Options) -> grpc.Channel:
        if not self.secures(address):
            return grpc.insecure_channel(self._via or address, options=options)
        return grpc.secure_channel(address, self._channel_credentials(), options=_secured(options, self._server_name))

    def _channel_credentials(self) -> grpc.ChannelCredentials:
        assert self._credentials is not None
        found, made = self._credentials.current(), self._made
        if made is None or made[0] is not found:
            made = self._made = (found, grpc.ssl_channel_credentials(found.ca, found.key, found.chain))
        return made[1]


PLAINTEXT = Dialer()


def bind(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> int:
    """Has the server listen. Returns the port (of a unix socket: 1), or 0 when the address cannot be had."""
    try:
        if tls is None or address.startswith("unix:"):
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.grpc())
    except RuntimeError:
        return 0


def _configuration(found: Certificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.chain)], found.ca)


def _secured(options: Options, server_name: str) -> Options:
    """gRPC gives a connect, handshake included, as long as its shortest reconnect pause (connection-backoff.md)."""
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    kept = (option for option in options if option[0] != _CONNECT)
    return (*kept, (_CONNECT, HANDSHAKE_MS), *named)
