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

    ended: why a stream had to end, in words.
    """

    __slots__ = ("_judge", "_on_end", "break_off", "claims", "ended", "identity", "method", "request")

    def __init__(self, identity: Identity, claims: Claims | None = None, method: str = "") -> None:
        self.identity = identity
        self.claims = claims
        self.method = method
        self.ended = ""
        self.break_off: Callable[[], object] = _nothing
        self._judge: Callable[[Identity], str] = _no_objection
        self._on_end: Callable[[], None] | None = None
        self.request: Callable[[], None] = _nothing
        """Counts one more request of this call; raises Overloaded beyond the identity's rate."""

    @property
    def tenants(self) -> Grant:
        """Whose namespaces it sees now."""
        return self.identity.tenants

    def rests_on(self, judge: Callable[[Identity], str], *, on_end: Callable[[], None] | None = None) -> None:
        """What a stream needs beside its role. judge: of the identity under another policy, why it may not go on, in words.
        on_end: how it ends then; otherwise it is broken off. Judged now, too: what was asked before may have been waited for.
        """
        self._judge, self._on_end = judge, on_end
        if words := judge(self.identity):
            self.end(words)

    def become(self, identity: Identity) -> str:
        """Another policy is in force. Why the stream may not go on under it."""
        self.identity = identity
        return self._judge(identity)

    def end(self, words: str) -> None:
        """The call may not go on. Once."""
        if not self.ended:
            self.ended = words
            (self._on_end or self.break_off)()


class _Anybody(Caller):
    """Of all calls at once, so nothing of one call is kept in it."""

    __slots__ = ()

    def rests_on(self, judge: Callable[[Identity], str], *, on_end: Callable[[], None] | None = None) -> None:
        pass


def _nothing() -> None:
    pass


def _no_objection(identity: Identity) -> str:
    return ""


UNCHECKED: Caller = _Anybody(ANONYMOUS)
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


def carried_claims(who: Caller) -> tuple[tuple[str, str], ...]:
    """Metadata for a call that is passed on for somebody; none for whom no certificate was asked."""
    return () if who.claims is None else ((CERTIFICATE_KEY, encode_claims(who.claims)),)


def decode_claims(text: str) -> Claims:
    """Of a metadata value. Raises ValueError, KeyError or TypeError for what `encode_claims` did not make."""
    fields = json.loads(text)
    return Claims(tuple(fields["spiffe"]), tuple(fields["names"]))
