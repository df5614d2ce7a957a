"""Keeps a replica: a region on this host that holds what some coordinator's directory holds, for lookups without a call.

Rules:
- any coordinator will do; one that answers is followed until it fails, then the next, at its position if it is the same log;
- another log means a snapshot, into a region beside the one that is served; that one is served on, visibly ageing, until the
  new one is whole, and while its coordinator is still warming (at most WARM_WAIT_S): no hits vanish for a fail-over;
- whatever fails is a reason in `figures`, and another try; nothing of it reaches the engine;
- every wait ends: a coordinator that says nothing for `silence_s` (it sends beats) is given up.
Interleaving: one task follows, one writes the beat page; both on one loop, and a message is applied in pieces of YIELD_BLOCKS,
between which others run. Applying: core/replica.py. Reading: client/attached.py. Reasons: docs/adr/0011.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final

import grpc
import grpc.aio

from kvdir.client.addresses import Addresses
from kvdir.client.publisher import Backoff
from kvdir.client.replica_figures import ReplicaCounters, ReplicaFigures
from kvdir.core.feed_items import Page, Removed, Response, Start, Stored, Welcome
from kvdir.core.region_roster import RegionRoster
from kvdir.core.replica import CreditLine, FeedFault, ReplicaState, expected_blocks
from kvdir.core.roster import Beat
from kvdir.errors import KvdirError, RemoteProtocolError
from kvdir.index import RegionError, RegionIndex, create_region
from kvdir.obs.logs import say
from kvdir.rpc.channel import DEFAULT_MAX_MESSAGE_BYTES, client_options
from kvdir.rpc.status import from_rpc_error
from kvdir.rpc.tls import PLAINTEXT, Dialer
from kvdir.rpc.watch_codec import decode_response, encode_credit, encode_start
from kvdir.v1 import directory_pb2

log = logging.getLogger("kvdir.replica")

BEAT_S: Final = 0.1
WARM_WAIT_S: Final = 10.0
YIELD_BLOCKS: Final = 8_192
SPOILT: Final = Backoff(base_s=0.25, limit_s=30.0)
"""After a copy that had to be given up."""
PATIENCE_MAX_S: Final = 30.0
"""However seldom a coordinator means to send beats."""
METHOD: Final = "/kvdir.v1.Directory/Watch"


@dataclass(slots=True)
class _Copy:
    """A region, what was applied to it, where that came from, and of which namespaces it is."""

    region: RegionIndex
    roster: RegionRoster
    state: ReplicaState
    source: str
    digests: frozenset[bytes]


class Replica:
    """See the module docstring. `open` takes the path, `run` works until cancelled.

    addresses: of coordinators; an `Addresses` may change meanwhile. digests: of namespaces; none: all. name: who watches.
    max_bytes: of the region's file, of which there are two during a snapshot; 0: no limit. window_bytes: under way at most.
    """

    def __init__(
        self,
        addresses: Addresses | str | Sequence[str],
        *,
        path: str | PathLike[str],
        digests: Sequence[bytes] = (),
        name: str = "",
        max_bytes: int = 0,
        mode: int = 0o600,
        window_bytes: int = 4 * 2**20,
        connect_timeout_s: float = 1.0,
        silence_s: float = 2.0,
        backoff: Backoff | None = None,
        rng: random.Random | None = None,
        dialer: Dialer = PLAINTEXT,
    ) -> None:
        self._addresses = addresses if isinstance(addresses, Addresses) else Addresses(addresses, name=name)
        self._path = path
        self._digests = frozenset(digests)
        self._name = name
        self._max_bytes = max_bytes
        self._mode = mode
        self._window_bytes = window_bytes
        self._connect_timeout_s = connect_timeout_s
        self._silence_s = self._patience_s = silence_s
        self._backoff = backoff or Backoff()
        self._dialer = dialer
        self._rng = rng or random.Random()
        self._counters = ReplicaCounters()
        self._empty: RegionIndex | None = None
        self._served: _Copy | None = None
        self._building: _Copy | None = None
        self._anew = False
        self._spoilt = False
        self._connected = False
        self._last_error = ""
        self._said: dict[str, str] = {}

    def open(self) -> None:
        """Takes the path. Raises RegionError: somebody else writes there, no room, no permission."""
        if self._empty is None:
            self._empty = create_region(self._path, max_bytes=self._max_bytes, mode=self._mode)

    def choose(self, digests: Iterable[bytes]) -> None:
        """Other namespaces from now on; none: all. The copy is made anew, and the one that is served ages until then."""
        self._digests = frozenset(digests)

    def close(self) -> None:
        """The region goes; readers are told."""
        for copy in (self._building, self._served):
            if copy is not None:
                copy.region.close()
        if self._empty is not None:
            self._empty.close()
        self._empty = self._building = self._served = None

    async def run(self) -> None:
        """Until cancelled. Owns its tasks, connection and regions; leaves none of them behind. Raises RegionError as `open`."""
        self.open()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(), name="replica-follow")
                tasks.create_task(self._keep(), name="replica-beat")
        finally:
            self.close()

    def figures(self) -> ReplicaFigures:
        """What there is now."""
        copy, counters = self._served, self._counters
        state = copy.state if copy else None
        stats = copy.region.stats() if copy else None
        live = [each.state for each in (self._served, self._building) if each is not None]
        return ReplicaFigures(
            complete=state is not None,
            connected=self._connected,
            source=copy.source if copy else "",
            lag_s=state.lag_s(time.monotonic()) if state else math.inf,
            blocks=stats.blocks if stats else 0,
            bytes=stats.bytes if stats else 0,
            nodes=state.nodes if state else 0,
            position=state.position if state else 0,
            incomplete=state.incomplete if state else False,
            warming=state.warming if state else True,
            calls=counters.calls,
            snapshots=counters.snapshots,
            resumes=counters.resumes,
            ends=counters.ends,
            faults=counters.faults,
            received_bytes=counters.received_bytes,
            applied_blocks=counters.applied_blocks + sum(each.blocks_applied for each in live),
            lost_blocks=counters.lost_blocks + sum(each.blocks_lost for each in live),
            last_error=self._last_error,
        )

    # -- following -------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        failures = spoilt = 0
        while True:
            order, began_s = self._addresses.order(now_s=time.monotonic()), time.monotonic()
            self._spoilt = False
            welcomed = bool(order) and await self._try(order[0])
            failures = 0 if welcomed else failures + 1
            if self._spoilt:
                # A snapshot that leads nowhere is dear to both ends, and the next one may well end like it.
                spoilt = spoilt + 1 if time.monotonic() - began_s < SPOILT.limit_s else 0
                await asyncio.sleep(SPOILT.interval_s(spoilt, self._rng))
                continue
            order = self._addresses.order(now_s=time.monotonic())
            if not order or self._addresses.put_off(order[0], now_s=time.monotonic()):
                await asyncio.sleep(self._backoff.interval_s(failures, self._rng))

    async def _try(self, address: str) -> bool:
        """One call, from connect to its end. Whether the coordinator welcomed us."""
        before = self._counters.snapshots + self._counters.resumes
        try:
            await self._watch(address)
        except grpc.RpcError as error:
            self._failed(address, str(from_rpc_error(error, target=address)))
        except (FeedFault, RegionError, ValueError) as error:  # ValueError: what no region can be made for
            self._spoilt = True
            self._counters.faults += isinstance(error, FeedFault)
            self._failed(address, str(error))
        except KvdirError as error:
            self._failed(address, str(error))
        except MemoryError:
            self._spoilt = True
            self._failed(address, f"{self._path}: no room left; make /dev/shm larger, or replicate fewer namespaces")
        except TimeoutError:
            self._failed(address, f"nothing heard for {self._patience_s:g} s")
        finally:
            self._connected = False
            self._discard_building()
        self._addresses.failed(address, now_s=time.monotonic())
        return self._counters.snapshots + self._counters.resumes > before

    async def _watch(self, address: str) -> None:
        options = client_options(max_message_bytes=DEFAULT_MAX_MESSAGE_BYTES)
        async with self._dialer.aio(address, options=options) as channel:
            patience_s = self._dialer.patience_s(address, self._connect_timeout_s)
            await self._dialer.connected(channel, target=address, timeout_s=patience_s)
            call: Any = channel.stream_stream(
                METHOD, request_serializer=directory_pb2.WatchRequest.SerializeToString, response_deserializer=None
            )()
            self._counters.calls += 1
            self._patience_s = self._silence_s
            async with asyncio.timeout(self._patience_s) as patience:
                await self._hear(call, address, patience)

    async def _hear(self, call: Any, address: str, patience: asyncio.Timeout) -> None:
        clock = asyncio.get_running_loop().time
        credit, start = CreditLine(self._window_bytes, now_s=time.monotonic()), self._start()
        await _write(call, encode_start(start))
        copy: _Copy | None = None
        while (data := await call.read()) is not grpc.aio.EOF:
            patience.reschedule(clock() + self._patience_s)
            try:
                response = decode_response(data)
            except RemoteProtocolError:
                self._spoilt = True
                self._no_way_on(copy)  # or the same would be said again
                raise
            credit.received(len(data))
            self._counters.received_bytes += len(data)
            if response.welcome is not None:
                copy = self._welcomed(response.welcome, address, credit, frozenset(start.digests))
                self._patience_s = max(self._silence_s, min(10 * response.welcome.beat_interval_s, PATIENCE_MAX_S))
            if copy is not None:
                await self._apply(copy, response, credit)
                self._swap(copy)
            if response.end is not None:
                self._counters.ends += 1
                self._anew |= response.end.begin_anew
                self._failed(address, response.end.reason)
                return
            if copy is None:
                raise RemoteProtocolError("the coordinator says something before its welcome")
            if self._digests != start.digests:
                return  # others are wanted now: to begin anew
            if response.beat is not None or credit.due:
                await _write(call, encode_credit(credit.grant(now_s=time.monotonic())))
        raise RemoteProtocolError("the coordinator ended the call without a word")

    def _start(self) -> Start:
        served = self._served
        if served is None or self._anew or served.digests != self._digests:
            return Start(self._name, digests=self._digests, credit_bytes=self._window_bytes)
        state = served.state
        return Start(self._name, state.welcome.log_id, state.position, self._digests, self._window_bytes)

    def _welcomed(self, welcome: Welcome, address: str, credit: CreditLine, digests: frozenset[bytes]) -> _Copy:
        self._connected = True
        self._addresses.answered(address)
        self._last_error = ""
        self._said.pop(address, None)
        if not welcome.snapshot:
            served = self._served
            if served is None or self._anew or welcome.log_id != served.state.welcome.log_id:
                raise FeedFault("it goes on in a log that we do not follow")
            self._counters.resumes += 1
            say(log, logging.INFO, "replica goes on", address=address)
            return served
        self._counters.snapshots += 1
        before = self._served.region if self._served else self._empty
        assert before is not None, "open() comes before run()"
        region = before.successor(expected_blocks=expected_blocks(welcome), seed=welcome.seed)
        roster = RegionRoster(region)
        state = ReplicaState(region, roster, welcome, started_s=credit.sent_s(0))
        source = f"{welcome.coordinator} ({address})" if welcome.coordinator else address
        self._building = _Copy(region, roster, state, source, digests)
        say(log, logging.INFO, "replica takes a snapshot", address=address, blocks=welcome.blocks)
        return self._building

    async def _apply(self, copy: _Copy, response: Response, credit: CreditLine) -> None:
        """A message, with others in between; a message may take milliseconds."""
        try:
            await self._apply_whole(copy.state, response, credit)
        except BaseException as error:  # cancelled, too: half of it was applied, so it must not be said again
            self._no_way_on(copy)
            if isinstance(error, FeedFault):
                copy.state.doubt(str(error))
            raise

    def _no_way_on(self, copy: _Copy | None) -> None:
        """What follows the copy's position cannot be had: it has to be made anew."""
        self._anew |= copy is not None and copy is self._served

    async def _apply_whole(self, state: ReplicaState, response: Response, credit: CreditLine) -> None:
        blocks = 0
        for item in response.items:
            state.apply(item, time.monotonic())
            if isinstance(item, Stored | Removed):
                blocks += len(item.packed) // 8
            elif isinstance(item, Page):
                blocks += len(item.keys) // 8
            if blocks > YIELD_BLOCKS:
                blocks = 0
                await asyncio.sleep(0)
        if response.position:
            state.reached(response.position)
        if response.beat is not None:
            state.beat(response.beat, credit)

    def _swap(self, copy: _Copy) -> None:
        """Serves a copy that has become whole in place of the older one."""
        if copy is not self._building or not copy.state.complete:
            return
        old, now_s = self._served, time.monotonic()
        if old is not None and copy.state.warming and old.state.lag_s(now_s) < WARM_WAIT_S:
            return
        self._beat(copy)
        copy.region.publish()  # which retires the older one
        self._served, self._building, self._anew = copy, None, False
        if old is not None:
            self._count(old.state)
            old.region.close()
        elif self._empty is not None:
            self._empty.close()
            self._empty = None
        say(log, logging.INFO, "replica is whole", source=copy.source)

    def _discard_building(self) -> None:
        if self._building is not None:
            self._count(self._building.state)
            self._building.region.close()
            self._building = None

    def _count(self, state: ReplicaState) -> None:
        self._counters.applied_blocks += state.blocks_applied
        self._counters.lost_blocks += state.blocks_lost

    def _failed(self, address: str, why: str) -> None:
        """The same is said once of a coordinator until it answers, however many take turns at failing."""
        self._last_error = why if why.startswith(address) else f"{address}: {why}"
        if self._said.get(address) != self._last_error:
            say(log, logging.INFO, "replica not fed", address=address, error=self._last_error)
        self._said = {known: text for known, text in self._said.items() if known in self._addresses}
        self._said[address] = self._last_error

    # -- the beat page ---------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Says regularly how current the served region is, also when nobody sends anything: so its age is seen to grow."""
        while True:
            for copy in (self._served, self._building):
                if copy is not None:
                    copy.state.tick()
            if self._served is not None:
                self._beat(self._served)
            await asyncio.sleep(BEAT_S)

    def _beat(self, copy: _Copy) -> None:
        state = copy.state
        beat = Beat(
            beat_ns=time.monotonic_ns(),
            as_of_ns=round(state.as_of_s * 1e9),
            pid=os.getpid(),
            source=copy.source,
            warming=state.warming,
            incomplete=state.incomplete,
            stale_after_s=state.welcome.stale_after_s,
            expire_after_s=state.welcome.expire_after_s,
        )
        copy.roster.beat(beat)


async def _write(call: Any, request: directory_pb2.WatchRequest) -> None:
    """Fails only where the call has ended, and gRPC does not say why then: what is read next does."""
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
        await call.write(request)
