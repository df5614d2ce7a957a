"""The asynchronous client of the coordinator.

Rules: every call ends by its deadline, connecting and trying other coordinators included; errors are those of
kvdir.errors; a node that is not known, a block that is not held are values. One client belongs to one event loop.
Interleaving: a channel is never closed while other calls may use it; a failed one is only doubted, so that the next call
waits for the connection, with its own deadline, before it is sent. Of two questions in a race the slower one is cancelled and
awaited before the answer is returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio

from kvdir.client import calls
from kvdir.client.addresses import Addresses
from kvdir.client.calls import Call, Reconciled
from kvdir.client.discovery import Discovery
from kvdir.client.lookup_stream import LookupStreams, NoStream
from kvdir.client.race import Race, RaceCounters
from kvdir.core.answer import Lookup, LookupMode
from kvdir.core.digests import DigestsView
from kvdir.core.feedback import Feedback, StaleReport, combined
from kvdir.core.quota_views import QuotasView
from kvdir.core.score import WEIGHTS, ScorePart, Scores
from kvdir.core.views import DumpPart, NodeView, StatusView, SumsView
from kvdir.errors import DeadlineExceeded, KvdirError, Unavailable, UnknownNamespace
from kvdir.fingerprint import Fingerprints
from kvdir.location import MinTrust, Tier
from kvdir.obs import trace
from kvdir.obs.spans import Kind, rpc_span
from kvdir.rpc.admin_codec import decode_part
from kvdir.rpc.cancel import call_alone_cancelled
from kvdir.rpc.channel import DEFAULT_MAX_MESSAGE_BYTES, client_options
from kvdir.rpc.status import from_rpc_error
from kvdir.rpc.story_codec import StoryAnswer
from kvdir.rpc.tls import Dialer, TlsFiles
from kvdir.v1 import admin_pb2

AnswerT = TypeVar("AnswerT")


class DirectoryClient:
    """Asks any of several coordinators. deadline_s: of calls that give none; connect_timeout_s: for one connect.

    addresses: see discovery.py; a Discovery that is handed in is shared, and stays the caller's to close.
    name: of who asks; different ones begin at different coordinators. Empty: in the order given. races: what failing over cost.
    tls: our certificate, where coordinators want one; renewed files serve new connections. Raises ConfigError for them.
    stream: lookups share one LookupStream call to each coordinator, at half the cost; where it has none, or if False, each is a
    call of its own.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] | Discovery,
        *,
        name: str = "",
        deadline_s: float = 2.0,
        connect_timeout_s: float = 0.5,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        stream: bool = True,
        tls: TlsFiles | Dialer | None = None,
    ) -> None:
        self.races = RaceCounters()
        self._addresses = Addresses(name=name)
        self._discovery = addresses if isinstance(addresses, Discovery) else Discovery(addresses)
        self._owns_discovery = self._discovery is not addresses
        self._unsubscribe = self._discovery.subscribe(self._addresses.replace)
        self._dialer = Dialer.of(tls)
        self._pruned = self._addresses.generation
        self._renewed = self._dialer.generation
        self._using: Counter[grpc.aio.Channel] = Counter()
        self._retired: list[grpc.aio.Channel] = []
        self._deadline_s = deadline_s
        self._connect_timeout_s = connect_timeout_s
        self._options = client_options(max_message_bytes=max_message_bytes)
        self._closed = False
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._methods: dict[tuple[str, str], Any] = {}
        self._streams: LookupStreams | None = None
        if stream:
            self._streams = LookupStreams(self._options, connect_timeout_s=connect_timeout_s, dialer=self._dialer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; calls under way fail."""
        self._closed = True
        self._unsubscribe()
        if self._owns_discovery and self._discovery.listens:
            await asyncio.to_thread(self._discovery.close)
        if self._streams is not None:
            await self._streams.close()
        channels, self._channels, self._retired = [*self._channels.values(), *self._retired], {}, []
        self._methods.clear()
        for channel in channels:
            await channel.close()

    async def lookup(
        self,
        namespace_digest: bytes,
        fingerprints: Fingerprints,
        *,
        mode: LookupMode = LookupMode.SPARSE,
        touch: bool = False,
        min_trust: MinTrust = MinTrust.ANY,
        deadline_s: float | None = None,
    ) -> Lookup:
        """Who is said to hold which of the blocks; nodes below min_trust are left out, and counted in `below_trust`.

        Raises UnknownNamespace, TooLarge, Unavailable, DeadlineExceeded.
        """
        return await self._call(
            calls.lookup(namespace_digest, fingerprints, mode=mode, touch=touch, min_trust=min_trust), deadline_s
        )

    async def score(
        self,
        parts: Sequence[ScorePart],
        *,
        weights: Mapping[Tier, float] = WEIGHTS,
        min_trust: MinTrust = MinTrust.ANY,
        max_instances: int = 0,
        deadline_s: float | None = None,
    ) -> Scores:
        """How much of one prompt each instance has (kvdir.core.score), best first. max_instances 0: the coordinator chooses.

        Raises UnknownNamespace, InvalidInput, TooLarge, Unavailable, DeadlineExceeded.
        """
        call = calls.score(parts, weights=weights, min_trust=min_trust, max_instances=max_instances)
        return await self._call(call, deadline_s)

    async def report_stale(self, report: StaleReport, *, deadline_s: float | None = None) -> Feedback:
        """Tells every coordinator that an owner answered "absent" for blocks the directory named; see feedback.combined.

        Raises Unavailable or DeadlineExceeded only when none has heard it.
        """
        return combined(await self._everywhere(calls.report_stale(report), deadline_s))

    async def nodes(self, *, deadline_s: float | None = None) -> tuple[NodeView, ...]:
        """Every node one coordinator knows, by name."""
        return await self._call(calls.nodes(), deadline_s)

    async def views(self, *, deadline_s: float | None = None) -> SumsView:
        """Blocks and bytes in sum, per node, tier, namespace and tenant, each with its trust; and the nodes' own loads."""
        return await self._call(calls.views(), deadline_s)

    async def who_am_i(self, *, deadline_s: float | None = None) -> calls.WhoAmI:
        """What one coordinator takes us for."""
        return await self._call(calls.who_am_i(), deadline_s)

    async def status(self, *, deadline_s: float | None = None) -> StatusView:
        """One coordinator as a whole."""
        return await self._call(calls.status(), deadline_s)

    async def story(
        self, *, node: str = "", fingerprint: bytes = b"", max_entries: int = 0, deadline_s: float | None = None
    ) -> StoryAnswer:
        """What touched a node or a block lately, as far as one coordinator remembers."""
        return await self._call(calls.story(node=node, fingerprint=fingerprint, max_entries=max_entries), deadline_s)

    async def quotas(self, *, deadline_s: float | None = None) -> QuotasView:
        """Quotas and orphans as one coordinator sees them."""
        return await self._call(calls.quotas(), deadline_s)

    async def digests(self, *, node: str = "", sketches: bool = False, deadline_s: float | None = None) -> DigestsView:
        """Count and digest of what one coordinator believes of every stream (kvdir.core.diff). sketches: of one node only."""
        return await self._call(calls.digests(node=node, sketches=sketches), deadline_s)

    async def reconcile(self, node: str, *, deadline_s: float = 10.0) -> Reconciled:
        """Has the node restate what it holds; done is False when that took longer than the deadline."""
        return await self._call(calls.reconcile(node), deadline_s)

    async def dump(
        self, *, namespace_digest: bytes = b"", node: str = "", chunk_blocks: int = 0, deadline_s: float = 60.0
    ) -> AsyncIterator[DumpPart]:
        """The whole directory of one coordinator, part by part."""
        end_s = time.monotonic() + deadline_s
        await self._look_around(end_s)
        address = self._addresses.order(now_s=time.monotonic())[0]
        request = calls.dump_request(namespace_digest=namespace_digest, node=node, chunk_blocks=chunk_blocks)
        channel = self._channel(address)
        with self._used(channel):
            await self._connected(channel, address, end_s)
            method = channel.unary_stream(
                calls.DUMP_METHOD,
                request_serializer=admin_pb2.DumpRequest.SerializeToString,
                response_deserializer=admin_pb2.DumpChunk.FromString,
            )
            with _our_errors(address):
                async for chunk in method(request, timeout=end_s - time.monotonic()):
                    yield decode_part(chunk)

    async def _call(self, call: Call[AnswerT], deadline_s: float | None) -> AnswerT:
        now_s = time.monotonic()
        end_s = now_s + (self._deadline_s if deadline_s is None else deadline_s)
        await self._look_around(end_s)
        race = Race(self._addresses, self.races, now_s=now_s, end_s=end_s, hedged=call.hedged)
        if race.hedged:
            return await self._hedged(call, race)
        while (turn := race.begin(time.monotonic())) is not None:
            address, until_s = turn
            try:
                answer = await self._try(call, address, until_s)
            except (Unavailable, DeadlineExceeded) as error:
                race.lost(address, time.monotonic(), error)
            except UnknownNamespace as error:
                race.knew_nothing(address, error)
            else:
                race.won(address, time.monotonic(), warming=isinstance(answer, Lookup | Scores) and answer.warming)
                return answer
        raise race.failure

    async def _hedged(self, call: Call[AnswerT], race: Race) -> AnswerT:
        under_way: dict[asyncio.Task[AnswerT], str] = {}
        try:
            while True:
                now_s = time.monotonic()
                if not under_way or race.hedge_due(now_s):
                    turn = race.begin(now_s)
                    if turn is not None:
                        under_way[asyncio.create_task(self._try(call, *turn))] = turn[0]
                    elif not under_way:
                        raise race.failure
                timeout_s = race.wait_s(now_s)
                done, _ = await asyncio.wait(under_way, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    address = under_way.pop(task)
                    try:
                        answer = task.result()
                    except (Unavailable, DeadlineExceeded) as error:
                        race.lost(address, time.monotonic(), error)
                    except UnknownNamespace as error:
                        race.knew_nothing(address, error)
                    else:
                        race.won(address, time.monotonic(), warming=isinstance(answer, Lookup | Scores) and answer.warming)
                        return answer
        finally:
            await _cancel(under_way)

    async def _everywhere(self, call: Call[AnswerT], deadline_s: float | None) -> list[AnswerT]:
        """Asks all at once; the answers that came. Raises one of the failures when none did."""
        end_s = time.monotonic() + (self._deadline_s if deadline_s is None else deadline_s)
        await self._look_around(end_s)
        listed = self._addresses.order(now_s=time.monotonic())
        outcomes = await asyncio.gather(*(self._try(call, address, end_s) for address in listed), return_exceptions=True)
        answers: list[AnswerT] = []
        failure: KvdirError = Unavailable("no coordinator is known")
        for address, outcome in zip(listed, outcomes, strict=True):
            match outcome:
                case Unavailable() | DeadlineExceeded():
                    failure = outcome
                    self._addresses.failed(address, now_s=time.monotonic())
                case KvdirError():
                    failure = outcome
                case BaseException():
                    raise outcome
                case _:
                    answers.append(outcome)
        if not answers:
            raise failure
        return answers

    async def _look_around(self, end_s: float) -> None:
        """Waits for the first addresses, if none is known, and lets go of connections that are not to be used any more."""
        if not len(self._addresses):
            await self._first_addresses(end_s)
            if not len(self._addresses):
                raise Unavailable(f"no coordinator is known yet: {self._discovery.problem or 'nobody has said any'}")
        if self._pruned != self._addresses.generation or self._renewed != self._dialer.generation or self._retired:
            await self._prune()

    async def _first_addresses(self, end_s: float) -> None:
        loop, known = asyncio.get_running_loop(), asyncio.Event()

        def told(_: tuple[str, ...]) -> None:
            loop.call_soon_threadsafe(known.set)

        unsubscribe = self._discovery.subscribe(told)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
                    await known.wait()
        finally:
            unsubscribe()

    async def _prune(self) -> None:
        """Retires connections to coordinators that are gone, and those made with an older certificate; closes the idle ones.

        Others are closed by a later call, when nobody uses them any more. Streams go on with the certificate they have.
        """
        generation = self._dialer.generation
        renewed = generation != self._renewed
        self._pruned, self._renewed = self._addresses.generation, generation
        if self._streams is not None:
            self._streams.forget(lambda address: address not in self._addresses)
        for address in [address for address in self._channels if renewed or address not in self._addresses]:
            self._doubt(address)
            self._retired.append(self._channels.pop(address))
        idle = [channel for channel in self._retired if not self._using[channel]]
        self._retired = [channel for channel in self._retired if self._using[channel]]
        for channel in idle:
            del self._using[channel]
        for channel in idle:  # taken out before the first await, so that nobody else uses or closes them
            await channel.close()

    async def _try(self, call: Call[AnswerT], address: str, end_s: float) -> AnswerT:
        with rpc_span(call.method[1:], Kind.CLIENT) as span:
            span.server(address)
            if self._streams is not None and call.method == calls.LOOKUP_METHOD:
                with contextlib.suppress(NoStream):  # then by a call of its own
                    return call.read(await self._streams.lookup(address, call.request, end_s=end_s))
            channel = self._channel(address)
            with self._used(channel):
                return call.read(await self._unary(call, channel, address, end_s))

    @contextlib.contextmanager
    def _used(self, channel: grpc.aio.Channel) -> Iterator[None]:
        """It is not closed inside the block."""
        self._using[channel] += 1
        try:
            yield
        finally:
            self._using[channel] -= 1

    async def _unary(self, call: Call[Any], channel: grpc.aio.Channel, address: str, end_s: float) -> Any:
        method = self._methods.get((address, call.method))
        if method is None:
            await self._connected(channel, address, end_s)
            method = channel.unary_unary(
                call.method,
                request_serializer=type(call.request).SerializeToString,
                response_deserializer=call.response.FromString,
            )
            if self._channels.get(address) is channel:  # not retired meanwhile
                self._methods[address, call.method] = method
        remaining_s = end_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"{address}: the deadline passed before the call")
        try:
            with _our_errors(address):
                return await method(call.request, timeout=remaining_s, metadata=trace.metadata())
        except Unavailable:
            self._doubt(address)
            raise

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            if self._closed:
                raise Unavailable(f"{address}: the client was closed")
            channel = self._channels[address] = self._dialer.aio(address, options=self._options)
        return channel

    async def _connected(self, channel: grpc.aio.Channel, address: str, end_s: float) -> None:
        timeout_s = max(0.0, min(self._connect_timeout_s, end_s - time.monotonic()))
        await self._dialer.connected(channel, target=address, timeout_s=timeout_s)

    def _doubt(self, address: str) -> None:
        for key in [key for key in self._methods if key[0] == address]:
            del self._methods[key]


@contextlib.contextmanager
def _our_errors(address: str) -> Iterator[None]:
    """Around a call: what it raises is one of kvdir.errors, or the cancellation of whoever awaits it."""
    try:
        yield
    except asyncio.CancelledError:
        if not call_alone_cancelled():
            raise
        raise Unavailable(f"{address}: the connection was closed") from None
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, target=address) from error


async def _cancel(tasks: Collection[asyncio.Task[AnswerT]]) -> None:
    """Returns when all have ended; whatever they raise is not wanted any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
