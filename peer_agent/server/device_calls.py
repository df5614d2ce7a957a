"""The part of peer_agent.v1.Engine that is about device memory (tier gpu). Thin: messages to values, one call, and back."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import grpc.aio
import numpy as np

from kvdir.errors import InvalidInput
from kvdir.location import PROTOCOL_VERSION
from kvdir.rpc.lookup_codec import decode_fingerprints
from peer_agent.server.staging import Stager
from peer_agent.v1 import engine_pb2, engine_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

STAGE_TIME_SHARE = 0.5
"""Of a deadline, for bringing blocks from devices of this host; the rest is for peers, and for the answer."""


class DeviceCalls(engine_pb2_grpc.EngineServicer):
    """Base of EngineService."""

    _stager: Stager

    @abstractmethod
    def _namespace_of(self, session: int) -> bytes: ...

    @abstractmethod
    def _stored_in(self, session: int) -> bytes: ...

    @abstractmethod
    def _deadline_s(self, deadline_ms: int, context: Context | None) -> float: ...

    async def RegisterPool(self, request: engine_pb2.RegisterPoolRequest, context: Context) -> engine_pb2.RegisterPoolResponse:
        pool, table = await self._stager.register(
            self._stored_in(request.session),
            session=request.session,
            device=request.device,
            handle=request.handle,
            slots=request.slots,
            block_bytes=request.block_bytes,
        )
        return engine_pb2.RegisterPoolResponse(
            protocol_version=PROTOCOL_VERSION, pool=pool, table_path=table.path, table_id=table.arena_id
        )

    async def PublishDevice(
        self, request: engine_pb2.PublishDeviceRequest, context: Context
    ) -> engine_pb2.PublishDeviceResponse:
        self._stored_in(request.session)
        slots, generations = _numbers(request.slots, "<u4"), _numbers(request.generations, "<u8")
        fingerprints = decode_fingerprints(request.fingerprints)
        self._stager.publish(request.pool, fingerprints, slots, generations, session=request.session)
        return engine_pb2.PublishDeviceResponse(protocol_version=PROTOCOL_VERSION)

    async def WithdrawDevice(
        self, request: engine_pb2.WithdrawDeviceRequest, context: Context
    ) -> engine_pb2.WithdrawDeviceResponse:
        self._namespace_of(request.session)
        timeout_s = self._deadline_s(request.deadline_ms, context) if request.deadline_ms else 0.0
        slots = _numbers(request.slots, "<u4")
        reading = await self._stager.withdraw(request.pool, slots, session=request.session, timeout_s=timeout_s)
        return engine_pb2.WithdrawDeviceResponse(protocol_version=PROTOCOL_VERSION, reading=reading)

    async def UnregisterPool(
        self, request: engine_pb2.UnregisterPoolRequest, context: Context
    ) -> engine_pb2.UnregisterPoolResponse:
        self._namespace_of(request.session)
        self._stager.unregister(request.pool, session=request.session)
        return engine_pb2.UnregisterPoolResponse()


def _numbers(packed: bytes, kind: str) -> list[int]:
    if len(packed) % np.dtype(kind).itemsize:
        raise InvalidInput(f"{len(packed)} bytes of numbers of {np.dtype(kind).itemsize} bytes each: pass them packed")
    numbers: list[int] = np.frombuffer(packed, kind).tolist()
    return numbers
