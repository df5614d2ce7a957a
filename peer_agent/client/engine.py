"""The engine library, blocking: store and load blocks through the agent of this host.

    engine = peer_agent.connect("unix:/dev/shm/kvdir-node1.sock", namespace=namespace, engine="vllm-0")
    engine.store(fingerprints, tensors)
    result = engine.load(fingerprints, into=tensors, deadline_s=0.05)
    recompute(result.recompute)

Rules: whatever is wrong with the agent, `load` answers by its deadline with misses and `store` with stored=0, both with a
reason; only the caller's own mistakes raise (wrong buffer, wrong width, too many fingerprints). An agent that went away or
restarted is attached again in the background, from the next use on. Thread-safe; calls run in parallel.
"""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Any, Self

import grpc

from kvdir.client.attached import attach
from kvdir.errors import KvdirError, RemoteProtocolError, StaleEpoch, Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from kvdir.obs.trace import metadata
from kvdir.rpc.status import from_rpc_error
from kvdir.rpc.tls import Dialer, TlsFiles
from peer_agent.client.attachment import Attachment, attach_request, bounded_s, lookup_result, unanswered
from peer_agent.client.buffers import CallerMemory
from peer_agent.client.device import DeviceCopier, caller_memory
from peer_agent.client.line import AgentLine
from peer_agent.client.patience import ATTACH_PAUSE_S, DEADLINE_S, GIVE_UP_S, LEASE_S
from peer_agent.client.pool_table import register_request
from peer_agent.client.registered import REGISTER_S, RegisteredPool
from peer_agent.client.results import LoadResult, LookupResult, StoreResult, missed, not_stored
from peer_agent.client.tracing import traced
from peer_agent.memory.device import Device, DevicePool
from peer_agent.v1 import engine_pb2


class Engine:
    """A session with one agent for one namespace. Use `peer_agent.connect`. deadline_s: of calls that give none.

    directory: lookups in the whole cluster, without a call where the agent keeps a replica; see `kvdir.attach`.
    check: compare each payload's XXH3-64 when it is copied out, on top of header and generation (finds rotten memory).
    prefill_tokens_per_s: how fast this engine recomputes, so that blocks which cost more time than they save stay where they
    are (LoadStatus.SKIPPED); 0: the agent's namespace file may say it, else every hit is worth fetching.
    probe: this engine's own fingerprint of the tokens 1, 2, ... block_tokens, which the agent checks (docs/hashing.md).
    device: of DeviceBlocks that `store` and `load` get; the agent's memory is page-locked for it.
    """

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
        self._line = AgentLine(address, tls, aio=False)
        self.directory = attach("", tls=self._line.dialer)
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._call: Any = None
        self._reporting: Any = None
        self._attaching: threading.Thread | None = None
        self._failure: KvdirError = unanswered(address)
        self._next_try_s = 0.0
        self._closed = False

    # session

    @property
    def attached(self) -> bool:
        """Whether there is a live session now."""
        return self._session() is not None

    @property
    def max_fingerprints(self) -> int:
        """How many one call may name, by the agent's configuration; 0: nobody knows while there is no session."""
        attachment = self._session()
        return 0 if attachment is None else attachment.max_fingerprints

    @property
    def failure(self) -> str:
        """Why there is none, in words; the reason of the last attempt."""
        return str(self._failure)

    def attach(self, *, timeout_s: float) -> None:
        """Waits for a session. Raises what stands in the way: UnknownNamespace (with the differences), Unavailable, ..."""
        if self._session() is not None:
            return
        with self._lock:
            thread = None if self._live() else self._start_attaching()
        if thread is not None:
            thread.join(timeout_s)
        if not self.attached:
            raise self._failure

    def close(self) -> None:
        """Ends the session: locks and reservations go. Idempotent."""
        with self._lock:
            self._closed = True
            self._drop(Unavailable(f"{self.address}: this engine was closed"))
        self._line.channel.close()
        self.directory.close()
        if self._attaching is not None:
            self._attaching.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # blocks

    def store(self, fingerprints: Fingerprints, blocks: Any, *, deadline_s: float | None = None) -> StoreResult:
        """Copies blocks into the agent's memory and publishes them.

        blocks: see `peer_agent.client.buffers`, or DeviceBlocks; namespace.block_bytes each, in the order of the fingerprints.
        Raises InvalidInput for wrong buffers and TooLarge beyond the agent's limit, nothing else. Gives up by deadline_s, but
        once the bytes are copied waits up to LEASE_S more for the agent to make them visible.
        """
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
                reserved = self._rpc("Reserve", request, until_s)
                if not reserved.reservation:
                    return attachment.stored(reserved, 0)
                commit = self._write(attachment, reserved, memory, len(fingerprints), until_s)
                committed = self._rpc("Commit", commit, until_s + LEASE_S)
        except KvdirError as error:
            return not_stored(len(fingerprints), self._note(error, attachment))
        return attachment.stored(reserved, committed.committed)

    @traced
    def load(
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
        """Brings blocks into the caller's memory, from here or from peers, verified; the rest is for the caller to recompute.

        into: writable memory, as for `store`. Returns by deadline_s (plus scheduling). explain: with reasons, see LoadResult.
        trace, request_id: see peer_agent/client/tracing.py. Raises InvalidInput for wrong buffers and TooLarge, nothing else.
        """
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
            answer = self._rpc("Load", request, began_s + wish_s)
            loaded = attachment.read(answer, fingerprints, memory, check=self._check, began_s=began_s, until_s=began_s + wish_s)
        except KvdirError as error:
            return missed(len(fingerprints), self._note(error, attachment))
        if len(loaded.corrupt):
            self._report_corrupt(attachment, loaded.corrupt, began_s + wish_s)
        return loaded.result

    def lookup(self, fingerprints: Fingerprints, *, deadline_s: float = 0.0) -> LookupResult:
        """What is here and, with a deadline, what peers are said to hold. Moves nothing."""
        attachment = self._session()
        nothing = bytes(len(fingerprints))
        if attachment is None:
            return LookupResult(local=nothing, nominated=nothing, reason=self.failure)
        wish_s = bounded_s(max(deadline_s, 0.0), 0.0)
        try:
            request = attachment.lookup_request(fingerprints, deadline_s=wish_s)
            answer = self._rpc("Lookup", request, time.monotonic() + (wish_s or self._deadline_s))
        except KvdirError as error:
            return LookupResult(local=nothing, nominated=nothing, reason=self._note(error, attachment))
        return lookup_result(answer)

    def prefetch(self, fingerprints: Fingerprints, *, deadline_s: float | None = None) -> int:
        """Asks for blocks in the background; returns how many the agent went to look for (0 when there is no agent)."""
        attachment = self._session()
        if attachment is None:
            return 0
        request = attachment.prefetch_request(fingerprints, deadline_s=bounded_s(deadline_s, self._deadline_s))
        try:
            accepted: int = self._rpc("Prefetch", request, time.monotonic() + self._deadline_s).accepted
        except KvdirError as error:
            self._note(error, attachment)
            return 0
        return accepted

    def pin(self, fingerprints: Fingerprints, *, pin_s: float) -> int:
        """Protects blocks that are here from eviction for pin_s; 0 unpins. Returns how many that concerned."""
        attachment = self._session()
        if attachment is None:
            return 0
        request = attachment.pin_request(fingerprints, pin_s=pin_s)
        try:
            pinned: int = self._rpc("Pin", request, time.monotonic() + self._deadline_s).pinned
        except KvdirError as error:
            self._note(error, attachment)
            return 0
        return pinned

    def register_pool(self, pool: DevicePool, *, timeout_s: float = REGISTER_S) -> RegisteredPool:
        """Makes device memory known to the agent, so that blocks published from it can be had from there (tier gpu).

        Raises KvdirError: no agent, or a pool or device that does not work here, and why.
        """
        attachment = self._session()
        if attachment is None:
            raise self._failure
        request = register_request(pool, session=attachment.session)
        answer = self._rpc("RegisterPool", request, time.monotonic() + timeout_s)
        table = attachment.pool_table(pool, answer)
        return RegisteredPool(table, self._rpc, deadline_s=self._deadline_s)

    # internals

    def _memory(self, blocks: Any, count: int, *, writable: bool) -> CallerMemory:
        block_bytes = self.namespace.block_bytes
        return caller_memory(blocks, self._copier, count=count, block_bytes=block_bytes, writable=writable)

    def _rpc(self, method: str, request: Any, until_s: float) -> Any:
        """Raises KvdirError, by until_s."""
        try:
            left_s = max(0.001, until_s - time.monotonic())
            return getattr(self._line.stub, method)(request, timeout=left_s, metadata=metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self.address) from error
        except ValueError as error:  # gRPC's word for a channel closed meanwhile
            raise Unavailable(f"{self.address}: this engine was closed") from error

    def _write(
        self, attachment: Attachment, reserved: Any, memory: CallerMemory, count: int, until_s: float
    ) -> engine_pb2.CommitRequest:
        try:
            return attachment.write(reserved, memory, count=count, until_s=until_s)
        except KvdirError:
            if not memory.late:  # else the slots come back once nothing can write to them
                with contextlib.suppress(KvdirError):
                    self._rpc("Abort", attachment.abort_request(reserved), time.monotonic() + GIVE_UP_S)
            raise

    def _session(self) -> Attachment | None:
        """The live session; without one, sees to it that there will be."""
        with self._lock:
            live = self._live()
            if live is None and not self._closed and time.monotonic() >= self._next_try_s:
                self._start_attaching()
            return live

    def _live(self) -> Attachment | None:
        """Call with the lock held. Afterwards there is a live session or none at all."""
        if self._attachment is not None and not self._call.is_active():
            self._drop(Unavailable(f"{self.address}: the agent ended the session; attaching again"))
        return self._attachment

    def _ended(self) -> None:
        """The agent has gone: lets go of its arena now, since an idle engine would keep that memory from the next agent."""
        with self._lock:
            self._live()

    def _note(self, error: KvdirError, attachment: Attachment) -> str:
        """Remembers why the agent is of no use; a session it does not know is given up."""
        if isinstance(error, RemoteProtocolError | StaleEpoch):
            with self._lock:
                if self._attachment is attachment:
                    self._drop(error)
        return str(error)

    def _report_corrupt(self, attachment: Attachment, corrupt: Fingerprints, until_s: float) -> None:
        """Waits until_s at most; a report that takes longer goes on, unless the next one takes its place."""
        try:
            call = self._line.stub.Release.future(attachment.corrupt_request(corrupt), timeout=self._deadline_s)
            self._reporting = call  # gRPC ends a call that nobody refers to
            call.result(timeout=max(0.0, until_s - time.monotonic()))
        except grpc.FutureTimeoutError:
            return
        except grpc.RpcError as error:
            self._note(from_rpc_error(error, target=self.address), attachment)
        except (ValueError, grpc.FutureCancelledError):
            return  # gRPC's words for a channel closed meanwhile: the session has ended, its blocks are not here any more

    def _drop(self, failure: KvdirError) -> None:
        """Call with the lock held. failure: why there is no session from now on."""
        self._failure = failure
        if self._call is not None:
            self._call.cancel()
        if self._attachment is not None:
            self._attachment.close()
        self._attachment, self._call = None, None

    def _start_attaching(self) -> threading.Thread:
        """Call with the lock held and without a session: there is never more than one."""
        if self._attaching is None or not self._attaching.is_alive():
            self._next_try_s = time.monotonic() + ATTACH_PAUSE_S
            self._line.renew()
            self._attaching = threading.Thread(target=self._attach, name=f"kvdir-attach-{self.name}", daemon=True)
            self._attaching.start()
        elif self._call is not None and self._line.outdated:
            self._call.cancel()  # it waits with a certificate that may be refused for ever
        return self._attaching

    def _attach(self) -> None:
        """Runs in a thread until there is a session or a reason why not; `close` cancels it. Waits for an absent agent."""
        try:
            call = self._line.stub.Attach(self._hello, wait_for_ready=True)
        except ValueError:
            return  # gRPC's word for a channel closed meanwhile
        with self._lock:
            if self._closed:
                call.cancel()
                return
            self._call = call
        try:
            attachment = Attachment(next(call), self.namespace, self._device)
        except grpc.RpcError as error:
            failure: KvdirError = from_rpc_error(error, target=self.address)
        except StopIteration:
            failure = Unavailable(f"{self.address}: the agent is shutting down")
        except (KvdirError, OSError) as error:
            call.cancel()
            failure = error if isinstance(error, KvdirError) else Unavailable(f"{self.address}: {error}")
        else:
            with self._lock:
                if self._closed:
                    attachment.close()
                    return
                self._attachment = attachment
                self.directory.use(attachment.replica_path, coordinators=attachment.coordinators)
            if not call.add_callback(self._ended):
                self._ended()
            return
        with self._lock:
            if not self._closed:
                self._failure = failure


def connect(
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
    """An engine attached to the agent at `address`, such as "unix:/dev/shm/kvdir-node1.sock".

    Waits up to timeout_s. Raises UnknownNamespace (in what it differs), NoSpace (no room for one more that engines bring),
    InvalidInput (by the probe the engine hashes otherwise), Unavailable (nobody answers), ConfigError (tls cannot be used).
    tls: for coordinators that want a certificate, and for an agent that is reached by TCP. timeout_s=0 does neither: the engine
    attaches when the agent is there, and sees misses until then.
    """
    made = Engine(
        address, namespace=namespace, engine=engine, deadline_s=deadline_s, check=check,
        prefill_tokens_per_s=prefill_tokens_per_s, probe=probe, device=device, tls=tls,
    )  # fmt: skip
    try:
        if timeout_s:
            made.attach(timeout_s=timeout_s)
    except BaseException:
        made.close()
        raise
    return made
