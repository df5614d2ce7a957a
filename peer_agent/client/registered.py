"""Tier gpu, seen from the engine: a registered pool, and what is published from it.

    pool = engine.register_pool(device_pool)
    pool.withdraw(slots)                                                    # before the kernels that overwrite them
    ... kernels fill the slots, event = stream.record() ...
    pool.publish(fingerprints, DeviceBlocks(device_pool, slots, ready=event))
    pool.unregister()

Rules: slots that were withdrawn may be overwritten at once, whatever becomes of the agent (pool_table.py says why); nothing is
published before its event was seen done. A registration ends with the engine's session: `publish` then says so, and the engine
registers anew. Both classes have the same verbs and rules, for the blocking engine and for asyncio.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvdir.errors import InvalidInput, KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.obs.logs import say
from peer_agent.client.attachment import bounded_s, told_ms
from peer_agent.client.device import DeviceBlocks
from peer_agent.client.pool_table import PoolTable
from peer_agent.memory.device import Array

log = logging.getLogger(__name__)

REGISTER_S = 10.0
"""The first registration starts the agent's mover, which makes a context on the device and page-locks the arena."""

Rpc = Callable[[str, Any, float], Any]
AsyncRpc = Callable[[str, Any, float], Awaitable[Any]]
InThread = Callable[[Callable[[], None]], Awaitable[None]]


class RegisteredPool:
    """Made by Engine.register_pool. deadline_s: of calls that give none."""

    def __init__(self, table: PoolTable, rpc: Rpc, *, deadline_s: float) -> None:
        self._table = table
        self._rpc = rpc
        self._deadline_s = deadline_s

    def publish(self, fingerprints: Fingerprints, blocks: DeviceBlocks, *, deadline_s: float | None = None) -> str:
        """Says that the slots hold these blocks, once their `ready` event was seen done. Returns "", or why nobody was told.

        Raises InvalidInput for wrong blocks, and for slots that were not withdrawn since they were published last.
        """
        self._table.check(fingerprints, blocks)
        until_s = time.monotonic() + bounded_s(deadline_s, self._deadline_s)
        try:
            blocks.await_ready(until_s)
            self._rpc("PublishDevice", self._table.publish_request(fingerprints, blocks), until_s)
        except KvdirError as error:
            return _reason(error)
        return ""

    def withdraw(self, slots: Sequence[int] | Array, *, deadline_s: float = 0.0) -> int:
        """Takes slots back; they may be overwritten as soon as this was called, also when the agent does not answer.

        Waits up to deadline_s until the agent has stopped copying them; returns how many it then still copies, to no avail.
        """
        chosen = self._table.make_odd(slots)
        request = self._table.withdraw_request(chosen, deadline_ms=told_ms(deadline_s))
        try:
            reading: int = self._rpc("WithdrawDevice", request, time.monotonic() + (deadline_s or self._deadline_s)).reading
        except KvdirError as error:
            return _undelivered(error)
        return reading

    def unregister(self) -> None:
        """Nothing is copied from the pool any more, but what is under way."""
        self._table.make_odd(range(self._table.pool.slots))
        with contextlib.suppress(KvdirError):  # the session has ended, and with it the registration
            self._rpc("UnregisterPool", self._table.unregister_request(), time.monotonic() + self._deadline_s)
        self._table.close()


class AsyncRegisteredPool:
    """Made by aio.Engine.register_pool; see RegisteredPool."""

    def __init__(self, table: PoolTable, rpc: AsyncRpc, in_thread: InThread, *, deadline_s: float) -> None:
        self._table = table
        self._rpc = rpc
        self._in_thread = in_thread
        self._deadline_s = deadline_s

    async def publish(self, fingerprints: Fingerprints, blocks: DeviceBlocks, *, deadline_s: float | None = None) -> str:
        self._table.check(fingerprints, blocks)
        until_s = time.monotonic() + bounded_s(deadline_s, self._deadline_s)
        try:
            if not blocks.ready.done():
                await self._in_thread(lambda: blocks.await_ready(until_s))
            await self._rpc("PublishDevice", self._table.publish_request(fingerprints, blocks), until_s)
        except KvdirError as error:
            return _reason(error)
        return ""

    async def withdraw(self, slots: Sequence[int] | Array, *, deadline_s: float = 0.0) -> int:
        chosen = self._table.make_odd(slots)
        request = self._table.withdraw_request(chosen, deadline_ms=told_ms(deadline_s))
        until_s = time.monotonic() + (deadline_s or self._deadline_s)
        try:
            reading: int = (await self._rpc("WithdrawDevice", request, until_s)).reading
        except KvdirError as error:
            return _undelivered(error)
        return reading

    async def unregister(self) -> None:
        self._table.make_odd(range(self._table.pool.slots))
        with contextlib.suppress(KvdirError):
            await self._rpc("UnregisterPool", self._table.unregister_request(), time.monotonic() + self._deadline_s)
        self._table.close()


def _reason(error: KvdirError) -> str:
    """Of a publication that did not happen; the caller's own mistakes are raised."""
    if isinstance(error, InvalidInput):
        raise error
    return str(error)


def _undelivered(error: KvdirError) -> int:
    say(log, logging.DEBUG, "withdrawal not delivered; the slots are odd, so nothing is copied from them", error=error)
    return 0
