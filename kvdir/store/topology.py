"""Which server has a slot: one server, the master that Sentinels name, or the masters of a cluster.

Owns that knowledge and how to learn it anew. `learn` asks through `Ask`, which has the connections and the deadline; it raises
StoreUnavailable with the reason when nobody could say, so that the caller tries again until its deadline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from kvdir.store.base import StoreRefused, StoreUnavailable
from kvdir.store.reply import Argument, ReplyError
from kvdir.store.slots import SLOTS
from kvdir.store.url import Kind, StoreUrl

Address = tuple[str, int]
Ask = Callable[[Address, tuple[Argument, ...]], Awaitable[object]]
"""Sends one command to an address; a ReplyError or StoreUnavailable is raised."""


class Topology(Protocol):
    """Before the first `learn` nothing is known."""

    def address(self, slot: int) -> Address:
        """Who has the slot. Raises StoreUnavailable for one that nobody has."""

    def masters(self) -> tuple[Address, ...]: ...

    def gaps(self) -> str:
        """Slots that nobody has, in words; empty when there are none."""

    async def learn(self, ask: Ask) -> None: ...


def topology_of(url: StoreUrl) -> Topology:
    match url.kind:
        case Kind.SINGLE:
            return Single(url.addresses[0])
        case Kind.SENTINEL:
            return Sentinels(url.addresses, url.service)
        case Kind.CLUSTER:
            return Cluster(url.addresses)


class Single:
    """One server has everything."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def address(self, slot: int) -> Address:
        return self._address

    def masters(self) -> tuple[Address, ...]:
        return (self._address,)

    def gaps(self) -> str:
        return ""

    async def learn(self, ask: Ask) -> None:
        """Nothing to learn."""


class Sentinels:
    """The master that the first Sentinel that answers names."""

    def __init__(self, sentinels: tuple[Address, ...], service: str) -> None:
        self._sentinels = sentinels
        self._service = service
        self._master: Address | None = None

    def address(self, slot: int) -> Address:
        if self._master is None:
            raise StoreUnavailable(f"no Sentinel has named the master of {self._service!r} yet")
        return self._master

    def masters(self) -> tuple[Address, ...]:
        return (self._master,) if self._master else ()

    def gaps(self) -> str:
        return ""

    async def learn(self, ask: Ask) -> None:
        reasons = []
        for sentinel in self._sentinels:
            try:
                reply = await ask(sentinel, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service))
            except (StoreUnavailable, ReplyError) as error:
                reasons.append(str(error))
                continue
            if isinstance(reply, list) and len(reply) == 2:
                self._master = (reply[0].decode(), int(reply[1]))
                return
            reasons.append(f"{sentinel[0]}:{sentinel[1]} knows no master named {self._service!r}")
        raise StoreUnavailable(f"no Sentinel names a master: {'; '.join(reasons)}")


class Cluster:
    """Masters by slot, as CLUSTER SLOTS of any node has it."""

    def __init__(self, seeds: tuple[Address, ...]) -> None:
        self._seeds = seeds
        self._masters: tuple[Address, ...] = ()
        self._by_slot: list[int] = [-1] * SLOTS

    def address(self, slot: int) -> Address:
        number = self._by_slot[slot]
        if number < 0:
            raise StoreUnavailable(f"no master of the cluster serves slot {slot}: {self.gaps() or 'nothing is known yet'}")
        return self._masters[number]

    def masters(self) -> tuple[Address, ...]:
        return self._masters

    def gaps(self) -> str:
        missing = [slot for slot, number in enumerate(self._by_slot) if number < 0]
        ranges: list[list[int]] = []
        for slot in missing:
            if ranges and ranges[-1][1] == slot - 1:
                ranges[-1][1] = slot
            else:
                ranges.append([slot, slot])
        shown = ", ".join(f"{first}-{last}" for first, last in ranges[:4]) + (" and more" if len(ranges) > 4 else "")
        return f"slots {shown} are served by no master: see redis-cli --cluster check and fix" if ranges else ""

    async def learn(self, ask: Ask) -> None:
        reasons = []
        for address in dict.fromkeys((*self._masters, *self._seeds)):
            try:
                reply = await ask(address, ("CLUSTER", "SLOTS"))
            except ReplyError as error:
                if "cluster support disabled" in str(error):
                    raise StoreRefused(f"{address[0]}:{address[1]} is no cluster node: use redis:// for one server") from error
                reasons.append(str(error))
                continue
            except StoreUnavailable as error:
                reasons.append(str(error))
                continue
            self._take(reply, address)
            return
        raise StoreUnavailable(f"no node of the cluster says who has which slots: {'; '.join(reasons)}")

    def _take(self, reply: object, asked: Address) -> None:
        numbers: dict[Address, int] = {}
        by_slot = [-1] * SLOTS
        assert isinstance(reply, list)
        for first, last, (host, port, *_), *_replicas in reply:
            address = ((host or b"").decode() or asked[0], port)
            by_slot[first : last + 1] = [numbers.setdefault(address, len(numbers))] * (last + 1 - first)
        self._masters, self._by_slot = tuple(numbers), by_slot
