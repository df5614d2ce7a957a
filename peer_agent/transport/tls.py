"""Certificates of the tcp plane: from three settings to credentials that work, or a ConfigError that says which file is wrong.

Both sides of every connection show a certificate that the CA in `ca` signed; who has one is a peer. Names in certificates are
not looked at. The protocol, what is verified and when files are read again: csrc/tls.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdir.errors import ConfigError
from peer_agent import _native


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. certificate: ours first, then intermediate ones. key: not encrypted. ca: certificates of the CAs we trust."""

    certificate: str
    key: str
    ca: str

    def load(self) -> _native.TlsCredentials:
        """Raises ConfigError: OpenSSL 3 is missing, or the files do not fit together or are not valid now."""
        try:
            return _native.TlsCredentials(self.certificate, self.key, self.ca)
        except ValueError as error:
            raise ConfigError([str(error)]) from error
