"""LookupSource over a region that the main process writes: what a lookup worker answers by itself.

Rules:
- the answer is that of the directory, trust and ages included; what only the directory can do is passed on to the main
  process: lookups with `touch`, unknown namespaces (it knows the words), entries that are being changed at this moment;
- while the main process says nothing, nothing is passed on but unknown namespaces: an answer without touch, or with misses
  where it stopped in the middle of a change, is better than none, and its lag and the states of nodes say how old it is.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from kvdir.core.region_directory import RegionDirectory
from kvdir.errors import TooLarge
from kvdir.rpc.caller import caller
from kvdir.rpc.lookup_codec import NodesEncoder, decode_fingerprints, decode_min_trust, encode_lookup
from kvdir.server.lookup_source import PREFIX
from kvdir.v1 import directory_pb2

SILENT_S = 1.0
"""Without a beat for so long, the main process is not asked; it beats many times a second."""

PassOn = Callable[[directory_pb2.LookupRequest], Awaitable[directory_pb2.LookupResponse]]


@dataclass(slots=True)
class WorkerCounters:
    """As in kvdir.core.admission.Counters, of what was answered here. passed_on: lookups that main was asked for."""

    lookups: int = 0
    lookup_blocks: int = 0
    lookup_hits: int = 0
    lookup_nodes_below_trust: int = 0
    passed_on: int = 0


class RegionSource:
    """pass_on: asks the main process; raises KvdirError."""

    def __init__(self, region: RegionDirectory, pass_on: PassOn, counters: WorkerCounters, *, max_fingerprints: int) -> None:
        self._region = region
        self._pass_on = pass_on
        self._max_fingerprints = max_fingerprints
        self._nodes = NodesEncoder()
        self.counters = counters

    @property
    def silent_s(self) -> float:
        """Since the main process was last alive."""
        beat = self._region.beat()
        return float("inf") if beat is None else beat.silent_s(time.monotonic_ns())

    def lookup(
        self, request: directory_pb2.LookupRequest
    ) -> directory_pb2.LookupResponse | Awaitable[directory_pb2.LookupResponse]:
        fingerprints = decode_fingerprints(request.fingerprints)
        region, now_ns = self._region, time.monotonic_ns()
        beat = region.beat()
        if beat is None or region.stale:
            return self._elsewhere(request)
        main_lives = beat.silent_s(now_ns) < SILENT_S
        scope = region.scope(request.namespace_digest, now_ns, caller().tenants)
        if scope is None or (request.touch and main_lives):
            return self._elsewhere(request)
        asked = len(fingerprints)
        if asked > self._max_fingerprints:
            raise TooLarge(f"{asked} fingerprints in one list, max_fingerprints is {self._max_fingerprints}: split the list")
        answer, torn = region.lookup(
            scope,
            fingerprints,
            beat=beat,
            now_ns=now_ns,
            prefix=request.mode == PREFIX,
            min_trust=decode_min_trust(request.min_trust),
        )
        if torn and main_lives:
            return self._elsewhere(request)
        counters = self.counters
        counters.lookups += 1
        counters.lookup_blocks += asked
        counters.lookup_hits += answer.hits
        counters.lookup_nodes_below_trust += answer.below_trust
        return encode_lookup(replace(answer, lag_s=0.0) if main_lives else answer, self._nodes)

    def _elsewhere(self, request: directory_pb2.LookupRequest) -> Awaitable[directory_pb2.LookupResponse]:
        self.counters.passed_on += 1
        return self._pass_on(request)
