"""Which coordinators there are. One syntax wherever coordinators are given, several with commas, of any kind mixed:

    host:port                            as written
    dns:///name:port                     every A and AAAA record, asked for again every REFRESH_S (a headless Service)
    k8s:///service.namespace:port        the EndpointSlices of a Service, watched (kubernetes.py); port: number, or its name

Rules: a source that fails, or names nobody, keeps what it last said, and what is the matter can be asked for; who listens
hears of changes only. Each source has a thread, because resolvers block; a list of addresses needs none. Threads are not there
in a forked child: make a Discovery of its own there. Does not: know whether anybody answers at an address.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from kvdir.client.addresses import checked, is_port
from kvdir.errors import InvalidInput
from kvdir.obs.logs import say

if TYPE_CHECKING:
    from kvdir.client.kubernetes import ApiServer

REFRESH_S = 5.0
_JOIN_S = 1.0

log = logging.getLogger("kvdir.discovery")

OnChange = Callable[[tuple[str, ...]], None]
Resolve = Callable[[str, int], Sequence[str]]
"""(name, port) to addresses as host:port, each once. Raises OSError. kvdir/testing/check_resolver.py is its contract."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One address, as written."""

    address: str


@dataclass(frozen=True, slots=True)
class DnsName:
    """All records of a name."""

    name: str
    port: int


@dataclass(frozen=True, slots=True)
class KubernetesService:
    """All endpoints of a Service. port: a number, or the name of one of its ports."""

    service: str
    namespace: str
    port: str


Place = Listed | DnsName | KubernetesService


def parse(spec: str | Sequence[str]) -> tuple[Place, ...]:
    """Asks nobody. Raises InvalidInput for what is no list of coordinators, with the forms that are."""
    parts = spec.split(",") if isinstance(spec, str) else [part for item in spec for part in item.split(",")]
    places = tuple(dict.fromkeys(_place(part.strip()) for part in parts if part.strip()))
    if not places:
        raise InvalidInput("no coordinator address given; write host:port, several with commas")
    return places


def _place(item: str) -> Place:
    kind, dynamic, rest = item.partition(":///")
    if not dynamic:
        (address,) = checked(item)
        return Listed(address)
    host, _, port = rest.rpartition(":")
    if kind == "dns" and host and is_port(port):
        return DnsName(host, int(port))
    service, _, namespace = host.partition(".")
    if kind == "k8s" and port and service and namespace and "." not in namespace:
        return KubernetesService(service, namespace, port)
    raise InvalidInput(f"not coordinators: {item}; write host:port, dns:///name:port or k8s:///service.namespace:port")


class Source(Protocol):
    """Where addresses come from. run: until `stop`, in a thread of its own. interrupt: ends its waiting, from another one."""

    def run(self, said: OnChange, failed: Callable[[str], None], stop: threading.Event) -> None: ...
    def interrupt(self) -> None: ...


class DnsSource:
    """Asks for a name again and again."""

    def __init__(self, place: DnsName, resolve: Resolve, *, refresh_s: float) -> None:
        self._place = place
        self._resolve = resolve
        self._refresh_s = refresh_s

    def run(self, said: OnChange, failed: Callable[[str], None], stop: threading.Event) -> None:
        name, port = self._place.name, self._place.port
        while not stop.is_set():
            try:
                said(tuple(self._resolve(name, port)))
            except (OSError, UnicodeError) as error:
                failed(f"dns:///{name}:{port}: {error}")
            stop.wait(self._refresh_s)

    def interrupt(self) -> None:
        """`stop` wakes it, or the resolver's own timeout."""


class Discovery:
    """See the module docstring. Entered as a context, or closed. Raises InvalidInput for what is no such list."""

    def __init__(
        self,
        spec: str | Sequence[str],
        *,
        resolve: Resolve | None = None,
        refresh_s: float | None = None,
        api: Callable[[], ApiServer] | None = None,
    ) -> None:
        places = parse(spec)
        self._said: dict[int, tuple[str, ...]] = {}
        self._problems: dict[int, str] = {}
        self._listeners: list[OnChange] = []
        self._changed = threading.Condition()
        self._stop = threading.Event()
        sources: list[tuple[int, Source]] = []
        for number, place in enumerate(places):
            match place:
                case Listed():
                    self._said[number] = (place.address,)
                case DnsName():
                    sources.append((number, DnsSource(place, resolve or resolve_name, refresh_s=refresh_s or REFRESH_S)))
                case KubernetesService():
                    sources.append((number, _service_source(place, api)))
        self._known = self._union()
        self._sources = sources
        self._threads = [
            threading.Thread(target=self._run, args=(number, source), name="kvdir-discovery", daemon=True)
            for number, source in sources
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """As known now; empty while no source has said anything."""
        return self._known

    @property
    def listens(self) -> bool:
        """Whether the addresses may change."""
        return bool(self._sources)

    @property
    def problem(self) -> str:
        """Which sources cannot be asked at the moment, and why; empty when all is well."""
        with self._changed:
            return "; ".join(self._problems.values())

    def subscribe(self, listener: OnChange) -> Callable[[], None]:
        """`listener` hears at once what is known, if anything, and then of every change, in the thread of the source.

        Returns what ends that; afterwards it is not called any more.
        """
        with self._changed:
            self._listeners.append(listener)
            if self._known:
                listener(self._known)

        def unsubscribe() -> None:
            with self._changed:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return unsubscribe

    def wait(self, timeout_s: float) -> tuple[str, ...]:
        """Until some address is known, for so long at most."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._known and not self._stop.is_set() and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
        return self._known

    def wait_all(self, timeout_s: float) -> tuple[str, ...]:
        """Until every source has said something, or failed, for so long at most."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while not all(number in self._said or number in self._problems for number, _ in self._sources):
                if (left_s := end_s - time.monotonic()) <= 0:
                    break
                self._changed.wait(left_s)
        return self._known

    def close(self) -> None:
        """Ends the threads. One that is inside the resolver is left to end by itself: it touches nothing any more."""
        self._stop.set()
        with self._changed:
            self._listeners.clear()
            self._changed.notify_all()
        for _, source in self._sources:
            source.interrupt()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _run(self, number: int, source: Source) -> None:
        try:
            source.run(lambda found: self._hear(number, found), lambda words: self._fail(number, words), self._stop)
        except Exception as error:
            self._fail(number, f"a bug, it is asked no more: {error!r}")
            raise

    def _hear(self, number: int, found: tuple[str, ...]) -> None:
        try:
            found = checked(found)
        except InvalidInput as error:
            self._fail(number, f"nobody there: {error}")
            return
        with self._changed:
            if self._problems.pop(number, None):
                say(log, logging.INFO, "discovery is well again")
            self._said[number] = found
            self._changed.notify_all()
            known = self._union()
            if known == self._known or self._stop.is_set():
                return
            say(log, logging.INFO, "coordinators discovered", coordinators=",".join(known))
            self._known = known
            for listener in tuple(self._listeners):
                listener(known)

    def _fail(self, number: int, words: str) -> None:
        with self._changed:
            if self._problems.get(number) != words and not self._stop.is_set():
                kept = ", ".join(self._said.get(number, ()))
                say(log, logging.WARNING, "discovery fails", words=words, goes_on_with=kept or "none")
            self._problems[number] = words
            self._changed.notify_all()

    def _union(self) -> tuple[str, ...]:
        """In the order in which the places were given."""
        return tuple(dict.fromkeys(address for number in sorted(self._said) for address in self._said[number]))


def _service_source(place: KubernetesService, api: Callable[[], ApiServer] | None) -> Source:
    from kvdir.client.kubernetes import ApiServer, EndpointSlices  # with ssl and json, which nobody else here needs

    return EndpointSlices(place.service, place.namespace, place.port, api=api or ApiServer.in_cluster)


def resolve_name(name: str, port: int) -> list[str]:
    """By the resolver of the machine (getaddrinfo(3)), so with its search list and its caches. Sorted. Raises OSError."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = sorted({(family, str(address[0])) for family, _, _, _, address in found})
    return [f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}" for family, host in hosts]
