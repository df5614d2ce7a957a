"""The options of TLS, the same for every command that speaks gRPC; one export serves them all.

Does not: configure daemons; those have settings of the same names (kvdir/server/config.py, peer_agent/server/config.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def tls_options(function: F) -> F:
    """Adds --tls-cert, --tls-key, --tls-ca and --tls-server-name; the command receives `tls`, TlsFiles or None."""

    @_file("--tls-cert", "Where TLS is spoken: our certificate, PEM. All of --tls-cert, --tls-key and --tls-ca, or none.")
    @_file("--tls-key", "Its key, PEM, not encrypted.")
    @_file("--tls-ca", "Certificates of the CAs that sign the servers' certificates.")
    @click.option(
        "--tls-server-name",
        default="",
        envvar="KVDIR_TLS_SERVER_NAME",
        show_envvar=True,
        metavar="NAME",
        help="Name that a server's certificate must hold. Empty: the name or address that is dialled.",
    )
    @functools.wraps(function)
    def command(*args: Any, tls_cert: str, tls_key: str, tls_ca: str, tls_server_name: str, **params: Any) -> Any:
        from kvdir.rpc.certificates import TlsFiles

        return function(*args, tls=TlsFiles.given(tls_cert, tls_key, tls_ca, tls_server_name), **params)

    return command  # type: ignore[return-value]


def _file(flag: str, help: str) -> Callable[[F], F]:
    variable = "KVDIR_" + flag.removeprefix("--").replace("-", "_").upper()
    return click.option(flag, default="", envvar=variable, show_envvar=True, metavar="FILE", help=help)
