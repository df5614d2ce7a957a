"""Contract of what resolves names for discovery (kvdir.client.discovery.Resolve): the machine's resolver, and fakes of it."""

from __future__ import annotations

from kvdir.client.addresses import checked
from kvdir.client.discovery import Resolve


def check_resolver(resolve: Resolve, *, known: str, unknown: str) -> None:
    """known: a name with at least one record; unknown: one that has none. AssertionError says what does not hold."""
    found = list(resolve(known, 7400))
    assert found, f"{known} has records"
    assert list(checked(found)) == found, "host:port, each once"
    assert all(address.endswith(":7400") for address in found), "with the port that was asked for"
    assert sorted(found) == sorted(resolve(known, 7400)), "the same when asked again"
    for address in found:
        host = address.rpartition(":")[0]
        assert host.startswith("[") == (":" in host.strip("[]")), f"{address}: IPv6 in brackets, IPv4 without"
    try:
        nobody = resolve(unknown, 7400)
    except OSError:
        return
    raise AssertionError(f"{unknown} is an OSError, not {nobody}")
