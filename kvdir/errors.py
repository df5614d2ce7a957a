"""The error tree. A miss, a stale or a late block is a value, never one of these; an error means something is wrong.

Each carries `code`, a stable slug for programs, and `retriable`. Messages say what to do. The mapping to gRPC codes lives
in kvdir/rpc/status.py only. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class KvdirError(Exception):
    """Base of everything we raise on purpose."""

    code: ClassVar[str] = "error"
    retriable: ClassVar[bool] = False


class ConfigError(KvdirError):
    """Start-up configuration cannot work. Lists every fault at once."""

    code = "config"

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(["configuration has faults:", *(f"  - {fault}" for fault in faults)]))


class InvalidInput(KvdirError, ValueError):
    """The caller's arguments are wrong; nothing was changed."""

    code = "invalid-input"


class TooLarge(InvalidInput):
    """More than a configured limit; the message names the limit."""

    code = "too-large"


class NamespaceError(KvdirError, ValueError):
    """A namespace description is incomplete or ambiguous. Lists every fault at once."""

    code = "namespace"

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(["namespace is not complete:", *(f"  - {fault}" for fault in faults)]))


class UnknownNamespace(KvdirError):
    """Nobody here serves this namespace; the message says what is known and how it differs."""

    code = "unknown-namespace"


class RemoteProtocolError(KvdirError):
    """The other side sent nonsense or speaks another protocol version."""

    code = "remote-protocol"


class Unavailable(KvdirError):
    """Cannot be reached now."""

    code = "unavailable"
    retriable = True


class DeadlineExceeded(KvdirError, TimeoutError):
    """Nothing usable by the deadline."""

    code = "deadline"
    retriable = True


class Forbidden(KvdirError):
    """Whoever asks may not do this; the message says what it would take. Never about a namespace of a tenant that the caller
    may not see: that is UnknownNamespace, as if it were not there.
    """

    code = "forbidden"


class Overloaded(KvdirError):
    """A queue or admission limit; try again later, where it is known after retry_after_s."""

    code = "overloaded"
    retriable = True

    def __init__(self, message: str = "", *, retry_after_s: float = 0.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class StaleEpoch(KvdirError):
    """An epoch that is fenced or not the current one."""

    code = "stale-epoch"


class NoSpace(KvdirError):
    """Memory does not suffice; the message says how much is needed and free."""

    code = "no-space"


class UntrustedView(KvdirError):
    """A destructive action was given a cumulative figure that is not trusted."""

    code = "untrusted"


class Unsupported(KvdirError):
    """Whoever was asked cannot do this the way it is set up; the message says who can."""

    code = "unsupported"
