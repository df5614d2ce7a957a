"""The gate of a server: who calls, may they, and how often. Asked by the interceptor before and after every call.

    connection --certificate--> claims --policy--> identity --roles of the method--> let in, counted, or refused in words

Rules:
- without certificates nobody can be told apart: everybody is `anonymous` and may everything, which costs nothing;
- over a unix socket it is `local`; unless a lookup worker passes a call on there and says whose certificate it saw;
- a method that `rights` does not name is closed; health and reflection are not asked about;
- with another policy every open stream is judged again at once: it ends when its certificate lost the role, or what the
  stream itself rests on (Caller.judge); lookups on a stream see the new tenants from their next one on.
Refusals are counted by reason, never by name.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kvdir.core.policy import LOCAL, OPEN, Claims, Identity, Policy, Role, role_words
from kvdir.core.rate import TokenBucket
from kvdir.errors import Forbidden, Overloaded
from kvdir.obs.logs import say
from kvdir.rpc.caller import CERTIFICATE_KEY, UNCHECKED, Caller, decode_claims
from kvdir.rpc.status import grpc_code

REFUSALS, LIMITS = ("no_identity", "role", "node", "tenant"), ("rate", "streams")
"""Why something was refused, and by which limit: labels of metrics."""

AUDITED = ("done", "refused", "failed")
_REFUSED = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED")

_FREE = ("/grpc.health.", "/grpc.reflection.")
_KEPT = 4_096
"""Connections whose identity is remembered, and identities whose rate is."""

Rights = Mapping[str, frozenset[Role]]
"""Full method name, such as /kvdir.v1.Events/Publish, -> who may call it."""

log = logging.getLogger("kvdir.audit")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Of one identity in one process; 0: none."""

    max_requests_per_s: float = 0.0
    max_streams: int = 0


NO_LIMITS = CallLimits()


class Gate:
    """See the module docstring. secured: its ports ask for certificates. carries: a lookup worker's word is believed on a unix
    socket. audited: what a call is written down with in the audit log; None: it is not. refused, limited, audits: since the
    start, by reason, limit and outcome.
    """

    def __init__(
        self,
        *,
        rights: Rights | None = None,
        secured: bool = False,
        policy: Callable[[], Policy] = lambda: OPEN,
        limits: CallLimits = NO_LIMITS,
        carries: bool = False,
        audited: Callable[[str, Any], str | None] = lambda method, request: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refused: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))
        self.limited: Counter[str] = Counter(dict.fromkeys(LIMITS, 0))
        self.audits: Counter[str] = Counter(dict.fromkeys(AUDITED, 0))
        self._rights = rights or {}
        self._secured = secured
        self._policy = policy
        self._limits = limits
        self._carries = carries
        self._audited = audited
        self._now_s = now_s
        self._limited = limits.max_requests_per_s > 0 or limits.max_streams > 0
        self._known: dict[tuple[str, tuple[bytes, ...]], tuple[Claims, Identity | None]] = {}
        self._streams: set[Caller] = set()
        self._stream_counts: Counter[str] = Counter()
        self._buckets: dict[str, TokenBucket] = {}

    # -- calls -----------------------------------------------------------------------------------------------------------

    def admit(self, method: str, context: Any, *, stream: bool = False) -> Caller:
        """Raises Forbidden or Overloaded. Of a stream `leave` is due."""
        if not self._secured and not self._limited:
            return UNCHECKED
        if method.startswith(_FREE):
            return UNCHECKED
        claims, identity = self._who(context)
        try:
            return self._let_in(method, claims, identity, stream=stream)
        except (Forbidden, Overloaded) as error:
            name = identity.name if identity is not None else _named(claims)
            self._write_down(method, None, name, grpc_code(error).name)
            raise

    def _let_in(self, method: str, claims: Claims | None, identity: Identity | None, *, stream: bool) -> Caller:
        if identity is None:
            self.refuse("no_identity", _nobody(claims))
        if words := self._role_fault(method, identity):
            self.refuse("role", words)
        found = Caller(identity, claims, method)
        if self._limits.max_requests_per_s > 0:
            found.request = lambda: self._count_request(found.identity.name)
            found.request()
        if stream:
            self._open_stream(found)
        return found

    def leave(self, caller: Caller) -> None:
        """A stream has ended."""
        if caller in self._streams:
            self._streams.discard(caller)
            self._stream_counts[caller.identity.name] -= 1
            if not self._stream_counts[caller.identity.name]:
                del self._stream_counts[caller.identity.name]

    def refuse(self, reason: str, words: str) -> NoReturn:
        """Counts it. Raises Forbidden."""
        self.refused[reason] += 1
        raise Forbidden(words)

    def audit(self, method: str, request: Any, caller: Caller, outcome: str) -> None:
        """Writes down what an operator did, or was refused to do. outcome: name of a gRPC code."""
        if caller is UNCHECKED and (self._secured or self._limited):
            return  # refused in `admit`, and written down there
        self._write_down(method, request, caller.identity.name, outcome)

    def _write_down(self, method: str, request: Any, name: str, outcome: str) -> None:
        subject = self._audited(method, request)
        if subject is not None:
            short = method.rpartition("/")[2]
            self.audits["done" if outcome == "OK" else "refused" if outcome in _REFUSED else "failed"] += 1
            say(log, logging.INFO, "admin", identity=name, method=short, subject=subject or "-", outcome=outcome)

    # -- policy ----------------------------------------------------------------------------------------------------------

    def policy_changed(self) -> None:
        """Another policy is in force: streams that it does not let go on end."""
        self._known.clear()
        for caller in tuple(self._streams):
            identity = self._identify(caller.claims)
            words = _nobody(caller.claims) if identity is None else self._role_fault(caller.method, identity)
            if identity is not None and not words:
                words = self._rename(caller, identity)
            if words:
                self.refused["role"] += 1
                caller.end(f"the policy has changed: {words}")

    def _rename(self, caller: Caller, identity: Identity) -> str:
        if caller.identity.name != identity.name:
            self._stream_counts[caller.identity.name] -= 1
            self._stream_counts[identity.name] += 1
        return caller.become(identity)

    # -- who -------------------------------------------------------------------------------------------------------------

    def _who(self, context: Any) -> tuple[Claims | None, Identity | None]:
        if not self._secured:
            return None, UNCHECKED.identity
        peer = context.peer()
        if peer.startswith("unix:"):
            claims = _carried(context) if self._carries else None
            return claims, self._identify(claims)
        # One connection keeps its certificate: peer_identities costs 1 us, the whole of auth_context 8.
        key = (peer, tuple(context.peer_identities() or ()))
        known = self._known.get(key)
        if known is None:
            claims = claims_of(context.auth_context())
            if len(self._known) >= _KEPT:
                self._known.clear()
            known = self._known[key] = claims, self._policy().identify(claims.spiffe_ids, claims.names)
        return known

    def _identify(self, claims: Claims | None) -> Identity | None:
        policy = self._policy()
        if claims is None:
            return policy.local if self._secured else UNCHECKED.identity
        return policy.identify(claims.spiffe_ids, claims.names)

    def _role_fault(self, method: str, identity: Identity) -> str:
        if not self._secured:
            return ""
        wanted = self._rights.get(method, frozenset())
        if wanted & identity.roles:
            return ""
        return (
            f"{identity.name} (roles: {role_words(identity.roles)}) may not call {method.rpartition('/')[2]}: "
            f"that takes one of {role_words(wanted)}; the policy file of this server gives roles"
        )

    # -- how much --------------------------------------------------------------------------------------------------------

    def _open_stream(self, caller: Caller) -> None:
        name, limit = caller.identity.name, self._limits.max_streams
        if 0 < limit <= self._stream_counts[name]:
            self.limited["streams"] += 1
            raise Overloaded(f"{name} has {limit} streams open already (max_streams_per_identity): end one first")
        self._streams.add(caller)
        self._stream_counts[name] += 1

    def _count_request(self, name: str) -> None:
        now_s, per_s = self._now_s(), self._limits.max_requests_per_s
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= _KEPT:
                self._buckets.clear()
            bucket = self._buckets[name] = TokenBucket(per_s, now_s=now_s)
        wait_s = bucket.take(now_s)
        if wait_s:
            self.limited["rate"] += 1
            words = f"{name} asks more than {per_s:g} times a second (max_requests_per_s): again in {wait_s * 1000:.0f} ms"
            raise Overloaded(words, retry_after_s=wait_s)


def claims_of(auth: Mapping[str, Any]) -> Claims:
    """Of a gRPC connection's auth context, whose certificate TLS has checked."""
    return Claims(_texts(auth, "peer_spiffe_id"), (*_texts(auth, "peer_dns"), *_texts(auth, "x509_common_name")))


def _texts(auth: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in auth.get(key) or ())


def _carried(context: Any) -> Claims | None:
    for key, value in context.invocation_metadata() or ():
        if key == CERTIFICATE_KEY:
            return decode_claims(value)
    return None


def _named(claims: Claims | None) -> str:
    return LOCAL.name if claims is None else claims.words()


def _nobody(claims: Claims | None) -> str:
    return f"no identity of the policy has this certificate ({_named(claims)}): add it to the policy file of this server"
