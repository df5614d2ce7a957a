"""Movers for device memory: one child process per device that engines have registered pools of, started with the first.

Rules: a pool is opened in every life of its mover; a mover that cannot open the device refuses the registration with its
reasons. Does not: know blocks (staging.py), or what the mover does (peer_agent/mover/device.py).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TypeVar

import msgspec

from kvdir.errors import ConfigError, InvalidInput, TooLarge, Unavailable
from peer_agent.memory.arena import Arena
from peer_agent.mover.backend import BackendError
from peer_agent.mover.child import MoverLost, MoverSpec
from peer_agent.mover.device_calls import Body, ClosePool, OpenPool, Settle, Stage, Staged, encode
from peer_agent.mover.messages import Call, Done, Failure, Late, Reply
from peer_agent.mover.process import CLOSE_S, MoverProcess

T = TypeVar("T")

MAX_DEVICES = 32
"""Each has a process, and a context on its device, for as long as the agent lives."""

CALL_S = 5.0
"""For opening and closing pools; generous, because a driver maps memory meanwhile."""

SETTLE_S = 86_400.0
"""Until a copy has ended. What hangs longer than the mover's pings allow ends with the mover."""


class DeviceMover:
    """The mover of one device."""

    def __init__(self, arena: Arena, identity: str) -> None:
        self._process = MoverProcess(MoverSpec("device", arena.fd, arena.arena_bytes, {"device": identity}))
        self._starting: asyncio.Task[object] | None = None
        self._opened: dict[int, bytes] = {}  # pool -> incarnation of the mover that has it open; b"": asked to, and not known
        self._opening = asyncio.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Raises ConfigError: what is missing, and what to do."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._process.start(), name="start-device-mover")
        await asyncio.wait({self._starting})
        if self._starting.cancelled():
            raise ConfigError(["the agent is closing"])
        try:
            self._starting.result()
        except BackendError as error:
            raise ConfigError(error.faults) from error

    async def open(self, pool: OpenPool, *, until_s: float) -> None:
        """Once a mover's life. ConnectionError: not to be opened (now), and why; ValueError: its sizes are others."""
        async with asyncio.timeout(until_s - time.monotonic()), self._opening:
            incarnation = (await self._process.ready(until_s=until_s)).incarnation
            if self._opened.get(pool.pool) == incarnation:
                return
            self._opened[pool.pool] = b""  # an answer that comes too late: it is to be closed, and asked for again before use
            try:
                await self._call("open_pool", pool, until_s=until_s)
            except (ConnectionError, ValueError):
                self._opened.pop(pool.pool, None)
                raise
            if pool.pool in self._opened:  # else it was closed meanwhile
                self._opened[pool.pool] = incarnation

    async def close_pool(self, pool: int) -> None:
        """ConnectionError: with the mover, the pool is gone as well."""
        if self._opened.pop(pool, None) is not None:
            await self._call("close_pool", ClosePool(pool), until_s=time.monotonic() + CALL_S)

    async def stage(self, wanted: Stage, *, until_s: float) -> Staged:
        """Answers a little after until_s at the latest (LATE), unless the mover hangs, which ends it. ConnectionError: nothing
        writes to the destinations any more.
        """
        body = await self._call("stage", wanted, until_s=until_s + SETTLE_S)
        return msgspec.msgpack.decode(body, type=Staged)

    async def settle(self, stage: int) -> None:
        """Returns when nothing of that stage writes any more."""
        try:
            await self._call("settle", Settle(stage), until_s=time.monotonic() + SETTLE_S)
        except ConnectionError:
            await self._process.reaped()  # a dead process does not write; one that has only hung up may

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting}, timeout=CLOSE_S)
        await self._process.close()

    async def _call(self, method: str, body: Body, *, until_s: float) -> bytes:
        data, deadline_ns = encode(body), int(until_s * 1e9)
        asked = self._process.ask(lambda ticket: Call(ticket, method, data, deadline_ns))
        return _body(await asyncio.shield(asked.answer))


class DeviceMovers:
    """All of an agent. kinds: which devices may be asked for; the rest is refused."""

    def __init__(self, arena: Arena, *, kinds: tuple[str, ...]) -> None:
        self._arena = arena
        self._kinds = kinds
        self._movers: dict[str, DeviceMover] = {}
        self._stages = itertools.count(1)

    async def of(self, identity: str) -> DeviceMover:
        """Started, if need be. InvalidInput: not allowed here, TooLarge: too many; Unavailable: it cannot be used, and why."""
        kind = identity.partition(":")[0]
        if kind not in self._kinds or len(identity) > 80:
            raise InvalidInput(f"devices of kind {kind!r} are not served here; the setting `devices` allows {self._kinds}")
        if identity not in self._movers and len(self._movers) >= MAX_DEVICES:
            raise TooLarge(f"pools of {MAX_DEVICES} devices are registered here, or one goes by many names: use its identity")
        mover = self._movers.setdefault(identity, DeviceMover(self._arena, identity))
        try:
            await mover.start()
        except ConfigError as error:
            if self._movers.get(identity) is mover:
                del self._movers[identity]
            await mover.close()
            raise Unavailable(f"the agent cannot open {identity}: {'; '.join(error.faults)}") from error
        return mover

    def next_stage(self) -> int:
        return next(self._stages)

    def pids(self) -> dict[str, int]:
        """By device; 0 while there is none."""
        return {identity: mover.pid for identity, mover in self._movers.items()}

    async def close(self) -> None:
        for mover in self._movers.values():
            await mover.close()


def _body(answer: Reply | Done | Late) -> bytes:
    if not isinstance(answer, Reply):
        raise MoverLost(f"the device mover answered a {type(answer).__name__}")
    match answer.failure:
        case Failure.NONE:
            return answer.body
        case Failure.VALUE:
            raise ValueError(answer.reason)
        case Failure.LATE | Failure.CONNECTION | Failure.OS:
            raise ConnectionError(answer.reason)
