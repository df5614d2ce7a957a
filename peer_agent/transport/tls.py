"""Certificates of the tcp plane: from files to credentials that work, or a ConfigError that says which file is wrong.

Both sides of every connection show a certificate that the CA in `ca` signed; who has one is a peer. Names in certificates are
not looked at. The protocol, what is verified and when files are read again: csrc/tls.hpp.
"""

from __future__ import annotations

from kvdir.errors import ConfigError
from kvdir.rpc.certificates import TlsFiles
from peer_agent import _native


def plane_credentials(files: TlsFiles) -> _native.TlsCredentials:
    """Raises ConfigError: OpenSSL 3 is missing, or the files do not fit together or are not valid now."""
    try:
        return _native.TlsCredentials(files.certificate, files.key, files.ca)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
