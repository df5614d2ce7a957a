"""Questions under way of the blocking client, and which of several ends first."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import grpc

from kvdir.errors import KvdirError, Unavailable
from kvdir.rpc.status import from_rpc_error


class Question(Protocol):
    """Under way at one coordinator."""

    @property
    def end_s(self) -> float: ...
    def result(self) -> Any: ...
    def cancel(self) -> None: ...


class NotAsked:
    """A question that could not even be sent: it was too late, or the client is closed."""

    def __init__(self, end_s: float, error: KvdirError) -> None:
        self.end_s = end_s
        self._error = error

    def result(self) -> Any:
        raise self._error

    def cancel(self) -> None:
        pass


class Unary:
    """A question that is a call of its own; gRPC ends it at end_s."""

    def __init__(self, address: str, end_s: float, future: Any) -> None:
        self.end_s = end_s
        self.cancel: Callable[[], None] = future.cancel
        self._address = address
        self._future = future

    def result(self) -> Any:
        try:
            return self._future.result()
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self._address) from error
        except grpc.FutureCancelledError:
            raise Unavailable(f"{self._address}: the connection was closed") from None


def first_ended(ended: queue.SimpleQueue[str], under_way: Mapping[str, Question], *, wait_s: float | None) -> str:
    """The address of a question that has ended, or whose time is over; empty after wait_s."""
    left_s = min(question.end_s for question in under_way.values()) - time.monotonic()
    try:
        return ended.get(timeout=max(0.0, left_s if wait_s is None else min(left_s, wait_s)))
    except queue.Empty:
        now_s = time.monotonic()
        return next((address for address, question in under_way.items() if question.end_s <= now_s), "")
