"""Who makes the call that is being handled. Set around every handler by the interceptor, from what the gate found (gate.py).

Handlers ask `caller()`, or `caller_of(context)` for the identity alone: a context variable. Outside of a served call (tests,
calls within a process) it is somebody who may everything, because no port lets anybody in there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from kvdir.core.policy import ANONYMOUS, Claims, Grant, Identity

CERTIFICATE_KEY = "kvdir-certificate"
"""Metadata with which a lookup worker tells its main process whose call it passes on; believed over its unix socket only."""


class Caller:
    """One call. identity: follows the policy while the call is open. claims: of its certificate; None without one.

    Of a stream: judge(new identity) says why it may not go on under that, in words; on_end is how it ends then, where it does
    not want to be broken off. ended: why it had to.
    """

    __slots__ = ("break_off", "claims", "ended", "identity", "judge", "method", "on_end", "request")

    def __init__(self, identity: Identity, claims: Claims | None = None, method: str = "") -> None:
        self.identity = identity
        self.claims = claims
        self.method = method
        self.ended = ""
        self.on_end: Callable[[], None] | None = None
        self.break_off: Callable[[], object] = _nothing
        self.judge: Callable[[Identity], str] = _no_objection
        self.request: Callable[[], None] = _nothing
        """Counts one more request of this call; raises Overloaded beyond the identity's rate."""

    @property
    def tenants(self) -> Grant:
        """Whose namespaces it sees now."""
        return self.identity.tenants

    def end(self, words: str) -> None:
        """The call may not go on. Once."""
        if not self.ended:
            self.ended = words
            (self.on_end or self.break_off)()


def _nothing() -> None:
    pass


def _no_objection(identity: Identity) -> str:
    return ""


UNCHECKED = Caller(ANONYMOUS)
"""Of every call where callers cannot be told apart."""

_caller: ContextVar[Caller] = ContextVar("kvdir_caller", default=UNCHECKED)
set_caller = _caller.set


def caller() -> Caller:
    """Of the call that is being handled, also in tasks that it starts."""
    return _caller.get()


def caller_of(context: Any) -> Identity:
    """The identity behind the call being handled. context: the handler's."""
    return _caller.get().identity


def encode_claims(claims: Claims) -> str:
    """As a metadata value."""
    return json.dumps({"spiffe": claims.spiffe_ids, "names": claims.names})


def decode_claims(text: str) -> Claims:
    """Of a metadata value. Raises ValueError, KeyError or TypeError for what `encode_claims` did not make."""
    fields = json.loads(text)
    return Claims(tuple(fields["spiffe"]), tuple(fields["names"]))
