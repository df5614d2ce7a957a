"""Lookups for an engine: from the replica of its node, in microseconds; else from a coordinator; else "no hits", and why.

    directory = kvdir.attach(coordinators="10.0.0.5:7400")
    answer = directory.lookup(namespace.digest, fingerprints)     # answer.source, answer.lag_s, answer.reason

Rules: the caller's own mistakes raise (widths, too many fingerprints), everything else is an answer; a lookup ends by its
deadline; coordinators that do not answer cost one lookup its deadline per pause, not every one. Thread-safe. After a fork the
child goes on with the region, and makes connections of its own as far as gRPC can in a forked process: at worst such a call
ends by its deadline. No asyncio; gRPC is imported only where there are coordinators to ask, and not during a lookup.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
import time
import weakref
from dataclasses import replace
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvdir.client.replica_reader import DEAD_AFTER_S, ReplicaReader, ReplicaStatus, nobody
from kvdir.core.answer import Lookup, LookupMode
from kvdir.errors import DeadlineExceeded, InvalidInput, KvdirError, TooLarge, Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.location import MinTrust

if TYPE_CHECKING:
    from kvdir.client.sync import Client
    from kvdir.rpc.tls import Dialer, TlsFiles

DEADLINE_S = 0.2
PAUSE_S = 0.5
PAUSE_MAX_S = 5.0
FAIR_S = 0.02
"""Who waited for less says nothing about the coordinators."""


class Attached:
    """See the module docstring. Use `kvdir.attach`."""

    def __init__(
        self,
        replica: ReplicaReader,
        *,
        coordinators: str = "",
        deadline_s: float = DEADLINE_S,
        tls: TlsFiles | Dialer | None = None,
    ) -> None:
        self._replica = replica
        self._coordinators = ""
        self._deadline_s = deadline_s
        self._tls = tls
        self._client: Client | None = None
        self._inherited: list[Client] = []
        self._connecting = threading.Lock()
        self._failures = 0
        self._skip_until_s = 0.0
        self._failure = ""
        self._closed = False
        self._ask_beside(coordinators)
        _all.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes connections; later lookups are answered by nobody. Idempotent."""
        self._closed = True
        self._drop_client()

    def use(self, path: str, *, coordinators: str = "") -> None:
        """What an agent says: where its region is ("": it keeps none), and whom to ask beside it."""
        self._replica.move(path)
        self._ask_beside(coordinators)

    @property
    def replica(self) -> ReplicaStatus:
        """Whether lookups are answered from shared memory now, and why not."""
        return self._replica.status()

    def lookup(
        self,
        namespace_digest: bytes,
        fingerprints: Fingerprints,
        *,
        mode: LookupMode = LookupMode.SPARSE,
        min_trust: MinTrust = MinTrust.ANY,
        deadline_s: float | None = None,
    ) -> Lookup:
        """Who is said to hold which of the blocks; nodes below min_trust are left out, and counted in `below_trust`.

        deadline_s: for asking a coordinator. Raises InvalidInput and TooLarge, nothing else.
        """
        answer = self.lookup_here(namespace_digest, fingerprints, mode=mode, min_trust=min_trust)
        if not answer.reason or self._closed:
            return answer
        if not self._coordinators:
            return replace(answer, reason=f"{answer.reason}; no coordinators were given")
        began_s = time.monotonic()
        if began_s < self._skip_until_s:
            return replace(answer, reason=f"{answer.reason}; {self._failure}; not asked again yet")
        try:
            client = self._connected()
            wait_s = self._deadline_s if deadline_s is None else deadline_s
            found = client.lookup(namespace_digest, fingerprints, mode=mode, min_trust=min_trust, deadline_s=wait_s)
        except (InvalidInput, TooLarge):
            raise
        except (KvdirError, ValueError) as error:  # ValueError: gRPC's word for a channel closed meanwhile
            self._failed(error, waited_s=time.monotonic() - began_s)
            return replace(answer, reason=f"{answer.reason}; {error}")
        self._failures = 0
        return found

    def lookup_here(
        self,
        namespace_digest: bytes,
        fingerprints: Fingerprints,
        *,
        mode: LookupMode = LookupMode.SPARSE,
        min_trust: MinTrust = MinTrust.ANY,
    ) -> Lookup:
        """As `lookup`, from the replica alone: microseconds whatever happens, for threads that must not wait."""
        if self._closed:
            return nobody(len(fingerprints), "this was closed")
        return self._replica.lookup(namespace_digest, fingerprints, mode=mode, min_trust=min_trust)

    def _failed(self, error: Exception, *, waited_s: float) -> None:
        """Pauses when they were not there, or did not answer in a time that was fair; an error that is an answer does not."""
        self._failure = str(error)
        if isinstance(error, Unavailable) or (isinstance(error, DeadlineExceeded) and waited_s >= FAIR_S):
            self._skip_until_s = time.monotonic() + min(PAUSE_S * 2**self._failures, PAUSE_MAX_S)
            self._failures = min(self._failures + 1, 16)

    def _ask_beside(self, coordinators: str) -> None:
        if coordinators == self._coordinators:
            return
        importlib.import_module("kvdir.client.sync")  # gRPC comes with it, for longer than a lookup may take
        self._coordinators, self._skip_until_s, self._failures = coordinators, 0.0, 0
        self._drop_client()

    def _connected(self) -> Client:
        from kvdir.client.sync import Client, process_name

        client = self._client
        if client is not None:
            return client
        with self._connecting:
            if self._closed:
                raise Unavailable("this was closed")
            if self._client is None:
                self._client = Client(
                    self._coordinators,
                    name=process_name(),
                    deadline_s=self._deadline_s,
                    connect_timeout_s=self._deadline_s,
                    tls=self._tls,
                )
            return self._client

    def _drop_client(self) -> None:
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _forked(self) -> None:
        """In the child: the parent's connections are not ours to close, and its threads may have held the lock."""
        if self._client is not None:
            self._inherited.append(self._client)
        self._client, self._connecting = None, threading.Lock()


_all: weakref.WeakSet[Attached] = weakref.WeakSet()


def _after_fork() -> None:
    for attached in _all:
        attached._forked()


os.register_at_fork(after_in_child=_after_fork)


def attach(
    path: str | PathLike[str] | None = None,
    *,
    coordinators: str = "",
    deadline_s: float = DEADLINE_S,
    max_lag_s: float = math.inf,
    dead_after_s: float = DEAD_AFTER_S,
    tls: TlsFiles | Dialer | None = None,
) -> Attached:
    """Lookups without a call, from the replica that the agent of this node keeps in shared memory.

    path: of its region, as the agent says when it is ready; None: the only one in /dev/shm/kvdir-*.replica. It need not be
    there yet, and may come and go. coordinators: "host:port,..." to ask while it cannot be used. deadline_s: of that.
    max_lag_s: how far an answer from the replica may be behind (`Lookup.lag_s` says it of each). dead_after_s: after so long
    without a sign of life of its writer, the replica is not used.
    tls: for coordinators that want certificates; raises ConfigError when the files cannot be used.
    """
    return Attached(
        ReplicaReader(None if path is None else os.fspath(path), max_lag_s=max_lag_s, dead_after_s=dead_after_s),
        coordinators=coordinators,
        deadline_s=deadline_s,
        tls=_dialer(tls),
    )


def _dialer(tls: TlsFiles | Dialer | None) -> Dialer | None:
    """Reads the files now, so that whoever gave them hears of their faults."""
    if tls is None:
        return None
    from kvdir.rpc.tls import Dialer

    return Dialer.of(tls)
