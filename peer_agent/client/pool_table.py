"""The generation table of a registered pool, as the engine writes it: what makes overwriting device memory safe at any time.

    device memory            generation table: an arena file (peer_agent/memory/layout.py), one header per device slot
    +--------+               +------------------------------------------------+
    | slot 0 |  <----------> | generation | fingerprint | namespace | length 1 |
    +--------+               +------------------------------------------------+

Rules:
- A slot's header is odd before the first kernel that writes to the slot is launched, and even, with the block's name, only
  after the last one's event was seen done on this host. Slots start odd.
- The agent's mover (peer_agent/mover/device.py) compares the header before it begins a copy and after it saw the copy's end. If
  the copy read a byte of a later kernel, the header was odd by then: the copy is thrown away. So the engine waits for nobody.
- The agent makes the file and knows its size; the engine only writes headers. When the session ends, all of them become odd:
  what the engine overwrites afterwards concerns nobody.

Does not: call the agent (registered.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from kvdir.errors import InvalidInput, RemoteProtocolError, Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.rpc.lookup_codec import encode_fingerprints
from peer_agent import _native
from peer_agent.client.device import DeviceBlocks
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.memory.arena import Arena
from peer_agent.memory.device import Array, DevicePool
from peer_agent.v1 import engine_pb2


def register_request(pool: DevicePool, *, session: int) -> engine_pb2.RegisterPoolRequest:
    """Raises DeviceError when the pool cannot be exported, and why."""
    return engine_pb2.RegisterPoolRequest(
        session=session,
        device=pool.device.identity,
        handle=pool.device.export_handle(pool),
        slots=pool.slots,
        block_bytes=pool.block_bytes,
    )


class PoolTable:
    """Of one registration. Thread-safe, but one slot is one thread's at a time."""

    def __init__(
        self, pool: DevicePool, answer: engine_pb2.RegisterPoolResponse, *, session: int, namespace_digest: bytes
    ) -> None:
        """Maps the table and makes every slot odd. Raises ArenaError, RemoteProtocolError."""
        self.pool = pool
        self.number: int = answer.pool
        self.session = session
        self._digest = namespace_digest
        self._table = Arena.open(answer.table_path, writable=True)
        self._lock = threading.Lock()
        self._closed = False
        placed = self._table.classes[0]
        if self._table.arena_id != answer.table_id or placed.slots != pool.slots:
            self._table.close()
            raise RemoteProtocolError(f"{answer.table_path} is not the table of this pool: do both see the same file system?")
        self._first, self._stride = placed.first, placed.stride
        self.make_odd(range(pool.slots))

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Ends it: every slot odd, so that a copy still under way is not believed, and the file let go. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                _native.begin_write(self._table.region, self._offsets(np.arange(self.pool.slots)))
                self._table.close()

    def make_odd(self, slots: Sequence[int] | Array) -> Array:
        """From now on no copy of these slots is believed, nor one that is under way. Returns them checked. InvalidInput.

        After `close` they are odd for ever.
        """
        chosen = self.pool.checked(slots)
        with self._lock:
            if not self._closed:
                _native.begin_write(self._table.region, self._offsets(chosen))
        return chosen

    def make_even(self, fingerprints: Fingerprints, slots: Array) -> Array:
        """These slots hold these blocks, completely. Returns their generations. Unavailable after `close`."""
        with self._lock:
            if self._closed:
                raise Unavailable("this pool was unregistered, or its session has ended: register it again")
            try:
                records = _native.commit(
                    self._table.region,
                    self._offsets(slots),
                    self._digest,
                    fingerprints.packed,
                    fingerprints.width,
                    1,
                    bytes(8 * len(slots)),
                )
            except ValueError as error:
                raise InvalidInput(f"a slot was published before and not withdrawn since: {error}") from error
        return np.frombuffer(records, BLOCK_RECORD)["generation"]

    def publish_request(self, fingerprints: Fingerprints, blocks: DeviceBlocks) -> engine_pb2.PublishDeviceRequest:
        """Once `ready` was seen done: makes the headers even, and says so. InvalidInput: slots not withdrawn before."""
        generations = self.make_even(fingerprints, blocks.slots)
        return engine_pb2.PublishDeviceRequest(
            session=self.session,
            pool=self.number,
            fingerprints=encode_fingerprints(fingerprints),
            slots=blocks.slots.astype("<u4").tobytes(),
            generations=generations.astype("<u8").tobytes(),
        )

    def withdraw_request(self, slots: Array, *, deadline_ms: int) -> engine_pb2.WithdrawDeviceRequest:
        return engine_pb2.WithdrawDeviceRequest(
            session=self.session, pool=self.number, slots=slots.astype("<u4").tobytes(), deadline_ms=deadline_ms
        )

    def unregister_request(self) -> engine_pb2.UnregisterPoolRequest:
        return engine_pb2.UnregisterPoolRequest(session=self.session, pool=self.number)

    def check(self, fingerprints: Fingerprints, blocks: DeviceBlocks) -> None:
        """InvalidInput: other blocks than this pool's, or another number of them."""
        if blocks.pool is not self.pool:
            raise InvalidInput("these blocks are in another pool than the registered one")
        if len(blocks) != len(fingerprints):
            raise InvalidInput(f"{len(blocks)} device slots for {len(fingerprints)} fingerprints: pass one slot a block")

    def _offsets(self, slots: Array) -> bytes:
        return (np.uint64(self._first) + slots.astype(np.uint64) * np.uint64(self._stride)).astype("<u8").tobytes()
