"""Whether a browser was sent here by a name that is not ours: DNS rebinding.

A page of somebody else's can have its name resolve to 127.0.0.1 and then read what is served there as if it were its own,
because a browser compares names. The Host header still says that name. Nobody can have an address, or localhost, resolve
elsewhere: those are let in, and the names that are given. Does not: say who asks; a program may send any Host it likes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping


def host_fault(header: str | None, *, names: Collection[str] = ()) -> str:
    """Why a request with this Host header is not answered, in words; or empty. names: beside addresses and localhost."""
    host = name_of(header or "")
    if not host:
        return "the Host header is missing or cannot be read"
    if host == "localhost" or host in names or _is_address(host):
        return ""
    return f"this is not served under the name {host[:100]!r}: use its address, such as 127.0.0.1, or localhost"


def foreign_page(headers: Mapping[str, str], *, loopback: bool) -> str:
    """Why a request to an API without identities is not answered, in words; or empty: a page of somebody else's made it.

    Browsers send Origin with whatever a page sends elsewhere; routers send none. loopback: reached from this machine only, so
    by an address of it, or as localhost; elsewhere names are whatever people have given. headers: names in lower case.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if loopback and host and (fault := host_fault(host)):
        return fault
    if origin is not None and origin.partition("://")[2] != host:
        return "a page from elsewhere asks (Origin): this is for routers, which send no Origin"
    return ""


def name_of(header: str) -> str:
    """The name in "name:port", "name" or "[v6]:port", in lower case; empty when it is none of them."""
    if header.startswith("["):
        name, bracket, port = header[1:].partition("]")
        valid = bracket and (not port or (port[0] == ":" and port[1:].isdecimal()))
    else:
        name, colon, port = header.partition(":")
        valid = not colon or port.isdecimal()
    return name.lower().rstrip(".") if valid else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
