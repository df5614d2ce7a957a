"""Certificates for tests and benches, made by the openssl tool. Never for production: their keys lie beside them, unprotected.

What is made, and who signs whom: certificates.sh.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import ssl
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvdir.errors import KvdirError
from kvdir.rpc.certificates import TlsFiles

SCRIPT = Path(__file__).with_name("certificates.sh")


@dataclass(frozen=True, slots=True)
class Certificates:
    """A directory as certificates.sh fills it."""

    directory: Path

    def files(self, name: str, *, ca: str = "ca") -> TlsFiles:
        certificate, key, trusted = (str(self.directory / file) for file in (f"{name}.pem", f"{name}.key", f"{ca}.pem"))
        return TlsFiles(certificate, key, trusted)

    def python_server(self, name: str) -> ssl.SSLContext:
        """The same TLS as ours, spoken by Python's ssl module."""
        return self._python(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), name)

    def python_client(self, name: str | None) -> ssl.SSLContext:
        """None: without a certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._python(context, name)

    def _python(self, context: ssl.SSLContext, name: str | None) -> ssl.SSLContext:
        context.load_verify_locations(self.directory / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        if name is not None:
            context.load_cert_chain(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        return context


def make_certificates(directory: Path, *more: str) -> Certificates:
    """Fills `directory`, which it creates. more: paths of further identities. Raises KvdirError without the openssl tool."""
    if shutil.which("openssl") is None:
        raise KvdirError("certificates for tests need the openssl tool: apt-get install openssl (Debian, Ubuntu)")
    subprocess.run(["sh", SCRIPT, directory, *more], check=True, capture_output=True)
    return Certificates(directory)


@functools.cache
def shared_certificates() -> Certificates:
    """One set for this process, gone at its end."""
    directory = tempfile.mkdtemp(prefix="kvdir-certificates-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return make_certificates(Path(directory))


def install(source: TlsFiles, target: TlsFiles) -> None:
    """Puts the content of one set of files in place of another, each at once, as who renews certificates does."""
    for old, new in ((target.certificate, source.certificate), (target.key, source.key), (target.ca, source.ca)):
        made = Path(old + ".new")
        shutil.copyfile(new, made)
        made.replace(old)
