"""kvdir/rpc/gate.py: who calls, may they, how often; and what becomes of open streams under another policy."""

from __future__ import annotations

import logging
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdir.core.policy import Claims, Identity, Policy, Role
from kvdir.core.policy_parse import parse_policy
from kvdir.core.rate import BURST_S, TokenBucket
from kvdir.errors import Forbidden, Overloaded
from kvdir.rpc.caller import CERTIFICATE_KEY, UNCHECKED, Caller, encode_claims
from kvdir.rpc.gate import CallLimits, Gate

PUBLISH, DUMP, LOOKUP = "/s/Publish", "/s/Dump", "/s/Lookup"
RIGHTS = {
    PUBLISH: frozenset((Role.AGENT,)),
    DUMP: frozenset((Role.ADMIN,)),
    LOOKUP: frozenset((Role.AGENT, Role.ROUTER)),
}
POLICY = """
[[identity]]
name = "agent-{node}"
spiffe = ["spiffe://d/agent/{node}"]
roles = ["agent"]
tenants = ["none"]
nodes = ["{node}"]
[[identity]]
name = "boss"
spiffe = ["spiffe://d/boss"]
roles = ["admin"]
tenants = ["*"]
"""


def policy(text: str = POLICY) -> Policy:
    return parse_policy(tomllib.loads(text), salt_digest_of=lambda path: "")


class Context:
    """As much of a gRPC context as the gate asks for. asked: how often the whole auth context was read."""

    def __init__(self, spiffe: str = "", *, peer: str = "ipv4:127.0.0.1:1", metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._spiffe = spiffe
        self._peer = peer
        self._metadata = metadata
        self.asked = 0

    def peer(self) -> str:
        return self._peer

    def peer_identities(self) -> list[bytes]:
        return [self._spiffe.encode()]

    def auth_context(self) -> dict[str, list[bytes]]:
        self.asked += 1
        return {"peer_spiffe_id": [self._spiffe.encode()], "x509_common_name": [b"cn"]}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


class Secured:
    """A gate over a policy that tests change."""

    def __init__(self, **options: Any) -> None:
        self.policy = policy()
        self.now_s = 0.0
        self.gate = Gate(rights=RIGHTS, secured=True, policy=lambda: self.policy, now_s=lambda: self.now_s, **options)

    def becomes(self, text: str) -> None:
        self.policy = policy(text)
        self.gate.policy_changed()


AGENT = "spiffe://d/agent/a"


def test_everybody_is_let_in_unasked_when_there_are_no_certificates() -> None:
    assert Gate(rights=RIGHTS).admit(DUMP, None) is UNCHECKED


def test_a_role_opens_its_methods_and_no_other_when_certificates_are_shown() -> None:
    world = Secured()
    assert world.gate.admit(PUBLISH, Context(AGENT)).identity.name == "agent-a"
    assert world.gate.admit(LOOKUP, Context(AGENT)).tenants.names == {"none"}
    for context, method, words in (
        (Context(AGENT), DUMP, "takes one of admin"),
        (Context("spiffe://d/boss"), PUBLISH, "takes one of agent"),
        (Context(AGENT), "/s/Unknown", "takes one of none"),
    ):
        with pytest.raises(Forbidden, match=words):
            world.gate.admit(method, context)
    with pytest.raises(Forbidden, match="no identity of the policy has this certificate"):
        world.gate.admit(LOOKUP, Context("spiffe://d/stranger"))
    assert (world.gate.refused["role"], world.gate.refused["no_identity"]) == (3, 1)


def test_health_is_free_when_the_certificate_is_a_strangers() -> None:
    assert Secured().gate.admit("/grpc.health.v1.Health/Check", Context("spiffe://d/stranger")) is UNCHECKED


def test_a_certificate_is_read_once_when_a_connection_asks_often() -> None:
    world, context = Secured(), Context(AGENT)
    for _ in range(5):
        world.gate.admit(LOOKUP, context)
    assert context.asked == 1
    other = Context("spiffe://d/agent/b")  # the port is another's now
    assert world.gate.admit(LOOKUP, other).identity.name == "agent-b"


def test_a_unix_socket_is_local_and_carries_certificates_only_when_it_may() -> None:
    carried = ((CERTIFICATE_KEY, encode_claims(Claims((AGENT,), ("cn",)))),)
    context = Context(peer="unix:", metadata=carried)
    assert Secured(carries=True).gate.admit(LOOKUP, context).identity.name == "agent-a"
    assert Secured().gate.admit(LOOKUP, context).identity.name == "local"
    over_tcp = Context("spiffe://d/boss", metadata=carried)
    assert Secured(carries=True).gate.admit(DUMP, over_tcp).identity.name == "boss"


def test_a_stream_ends_when_its_certificate_loses_the_role() -> None:
    world, ended = Secured(), []
    stream = world.gate.admit(PUBLISH, Context(AGENT), stream=True)
    stream.break_off = lambda: ended.append(stream.ended)
    world.becomes(POLICY + "\n")
    assert ended == []
    world.becomes(POLICY.replace('["agent"]', '["router"]').replace('nodes = ["{node}"]', ""))
    assert len(ended) == 1
    assert "policy has changed" in ended[0]
    assert "takes one of agent" in ended[0]
    world.gate.leave(stream)
    with pytest.raises(Forbidden):
        world.gate.admit(PUBLISH, Context(AGENT))


def test_a_stream_ends_its_own_way_when_what_it_rests_on_is_gone() -> None:
    world, ended = Secured(), []
    stream = world.gate.admit(PUBLISH, Context(AGENT), stream=True)

    def judge(identity: Identity) -> str:
        return "" if identity.may_publish("a") else "not as a"

    stream.rests_on(judge, on_end=lambda: ended.append(stream.ended))
    world.becomes(POLICY.replace("none", "*"))
    assert stream.tenants.every
    assert ended == []
    world.becomes(POLICY.replace('nodes = ["{node}"]', 'nodes = ["x-{node}"]'.replace("x-{node}", "other")))
    assert ended == ["the policy has changed: not as a"]


def test_a_stream_ends_at_once_when_its_right_went_before_it_said_what_it_rests_on() -> None:
    world, ended = Secured(), []
    stream = world.gate.admit(PUBLISH, Context(AGENT), stream=True)
    stream.rests_on(lambda identity: "too late", on_end=lambda: ended.append(stream.ended))
    assert ended == ["too late"]


def test_nothing_of_a_call_is_kept_when_callers_are_not_checked() -> None:
    UNCHECKED.rests_on(lambda identity: "no")
    assert UNCHECKED.become(UNCHECKED.identity) == ""


def test_streams_of_one_identity_are_bounded_when_there_is_a_limit() -> None:
    world = Secured(limits=CallLimits(max_streams=2))
    first = world.gate.admit(PUBLISH, Context(AGENT), stream=True)
    world.gate.admit(LOOKUP, Context(AGENT), stream=True)
    with pytest.raises(Overloaded, match="max_streams_per_identity"):
        world.gate.admit(LOOKUP, Context(AGENT), stream=True)
    world.gate.admit(LOOKUP, Context("spiffe://d/agent/b"), stream=True)
    world.gate.leave(first)
    world.gate.leave(first)
    world.gate.admit(LOOKUP, Context(AGENT), stream=True)
    assert world.gate.limited["streams"] == 1


def test_requests_of_one_identity_are_bounded_when_there_is_a_rate() -> None:
    world = Secured(limits=CallLimits(max_requests_per_s=10))
    for _ in range(20):  # 2 s of them at once
        world.gate.admit(LOOKUP, Context(AGENT))
    with pytest.raises(Overloaded, match="max_requests_per_s") as caught:
        world.gate.admit(LOOKUP, Context(AGENT))
    assert caught.value.retry_after_s == pytest.approx(0.1)
    world.gate.admit(LOOKUP, Context("spiffe://d/agent/b"))
    world.now_s = 0.11
    stream: Caller = world.gate.admit(LOOKUP, Context(AGENT))
    with pytest.raises(Overloaded):
        stream.request()
    assert world.gate.limited["rate"] == 2


def test_an_admins_calls_are_written_down_when_they_are_audited(caplog: pytest.LogCaptureFixture) -> None:
    world = Secured(audited=lambda method, request: "node=a" if method == DUMP else None)
    with caplog.at_level(logging.INFO, logger="kvdir.audit"):
        who = world.gate.admit(DUMP, Context("spiffe://d/boss"))
        world.gate.audit(DUMP, None, who, "OK")
        world.gate.audit(LOOKUP, None, who, "OK")
        with pytest.raises(Forbidden):
            world.gate.admit(DUMP, Context(AGENT))
        world.gate.audit(DUMP, None, UNCHECKED, "PERMISSION_DENIED")  # as the interceptor does: not a second time
        with pytest.raises(Forbidden):
            world.gate.admit(DUMP, Context("spiffe://d/stranger"))
        limited = Secured(limits=CallLimits(max_requests_per_s=0.1), audited=lambda method, request: "node=a")
        limited.gate.admit(DUMP, Context("spiffe://d/boss"))
        with pytest.raises(Overloaded):
            limited.gate.admit(DUMP, Context("spiffe://d/boss"))
    said = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [(item["identity"], item["method"], item["subject"], item["outcome"]) for item in said] == [
        ("boss", "Dump", "node=a", "OK"),
        ("agent-a", "Dump", "node=a", "PERMISSION_DENIED"),
        ("spiffe://d/stranger, cn", "Dump", "node=a", "PERMISSION_DENIED"),
        ("boss", "Dump", "node=a", "RESOURCE_EXHAUSTED"),
    ]
    assert dict(world.gate.audits) == {"done": 1, "refused": 2, "failed": 0}


@given(st.floats(0.5, 100), st.lists(st.floats(0, 2), max_size=60))
def test_no_more_is_granted_than_the_rate_and_a_burst_when_anything_is_asked(per_s: float, pauses_s: list[float]) -> None:
    bucket, now_s, granted = TokenBucket(per_s, now_s=0.0), 0.0, 0
    for pause_s in pauses_s:
        now_s += pause_s
        wait_s = bucket.take(now_s)
        granted += wait_s == 0
        assert granted <= max(1.0, per_s * BURST_S) + per_s * now_s + 1e-6
        assert wait_s == 0 or bucket.take(now_s + wait_s * 1.001) == 0 or per_s < 1e-3
        if wait_s:
            now_s += wait_s * 1.001
            granted += 1
