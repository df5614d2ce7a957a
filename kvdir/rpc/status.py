"""The error tree <-> gRPC statuses, both ways; the only place that knows both.

On the wire an error is a gRPC code, our message as its details, and our stable slug in the trailing metadata. Other gRPC
implementations understand the code; our own clients get the same exception class back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import grpc

from kvdir import errors
from kvdir.errors import KvdirError

CODE_KEY = "kvdir-code"
"""Trailing metadata key of the slug."""
RETRY_KEY = "kvdir-retry-after-ms"
"""Trailing metadata key of Overloaded.retry_after_s, where that is known."""

_GRPC_CODES: dict[type[KvdirError], grpc.StatusCode] = {
    errors.ConfigError: grpc.StatusCode.INTERNAL,
    errors.TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NamespaceError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownNamespace: grpc.StatusCode.NOT_FOUND,
    errors.RemoteProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StaleEpoch: grpc.StatusCode.ABORTED,
    errors.NoSpace: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UntrustedView: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    KvdirError: grpc.StatusCode.UNKNOWN,
}

_BY_SLUG: dict[str, type[KvdirError]] = {cls.code: cls for cls in _GRPC_CODES}

_BY_GRPC_CODE: dict[grpc.StatusCode, type[KvdirError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidInput,
    grpc.StatusCode.NOT_FOUND: errors.InvalidInput,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.TooLarge,
    grpc.StatusCode.PERMISSION_DENIED: errors.Forbidden,
    grpc.StatusCode.UNAUTHENTICATED: errors.Forbidden,
    grpc.StatusCode.UNIMPLEMENTED: errors.RemoteProtocolError,
    grpc.StatusCode.CANCELLED: errors.Unavailable,
}


def grpc_code(error: KvdirError) -> grpc.StatusCode:
    """The gRPC code under which the error travels."""
    return next(_GRPC_CODES[cls] for cls in type(error).__mro__ if cls in _GRPC_CODES)


def trailing(error: KvdirError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that carries the slug, and when to come again."""
    slug = ((CODE_KEY, error.code),)
    if isinstance(error, errors.Overloaded) and error.retry_after_s:
        return (*slug, (RETRY_KEY, str(math.ceil(error.retry_after_s * 1000))))
    return slug


def from_rpc_error(error: grpc.RpcError, *, target: str) -> KvdirError:
    """The error of our tree that a failed call stands for. target: the address, for the message."""
    call: Any = error  # grpc.aio.AioRpcError, or the sync client's error that is also a Call
    code, details = call.code(), call.details() or ""
    trailing_metadata = tuple(call.trailing_metadata() or ())
    cls = _BY_SLUG.get(_value(trailing_metadata, CODE_KEY))
    if cls is None:
        cls = _BY_GRPC_CODE.get(code, KvdirError)
        details = f"{target}: {details or code.name}"
    made = _make(cls, details)
    after_ms = _value(trailing_metadata, RETRY_KEY)
    if isinstance(made, errors.Overloaded) and after_ms.isdecimal():
        made.retry_after_s = int(after_ms) / 1000
    return made


def words(error: KvdirError) -> str:
    """The error as LookupResponse.error: "slug: message"."""
    return f"{error.code}: {error}"


def from_words(text: str) -> KvdirError:
    """The error that LookupResponse.error stands for."""
    slug, _, message = text.partition(": ")
    return _make(_BY_SLUG.get(slug, KvdirError), message)


def _make(cls: type[KvdirError], message: str) -> KvdirError:
    made = cls.__new__(cls)
    Exception.__init__(made, message)
    if isinstance(made, errors.ConfigError | errors.NamespaceError):
        made.faults = tuple(message.splitlines())
    if isinstance(made, errors.Overloaded):
        made.retry_after_s = 0.0
    return made


def _value(metadata: Iterable[Any], wanted: str) -> str:
    for key, value in metadata:
        if key == wanted:
            return value.decode() if isinstance(value, bytes) else str(value)
    return ""
