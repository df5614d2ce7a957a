"""Options of channels and servers, in one place: keepalive, message sizes, ports, and a connect that has a deadline.

Why these values: gRPC's defaults keep a dead connection for ever (client keepalive off), answer frequent pings with GOAWAY,
share ports silently (so_reuseport), take 20 s to give up a connect, and let connections that say nothing take every
descriptor. Facts: grpc keepalive.md; grpc core's channel args.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from kvdir.errors import Unavailable
from kvdir.rpc.cancel import call_alone_cancelled
from kvdir.rpc.open_files import part_of_open_files
from kvdir.rpc.refusal import in_words

Options = Sequence[tuple[str, int | str]]

DEFAULT_MAX_MESSAGE_BYTES = 16 * 2**20
_ANY_METHOD = "/grpc.health.v1.Health/Check"
_REASON_S = 0.5
"""A call on a channel that has just failed ends at once, with the reason; if it connects after all, after so long."""


HANDSHAKE_MS = 5_000
"""From a connection to its TLS handshake and HTTP/2 preface: longer than our clients wait; gRPC's default is two minutes."""

IDLE_MS = 600_000
"""Without a call. Channels connect again by themselves; a stream that is open is a call."""

MAX_STREAMS = 1_024
"""Calls at a time on one connection; further ones wait at the client."""


def server_options(
    *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, share_port: bool = False, part: float = 0.5
) -> Options:
    """A port in use must be an error, not a second server that takes half of the calls; share_port: unless that is meant.

    part: of this process's descriptors that its connections may take; what comes beyond is closed at once (UNAVAILABLE).
    Connections have no greatest age: streams of events and feeds stay open for days, and certificates that were renewed need
    none, because the next connection uses them. Metadata is bounded by gRPC's defaults (8 KiB, at most 16 KiB).
    """
    return (
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", part_of_open_files(part)),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.so_reuseport", int(share_port)),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    )


def client_options(*, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> Options:
    """A connection of its own per channel; a silent peer is noticed within 15 s even without calls."""
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_http_proxy", 0),
    )


class NotConnected(Unavailable):
    """Nobody refused, and nobody answered."""


async def wait_ready(channel: grpc.aio.Channel, *, target: str, timeout_s: float, secure: bool = False) -> None:
    """Connects. Raises Unavailable when it is refused (at once), NotConnected when it takes longer than timeout_s.

    secure: it is TLS; a refusal is asked for its reason, which the state of a channel does not tell.
    """
    try:
        async with asyncio.timeout(timeout_s):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                    raise Unavailable(await _why(channel, target) if secure else _refused(target))
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        raise NotConnected(f"{target}: no connection within {timeout_s:.2g} s; is the address right?") from None


def wait_ready_blocking(channel: grpc.Channel, *, target: str, timeout_s: float, secure: bool = False) -> None:
    """As wait_ready, for a blocking channel."""
    heard: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    end_s = time.monotonic() + timeout_s
    channel.subscribe(heard.put, try_to_connect=True)
    try:
        while True:
            state = heard.get(timeout=max(0.0, end_s - time.monotonic()))
            if state is grpc.ChannelConnectivity.READY:
                return
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                raise Unavailable(_why_blocking(channel, target, end_s) if secure else _refused(target))
    except queue.Empty:
        raise NotConnected(f"{target}: no connection within {timeout_s:.2g} s; is the server running?") from None
    finally:
        channel.unsubscribe(heard.put)


def _refused(target: str) -> str:
    return f"{target}: connection refused or lost; is the server running, is the address right, does it want TLS?"


async def _why(channel: grpc.aio.Channel, target: str) -> str:
    method: Any = channel.unary_unary(_ANY_METHOD)
    try:
        await method(b"", timeout=_REASON_S)
    except grpc.aio.AioRpcError as error:
        return in_words(error.details() or "", target=target)
    except asyncio.CancelledError:
        if not call_alone_cancelled():
            raise
    return _refused(target)


def _why_blocking(channel: grpc.Channel, target: str, end_s: float) -> str:
    method: Any = channel.unary_unary(_ANY_METHOD)
    try:
        method(b"", timeout=max(0.01, min(_REASON_S, end_s - time.monotonic())))
    except grpc.RpcError as error:
        failed: Any = error
        return in_words(failed.details() or "", target=target)
    return _refused(target)
