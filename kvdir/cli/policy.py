"""`kvdir policy`: is this file a policy, and what does it say; `kvdir whoami`: what a coordinator takes me for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdir.cli.output import CommandFailed, emit, facts, output_option, stack, table
from kvdir.cli.query import client_options

if TYPE_CHECKING:
    from kvdir.client.sync import Client
    from kvdir.core.policy import Entry, Identity, Policy


@click.group()
def policy() -> None:
    """Checks policy files: who may do what, by certificate (docs/security.md)."""


@policy.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--as", "who", metavar="URI|NAME", help="What a certificate with this SPIFFE id or name may do.")
@output_option
def check(file: Path, who: str | None, output: str) -> None:
    """Every fault of a policy file, or a table of what it says.

    \b
    Examples:
      kvdir policy check policy.toml
      kvdir policy check policy.toml --as spiffe://example.org/agent/node-7
    """
    from kvdir.rpc.policy_file import read_policy

    found = read_policy(file, [])
    if who is None:
        entries, local = [_entry(found, item) for item in found.entries or ()], _identity(found, found.local)
        emit({"identities": entries, "local": local}, lambda: _table(entries, local), output=output)
        return
    identity = found.identify([who], []) if who.startswith("spiffe://") else found.identify([], [who])
    if identity is None:
        raise CommandFailed(
            f"no identity of {file} has the certificate {who}: it may do nothing; add an [[identity]] with a pattern for it",
            slug="forbidden",
        )
    one = _identity(found, identity)
    emit(one, lambda: facts({key: _words(value) for key, value in one.items()}), output=output)


@policy.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def digest(file: Path) -> None:
    """The digest of the salt in a file, as policies and namespaces have it. The salt cannot be had from it."""
    from kvdir.rpc.policy_file import digest_of_file

    try:
        click.echo(f"salt:{digest_of_file(file)}")
    except ValueError as error:
        raise CommandFailed(f"{file}: {error}", slug="invalid-input") from None


@click.command()
@output_option
@client_options
def whoami(client: Client, output: str) -> None:
    """What a coordinator takes me for, by my certificate, and what I may do there.

    \b
    Examples:
      kvdir whoami --coordinator 10.0.0.5:7400 --tls-cert me.pem --tls-key me.key --tls-ca ca.pem
    """
    found = client.who_am_i()
    document = {
        "coordinator": found.coordinator,
        "identity": found.identity,
        "certificate": found.certificate,
        "roles": list(found.roles),
        "tenants": list(found.tenants),
        "store": list(found.stores),
        "nodes": list(found.nodes),
        "remark": found.remark,
    }
    emit(document, lambda: facts({key: _words(value) for key, value in document.items()}), output=output)


def _entry(found: Policy, item: Entry) -> dict[str, Any]:
    return {
        "name": item.name,
        "certificates": [pattern.text for pattern in item.patterns],
        "roles": sorted(item.roles),
        "tenants": found.tenant_names(item.tenants),
        "store": found.tenant_names(item.stores),
        "nodes": list(item.nodes),
    }


def _identity(found: Policy, identity: Identity) -> dict[str, Any]:
    return {
        "name": identity.name,
        "roles": sorted(identity.roles),
        "tenants": found.tenant_names(identity.tenants),
        "store": found.tenant_names(identity.stores),
        "nodes": ["*"] if identity.nodes.every else sorted(identity.nodes.names),
    }


def _table(entries: Iterable[dict[str, Any]], local: dict[str, Any]) -> object:
    heads = ["identity", "certificates", "roles", "sees tenants", "stores for", "as nodes"]
    keys = ("name", "certificates", "roles", "tenants", "store", "nodes")
    rows = [tuple(_words(item[key]) for key in keys) for item in [*entries, local | {"certificates": "(unix sockets)"}]]
    return stack(table(heads, rows, caption="the first that matches counts; what none matches may do nothing"))


def _words(value: object) -> str:
    return ", ".join(map(str, value)) or "-" if isinstance(value, list) else str(value) or "-"
