"""The engine library for asyncio: the same verbs and rules as peer_agent/client/engine.py.

Copies larger than INLINE_BYTES run in a thread, without the GIL. A cancelled call still waits for its copy to end, because
as long as it runs it may write to the caller's memory. One engine belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from kvdir.client.attached import attach
from kvdir.errors import KvdirError, RemoteProtocolError, StaleEpoch, Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from kvdir.obs.trace import metadata
from kvdir.rpc.cancel import call_alone_cancelled
from kvdir.rpc.status import from_rpc_error
from kvdir.rpc.tls import Dialer, TlsFiles
from peer_agent.client.attachment import Attachment, attach_request, bounded_s, lookup_result, unanswered
from peer_agent.client.buffers import CallerMemory
from peer_agent.client.device import DeviceCopier, caller_memory
from peer_agent.client.line import AgentLine
from peer_agent.client.patience import ATTACH_PAUSE_S, DEADLINE_S, GIVE_UP_S, LEASE_S
from peer_agent.client.pool_table import register_request
from peer_agent.client.registered import REGISTER_S, AsyncRegisteredPool
from peer_agent.client.results import LoadResult, LookupResult, StoreResult, missed, not_stored
from peer_agent.client.tracing import traced_aio
from peer_agent.memory.device import Device, DevicePool
from peer_agent.v1 import engine_pb2

T = TypeVar("T")

COPY_THREADS = 4
"""Of our own: the loop's default ones may be busy with the application for longer than any deadline."""

INLINE_BYTES = 256 << 10
"""Copies up to this size (some 20 us) are made in the event loop: a thread would cost more than it frees."""


class Engine:
    """See peer_agent.client.engine.Engine."""

    def __init__(
        self,
        address: str,
        *,
        namespace: Namespace,
        engine: str = "",
        deadline_s: float = DEADLINE_S,
        check: bool = False,
        prefill_tokens_per_s: float = 0.0,
        probe: bytes = b"",
        device: Device | None = None,
        tls: TlsFiles | Dialer | None = None,
    ) -> None:
        self.address = address
        self.namespace = namespace
        self.name = engine
        self._deadline_s = deadline_s
        self._check = check
        self._hello = attach_request(namespace, engine=engine, prefill_tokens_per_s=prefill_tokens_per_s, probe=probe)
        self._device = device
        self._copier = DeviceCopier(device) if device is not None else None
        self._line = AgentLine(address, tls, aio=True)
        self.directory = attach("", tls=self._line.dialer)
        """As that of the blocking engine, from the replica only: nothing here waits for a call in the event loop."""
        self._attachment: Attachment | None = None
        self._call: Any = None
        self._attaching: asyncio.Task[None] | None = None
        self._reports: set[asyncio.Task[None]] = set()
        self._copiers = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="kvdir-copy")
        self._failure: KvdirError = unanswered(address)
        self._next_try_s = 0.0
        self._closed = False

    @property
    def attached(self) -> bool:
        """Whether there is a live session now."""
        return self._session() is not None

    @property
    def failure(self) -> str:
        """Why there is none, in words; the reason of the last attempt."""
        return str(self._failure)

    async def attach(self, *, timeout_s: float) -> None:
        """Waits for a session. Raises what stands in the way: UnknownNamespace (with the differences), Unavailable, ..."""
        if self._session() is None:
            await asyncio.wait({self._start_attaching()}, timeout=timeout_s)
        if not self.attached:
            raise self._failure

    async def close(self) -> None:
        """Ends the session: locks and reservations go. Idempotent."""
        self._closed = True
        self._failure = Unavailable(f"{self.address}: this engine was closed")
        self.directory.close()
        self._drop()
        self._copiers.shutdown(wait=False)  # what is being copied ends by itself
        ending = {*self._reports, *([self._attaching] if self._attaching else ())}
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)
        await self._line.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def store(self, fingerprints: Fingerprints, blocks: Any, *, deadline_s: float | None = None) -> StoreResult:
        """Copies blocks into the agent's memory and publishes them."""
        memory = self._memory(blocks, len(fingerprints), writable=False)
        attachment = self._session()
        if attachment is None:
            return not_stored(len(fingerprints), self.failure)
        attachment.check_size(fingerprints)
        until_s = time.monotonic() + bounded_s(deadline_s, self._deadline_s)
        try:
            with attachment.storing():
                lease_s = until_s - time.monotonic() + LEASE_S
                request = attachment.reserve_request(fingerprints, lease_s=lease_s, from_device=memory.waits)
                reserved = await self._rpc("Reserve", request, until_s)
                if not reserved.reservation:
                    return attachment.stored(reserved, 0)
                commit = await self._write(attachment, reserved, memory, len(fingerprints), until_s)
                committed = await self._rpc("Commit", commit, until_s + LEASE_S)
        except KvdirError as error:
            return not_stored(len(fingerprints), self._note(error, attachment))
        return attachment.stored(reserved, committed.committed)

    @traced_aio
    async def load(
        self,
        fingerprints: Fingerprints,
        *,
        into: Any,
        deadline_s: float | None = None,
        local_only: bool = False,
        explain: bool = False,
        trace: str = "",
        request_id: str = "",
    ) -> LoadResult:
        """Brings blocks into the caller's memory, from here or from peers, verified."""
        memory = self._memory(into, len(fingerprints), writable=True)
        began_s = time.monotonic()
        attachment = self._session()
        if attachment is None:
            return missed(len(fingerprints), self.failure)
        attachment.check_size(fingerprints)
        wish_s = bounded_s(deadline_s, self._deadline_s)
        request = attachment.load_request(
            fingerprints, deadline_s=wish_s, lease_s=LEASE_S, local_only=local_only, explain=explain
        )
        try:
            answer = await self._rpc("Load", request, began_s + wish_s)
            loaded = await self._copy(
                lambda: attachment.read(
                    answer, fingerprints, memory, check=self._check, began_s=began_s, until_s=began_s + wish_s
                ),
                in_thread=memory.waits or self._is_large(len(fingerprints)),
            )
        except KvdirError as error:
            return missed(len(fingerprints), self._note(error, attachment))
        if len(loaded.corrupt):
            await self._report_corrupt(attachment, loaded.corrupt, began_s + wish_s)
        return loaded.result

    async def lookup(self, fingerprints: Fingerprints, *, deadline_s: float = 0.0) -> LookupResult:
        """What is here and, with a deadline, what peers are said to hold. Moves nothing."""
        attachment = self._session()
        nothing = bytes(len(fingerprints))
        if attachment is None:
            return LookupResult(local=nothing, nominated=nothing, reason=self.failure)
        wish_s = bounded_s(max(deadline_s, 0.0), 0.0)
        request = attachment.lookup_request(fingerprints, deadline_s=wish_s)
        try:
            answer = await self._rpc("Lookup", request, time.monotonic() + (wish_s or self._deadline_s))
        except KvdirError as error:
            return LookupResult(local=nothing, nominated=nothing, reason=self._note(error, attachment))
        return lookup_result(answer)

    async def prefetch(self, fingerprints: Fingerprints, *, deadline_s: float | None = None) -> int:
        """Asks for blocks in the background; returns how many the agent went to look for (0 when there is no agent)."""
        wish_s = bounded_s(deadline_s, self._deadline_s)
        attachment = self._session()
        if attachment is None:
            return 0
        request = attachment.prefetch_request(fingerprints, deadline_s=wish_s)
        try:
            accepted: int = (await self._rpc("Prefetch", request, time.monotonic() + self._deadline_s)).accepted
        except KvdirError as error:
            self._note(error, attachment)
            return 0
        return accepted

    async def pin(self, fingerprints: Fingerprints, *, pin_s: float) -> int:
        """Protects blocks that are here from eviction for pin_s; 0 unpins. Returns how many that concerned."""
        attachment = self._session()
        if attachment is None:
            return 0
        request = attachment.pin_request(fingerprints, pin_s=pin_s)
        try:
            pinned: int = (await self._rpc("Pin", request, time.monotonic() + self._deadline_s)).pinned
        except KvdirError as error:
            self._note(error, attachment)
            return 0
        return pinned

    async def register_pool(self, pool: DevicePool, *, timeout_s: float = REGISTER_S) -> AsyncRegisteredPool:
        """Makes device memory known to the agent, so that blocks published from it can be had from there (tier gpu)."""
        attachment = self._session()
        if attachment is None:
            raise self._failure
        request = register_request(pool, session=attachment.session)
        answer = await self._rpc("RegisterPool", request, time.monotonic() + timeout_s)
        table = attachment.pool_table(pool, answer)
        return AsyncRegisteredPool(table, self._rpc, self._in_thread, deadline_s=self._deadline_s)

    # internals

    def _memory(self, blocks: Any, count: int, *, writable: bool) -> CallerMemory:
        block_bytes = self.namespace.block_bytes
        return caller_memory(blocks, self._copier, count=count, block_bytes=block_bytes, writable=writable)

    async def _rpc(self, method: str, request: Any, until_s: float) -> Any:
        """Raises KvdirError, by until_s."""
        try:
            timeout_s = max(0.001, until_s - time.monotonic())
            return await getattr(self._line.stub, method)(request, timeout=timeout_s, metadata=metadata())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, target=self.address) from error
        except grpc.aio.UsageError as error:  # the channel was closed before
            raise Unavailable(f"{self.address}: this engine was closed") from error
        except asyncio.CancelledError as error:
            if not call_alone_cancelled():
                raise
            raise Unavailable(f"{self.address}: this engine was closed") from error

    async def _write(
        self, attachment: Attachment, reserved: Any, memory: CallerMemory, count: int, until_s: float
    ) -> engine_pb2.CommitRequest:
        try:
            return await self._copy(
                lambda: attachment.write(reserved, memory, count=count, until_s=until_s),
                in_thread=memory.waits or self._is_large(count),
            )
        except (KvdirError, asyncio.CancelledError) as error:
            if not memory.late:  # else the slots come back once nothing can write to them
                wait_s = GIVE_UP_S if isinstance(error, KvdirError) else self._deadline_s
                with contextlib.suppress(KvdirError):  # then the slots come back with their lease
                    await self._rpc("Abort", attachment.abort_request(reserved), time.monotonic() + wait_s)
            raise

    def _is_large(self, blocks: int) -> bool:
        return blocks * self.namespace.block_bytes > INLINE_BYTES

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await self._copy(work, in_thread=True)

    async def _copy(self, copy: Callable[[], T], *, in_thread: bool) -> T:
        if not in_thread:
            return copy()
        if self._closed:
            raise Unavailable(f"{self.address}: this engine was closed")
        running = asyncio.get_running_loop().run_in_executor(self._copiers, copy)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is None:
            return running.result()
        running.exception()  # retrieved: the cancellation is what the caller asked for
        raise cancelled

    def _session(self) -> Attachment | None:
        """The live session; without one, sees to it that there will be."""
        if self._attachment is not None and not self._call.done():
            return self._attachment
        if self._attachment is not None:
            self._ended(self._attachment)
        if not self._closed and time.monotonic() >= self._next_try_s:
            self._start_attaching()
        return None

    def _ended(self, attachment: Attachment) -> None:
        """The agent has gone: lets go of its arena now, since an idle engine would keep that memory from the next agent."""
        if self._attachment is attachment:
            self._failure = Unavailable(f"{self.address}: the agent ended the session; attaching again")
            self._drop()

    def _note(self, error: KvdirError, attachment: Attachment) -> str:
        """Remembers why the agent is of no use; a session it does not know is given up."""
        if isinstance(error, RemoteProtocolError | StaleEpoch) and self._attachment is attachment:
            self._failure = error
            self._drop()
        return str(error)

    async def _report_corrupt(self, attachment: Attachment, corrupt: Fingerprints, until_s: float) -> None:
        """Waits until_s at most; a report that takes longer goes on, and `close` ends it."""
        report = asyncio.get_running_loop().create_task(self._deliver(attachment, corrupt), name="kvdir-report-corrupt")
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)
        await asyncio.wait({report}, timeout=max(0.0, until_s - time.monotonic()))

    async def _deliver(self, attachment: Attachment, corrupt: Fingerprints) -> None:
        try:
            await self._rpc("Release", attachment.corrupt_request(corrupt), time.monotonic() + self._deadline_s)
        except KvdirError as error:
            self._note(error, attachment)

    def _drop(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._attachment is not None:
            self._attachment.close()
        self._attachment, self._call = None, None

    def _start_attaching(self) -> asyncio.Task[None]:
        if self._attaching is None or self._attaching.done():
            self._next_try_s = time.monotonic() + ATTACH_PAUSE_S
            self._attaching = asyncio.get_running_loop().create_task(self._attach(), name=f"kvdir-attach-{self.name}")
        elif self._call is not None and self._line.outdated:
            self._call.cancel()  # it waits with a certificate that may be refused for ever
        return self._attaching

    async def _attached_to(self, answer: engine_pb2.AttachResponse) -> Attachment:
        """With a device in a thread: to page-lock an arena takes a while."""
        made: list[Attachment] = []
        try:
            await self._copy(
                lambda: made.append(Attachment(answer, self.namespace, self._device)), in_thread=self._device is not None
            )
        except asyncio.CancelledError:
            for attachment in made:
                attachment.close()
            raise
        return made[0]

    async def _attach(self) -> None:
        """Runs until there is a session or a reason why not; waits for an absent agent."""
        if (closing := self._line.renew()) is not None:
            await closing
        call = self._call = self._line.stub.Attach(self._hello, wait_for_ready=True)
        try:
            answer = await call.read()
            if answer is grpc.aio.EOF:
                raise Unavailable(f"{self.address}: the agent is shutting down")
            attachment = self._attachment = await self._attached_to(answer)
            self.directory.use(attachment.replica_path)
            call.add_done_callback(lambda _: self._ended(attachment))
        except grpc.aio.AioRpcError as error:
            self._failure = from_rpc_error(error, target=self.address)
        except (KvdirError, OSError) as error:
            call.cancel()
            self._failure = error if isinstance(error, KvdirError) else Unavailable(f"{self.address}: {error}")


async def connect(
    address: str,
    *,
    namespace: Namespace,
    engine: str = "",
    deadline_s: float = DEADLINE_S,
    check: bool = False,
    prefill_tokens_per_s: float = 0.0,
    probe: bytes = b"",
    device: Device | None = None,
    tls: TlsFiles | None = None,
    timeout_s: float = 5.0,
) -> Engine:
    """See peer_agent.client.engine.connect."""
    made = Engine(
        address, namespace=namespace, engine=engine, deadline_s=deadline_s, check=check,
        prefill_tokens_per_s=prefill_tokens_per_s, probe=probe, device=device, tls=tls,
    )  # fmt: skip
    try:
        if timeout_s:
            await made.attach(timeout_s=timeout_s)
    except BaseException:
        await made.close()
        raise
    return made
