"""Hosts of a small network on this machine: network namespaces on one bridge, with packets dropped by nftables. Needs root.

    with network_of("owner", "reader") as network:
        network.hosts["owner"].prefix            # put before a command to run it there
        network.hosts["reader"].drop(source="owner")           # one way: owner's packets do not reach reader
        network.hosts["reader"].drop(share=0.1)                # loss
        network.hosts["reader"].pass_all()

Namespaces are named after this process and removed at the end, with everything in them. Unix sockets and shared memory are not
of the network: a test outside attaches engines as on one host. `NotPermitted` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

COMMAND_S = 10.0
TABLE = "kvdir"


class NotPermitted(Exception):
    """This machine has no network namespaces for us; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace. address: of its only interface, IPv4."""

    name: str
    namespace: str
    address: str
    network: Network

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)

    def drop(self, *, source: str = "", share: float = 1.0) -> None:
        """Drops what arrives here: from one host or from all, all of it or at random."""
        match = f"ip saddr {self.network.hosts[source].address} " if source else ""
        chance = "" if share >= 1 else f"numgen random mod 1000 < {int(share * 1000)} "
        self._nft(f"add rule inet {TABLE} arriving {match}{chance}drop")

    def pass_all(self) -> None:
        self._nft(f"flush chain inet {TABLE} arriving")

    def begin(self) -> None:
        """An empty filter, before the first rule."""
        self._nft(f"add table inet {TABLE}")
        self._nft(f"add chain inet {TABLE} arriving {{ type filter hook input priority 0 ; policy accept ; }}")

    def _nft(self, command: str) -> None:
        _run(*self.prefix, "nft", command)


@dataclass(frozen=True, slots=True)
class Network:
    hosts: dict[str, Host]


@contextmanager
def network_of(*names: str) -> Iterator[Network]:
    """Raises NotPermitted."""
    for tool, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(tool) is None:
            raise NotPermitted(f"no `{tool}` here: apt-get install {package}")
    network = Network({})
    with ExitStack() as stack:
        try:
            switch = _namespace(stack, "switch")
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            for number, name in enumerate(names, 1):
                network.hosts[name] = _plug_in(stack, network, name, switch, number)
        except subprocess.CalledProcessError as error:
            raise NotPermitted(f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}; run as root") from error
        yield network


def _plug_in(stack: ExitStack, network: Network, name: str, switch: str, number: int) -> Host:
    host = Host(name, _namespace(stack, name), f"10.99.0.{number}", network)
    here = ("ip", "-n", host.namespace)
    _run(*here, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{number}", "netns", switch)
    _run("ip", "-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
    _run(*here, "address", "add", f"{host.address}/24", "dev", "eth0")
    for interface in ("lo", "eth0"):
        _run(*here, "link", "set", interface, "up")
    host.begin()
    return host


def _namespace(stack: ExitStack, name: str) -> str:
    full = f"kvdir-{os.getpid()}-{name}"
    _run("ip", "netns", "add", full)
    stack.callback(_run, "ip", "netns", "delete", full)
    return full


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_S)
