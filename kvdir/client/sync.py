"""The blocking client of the coordinator: the same verbs as aio.DirectoryClient, for scripts and engines without a loop.

Thread-safe: gRPC's blocking channels are, and what is kept beside them changes in single steps, or under a lock. The connection
to a coordinator that is listed no more is closed once no thread uses it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from kvdir.client import calls
from kvdir.client.addresses import Addresses
from kvdir.client.calls import Call, Reconciled
from kvdir.client.discovery import Discovery
from kvdir.client.lookup_stream import NoStream, StreamLost
from kvdir.client.lookup_stream_sync import Asked, LookupStreams
from kvdir.client.questions_sync import NotAsked, Question, Unary, first_ended
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
from kvdir.rpc.admin_codec import decode_part
from kvdir.rpc.channel import DEFAULT_MAX_MESSAGE_BYTES, client_options
from kvdir.rpc.status import from_rpc_error
from kvdir.rpc.story_codec import StoryAnswer
from kvdir.rpc.tls import Dialer, TlsFiles
from kvdir.v1 import admin_pb2

AnswerT = TypeVar("AnswerT")


def process_name() -> str:
    """A name of this process, for clients that nobody has named: so they, too, begin at different coordinators."""
    return f"{socket.gethostname()}-{os.getpid()}"


class Client:
    """See aio.DirectoryClient; arguments and errors are the same. Threads do not live through fork(): make one after it."""

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
        self._deadline_s = deadline_s
        self._connect_timeout_s = connect_timeout_s
        self._options = client_options(max_message_bytes=max_message_bytes)
        self._closed = False
        self._channels: dict[str, grpc.Channel] = {}
        self._ready: set[str] = set()  # connected when last seen; others are waited for, within the call's deadline
        self._connecting = threading.Lock()
        self._dialer = Dialer.of(tls)
        self._using: Counter[grpc.Channel] = Counter()
        self._retired: list[grpc.Channel] = []
        self._pruned = self._addresses.generation
        self._renewed = self._dialer.generation
        self._streams: LookupStreams | None = None
        if stream:
            self._streams = LookupStreams(self._options, connect_timeout_s=connect_timeout_s, dialer=self._dialer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; calls under way fail."""
        self._unsubscribe()
        if self._owns_discovery:
            self._discovery.close()
        if self._streams is not None:
            self._streams.close()
        with self._connecting:
            channels = [*self._channels.values(), *self._retired]
            self._closed, self._channels, self._retired = True, {}, []
        for channel in channels:
            channel.close()

    @property
    def dialer(self) -> Dialer:
        """For connections to others with the same certificate."""
        return self._dialer

    def lookup(
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
        return self._call(calls.lookup(namespace_digest, fingerprints, mode=mode, touch=touch, min_trust=min_trust), deadline_s)

    def score(
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
        return self._call(call, deadline_s)

    def report_stale(self, report: StaleReport, *, deadline_s: float | None = None) -> Feedback:
        """Tells every coordinator that an owner answered "absent" for blocks the directory named; see feedback.combined.

        Raises Unavailable or DeadlineExceeded only when none has heard it.
        """
        return combined(self._everywhere(calls.report_stale(report), deadline_s))

    def nodes(self, *, deadline_s: float | None = None) -> tuple[NodeView, ...]:
        """Every node one coordinator knows, by name."""
        return self._call(calls.nodes(), deadline_s)

    def views(self, *, deadline_s: float | None = None) -> SumsView:
        """Blocks and bytes in sum, per node, tier, namespace and tenant, each with its trust; and the nodes' own loads."""
        return self._call(calls.views(), deadline_s)

    def status(self, *, deadline_s: float | None = None) -> StatusView:
        """One coordinator as a whole."""
        return self._call(calls.status(), deadline_s)

    def who_am_i(self, *, deadline_s: float | None = None) -> calls.WhoAmI:
        """What one coordinator takes us for."""
        return self._call(calls.who_am_i(), deadline_s)

    def story(
        self, *, node: str = "", fingerprint: bytes = b"", max_entries: int = 0, deadline_s: float | None = None
    ) -> StoryAnswer:
        """What touched a node or a block lately, as far as one coordinator remembers."""
        return self._call(calls.story(node=node, fingerprint=fingerprint, max_entries=max_entries), deadline_s)

    def quotas(self, *, deadline_s: float | None = None) -> QuotasView:
        """Quotas and orphans as one coordinator sees them."""
        return self._call(calls.quotas(), deadline_s)

    def digests(self, *, node: str = "", sketches: bool = False, deadline_s: float | None = None) -> DigestsView:
        """Count and digest of what one coordinator believes of every stream (kvdir.core.diff). sketches: of one node only."""
        return self._call(calls.digests(node=node, sketches=sketches), deadline_s)

    def reconcile(self, node: str, *, deadline_s: float = 10.0) -> Reconciled:
        """Has the node restate what it holds; done is False when that took longer than the deadline."""
        return self._call(calls.reconcile(node), deadline_s)

    def dump(
        self, *, namespace_digest: bytes = b"", node: str = "", chunk_blocks: int = 0, deadline_s: float = 60.0
    ) -> Iterator[DumpPart]:
        """The whole directory of one coordinator, part by part."""
        end_s = time.monotonic() + deadline_s
        self._look_around(end_s)
        address = self._addresses.order(now_s=time.monotonic())[0]
        request = calls.dump_request(namespace_digest=namespace_digest, node=node, chunk_blocks=chunk_blocks)
        with self._used(address) as channel:
            self._connected(channel, address, end_s)
            method = channel.unary_stream(
                calls.DUMP_METHOD,
                request_serializer=admin_pb2.DumpRequest.SerializeToString,
                response_deserializer=admin_pb2.DumpChunk.FromString,
            )
            try:
                for chunk in method(request, timeout=end_s - time.monotonic()):
                    yield decode_part(chunk)
            except grpc.RpcError as error:
                raise from_rpc_error(error, target=address) from error

    def _call(self, call: Call[AnswerT], deadline_s: float | None) -> AnswerT:
        now_s = time.monotonic()
        end_s = now_s + (self._deadline_s if deadline_s is None else deadline_s)
        self._look_around(end_s)
        race = Race(self._addresses, self.races, now_s=now_s, end_s=end_s, hedged=call.hedged)
        if race.hedged:
            return self._hedged(call, race)
        while (turn := race.begin(time.monotonic())) is not None:
            address, until_s = turn
            try:
                answer = self._try(call, address, until_s)
            except (Unavailable, DeadlineExceeded) as error:
                self._ready.discard(address)
                race.lost(address, time.monotonic(), error)
            except UnknownNamespace as error:
                race.knew_nothing(address, error)
            else:
                race.won(address, time.monotonic(), warming=isinstance(answer, Lookup | Scores) and answer.warming)
                return answer
        raise race.failure

    def _hedged(self, call: Call[AnswerT], race: Race) -> AnswerT:
        """Without a thread per question: whoever answers says in `ended` which one has ended."""
        ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        under_way: dict[str, Question] = {}
        again: set[str] = set()
        try:
            while True:
                now_s = time.monotonic()
                if not under_way or race.hedge_due(now_s):
                    turn = race.begin(now_s)
                    if turn is not None:
                        under_way[turn[0]] = self._begin(call, *turn, ended=ended)
                    elif not under_way:
                        raise race.failure
                address = first_ended(ended, under_way, wait_s=race.wait_s(now_s))
                if address not in under_way:
                    continue
                question = under_way.pop(address)
                try:
                    answer = call.read(question.result())
                except NoStream:
                    under_way[address] = self._begin(call, address, question.end_s, ended=ended)
                except (Unavailable, DeadlineExceeded) as error:
                    if isinstance(error, StreamLost) and address not in again:
                        again.add(address)
                        under_way[address] = self._begin(call, address, question.end_s, ended=ended)
                        continue
                    race.lost(address, time.monotonic(), error)
                except UnknownNamespace as error:
                    race.knew_nothing(address, error)
                else:
                    race.won(address, time.monotonic(), warming=isinstance(answer, Lookup | Scores) and answer.warming)
                    return answer
        finally:
            for question in under_way.values():
                question.cancel()

    def _everywhere(self, call: Call[AnswerT], deadline_s: float | None) -> list[AnswerT]:
        """Asks all at once; the answers that came. Raises one of the failures when none did."""
        end_s = time.monotonic() + (self._deadline_s if deadline_s is None else deadline_s)
        self._look_around(end_s)
        ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        listed = self._addresses.order(now_s=time.monotonic())
        questions = {address: self._begin(call, address, end_s, ended=ended) for address in listed}
        answers: list[AnswerT] = []
        failure: KvdirError = Unavailable("no coordinator is known")
        for address, question in questions.items():
            try:
                answers.append(call.read(question.result()))
            except KvdirError as error:
                failure = error
                if isinstance(failure, Unavailable | DeadlineExceeded):
                    self._addresses.failed(address, now_s=time.monotonic())
        if not answers:
            raise failure
        return answers

    def _look_around(self, end_s: float) -> None:
        if not len(self._addresses) and not self._discovery.wait(max(0.0, end_s - time.monotonic())):
            raise Unavailable(f"no coordinator is known yet: {self._discovery.problem or 'nobody has said any'}")
        if self._pruned != self._addresses.generation or self._renewed != self._dialer.generation or self._retired:
            self._prune()

    def _prune(self) -> None:
        """As that of the aio client."""
        if self._streams is not None:
            self._streams.forget(lambda address: address not in self._addresses)
        with self._connecting:
            generation = self._dialer.generation
            renewed = generation != self._renewed
            self._pruned, self._renewed = self._addresses.generation, generation
            for address in [address for address in self._channels if renewed or address not in self._addresses]:
                self._ready.discard(address)
                self._retired.append(self._channels.pop(address))
            idle = [channel for channel in self._retired if not self._using[channel]]
            self._retired = [channel for channel in self._retired if self._using[channel]]
            for channel in idle:
                del self._using[channel]
        for channel in idle:
            channel.close()

    @contextlib.contextmanager
    def _used(self, address: str) -> Iterator[grpc.Channel]:
        """Its channel, which is not closed inside the block."""
        channel = self._use(address)
        try:
            yield channel
        finally:
            self._unuse(channel)

    def _use(self, address: str) -> grpc.Channel:
        with self._connecting:
            if self._closed:
                raise Unavailable(f"{address}: the client was closed")
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = self._dialer.blocking(address, options=self._options)
            self._using[channel] += 1
        return channel

    def _unuse(self, channel: grpc.Channel) -> None:
        with self._connecting:
            self._using[channel] -= 1

    def _begin(self, call: Call[AnswerT], address: str, end_s: float, *, ended: queue.SimpleQueue[str]) -> Question:
        """Sends; connecting is part of the question: refused is an error at once, no answer one at the deadline."""
        question: Question
        try:
            question = asked = self._ask(call, address, end_s)
            future: Any = asked.future
        except (Unavailable, DeadlineExceeded) as error:
            ended.put(address)
            return NotAsked(end_s, error)
        except NoStream:
            channel = self._use(address)
            method: Any = channel.unary_unary(
                call.method,
                request_serializer=type(call.request).SerializeToString,
                response_deserializer=call.response.FromString,
            )
            future = method.future(call.request, timeout=max(0.0, end_s - time.monotonic()), metadata=trace.metadata())
            future.add_done_callback(lambda _: self._unuse(channel))
            question = Unary(address, end_s, future)
        future.add_done_callback(lambda _: ended.put(address))
        return question

    def _ask(self, call: Call[AnswerT], address: str, end_s: float) -> Asked:
        """Over the stream. Raises NoStream if it is no lookup, or not to be asked so."""
        if self._streams is None or call.method != calls.LOOKUP_METHOD:
            raise NoStream
        return self._streams.ask(address, call.request, end_s=end_s)

    def _try(self, call: Call[AnswerT], address: str, end_s: float) -> AnswerT:
        if self._streams is not None and call.method == calls.LOOKUP_METHOD:
            with contextlib.suppress(NoStream):  # then by a call of its own
                return call.read(self._streams.lookup(address, call.request, end_s=end_s))
        with self._used(address) as channel:
            return call.read(self._unary(call, channel, address, end_s))

    def _unary(self, call: Call[Any], channel: grpc.Channel, address: str, end_s: float) -> Any:
        self._connected(channel, address, end_s)
        method: Any = channel.unary_unary(
            call.method,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response.FromString,
        )
        remaining_s = end_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"{address}: the deadline passed before the call")
        try:
            return method(call.request, timeout=remaining_s, metadata=trace.metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=address) from error

    def _connected(self, channel: grpc.Channel, address: str, end_s: float) -> None:
        current = self._channels.get(address) is channel
        if current and address in self._ready:
            return
        timeout_s = max(0.0, min(self._connect_timeout_s, end_s - time.monotonic()))
        self._dialer.connected_blocking(channel, target=address, timeout_s=timeout_s)
        if current:
            self._ready.add(address)
