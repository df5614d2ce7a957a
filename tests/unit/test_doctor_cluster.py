"""The doctor's checks of a cluster: each with facts that are in order, and with facts that are not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvdir.core.trust import Convergent, Cumulative
from kvdir.core.views import HoldingView, NamespaceView, NodeView, StatusView
from kvdir.diagnosis import Finding, Verdict, worst
from kvdir.diagnosis.cluster import ClusterFacts, CoordinatorFacts, examine
from kvdir.diagnosis.finding import ranked
from kvdir.diagnosis.namespaces import check_namespaces
from kvdir.location import NodeTrust, StreamState, Tier
from kvdir.namespace import Namespace

MODEL = Namespace.create(
    model="llama", weights="rev-1", kv_dtype="float16", layout="NHD", block_tokens=16,
    groups=[{"kind": "full", "layers": 1, "kv_heads": 1, "head_dim": 64}], position="rope", parallel="replicated",
    adapter="none", hash_scheme="vllm:sha256", hash_seed="0", cache_policy="exact",
)  # fmt: skip


def namespace(**fields: Any) -> Namespace:
    return dataclasses.replace(MODEL, **fields)


def announced(**fields: Any) -> Namespace:
    return Namespace.announced(
        **({"model": "llama", "block_tokens": 16, "hash_scheme": "vllm:sha256", "hash_seed": "0"} | fields)
    )


def node(
    name: str, *namespaces: Namespace, state: StreamState = StreamState.SYNCED, address: str = "10.0.0.1:7410", blocks: int = 8,
    seq: int = 5, started_unix_ms: int = 1_000, age_s: float = 0.1, reason: str = "",
) -> NodeView:  # fmt: skip
    figure = Cumulative(value=blocks, trusted=True, as_of_s=0.0, untrusted_since_s=None, reason="")
    holdings = tuple(HoldingView(item.digest, Tier.CPU, figure, figure, blocks, seq) for item in namespaces if blocks)
    return NodeView(
        trust=NodeTrust(name, 1, state, reason, age_s, 0, address), last_seq=seq, announced_seq=seq, gaps=0, replays=0,
        snapshots=0, used_bytes=Convergent(0, 0.0), capacity_bytes=Convergent(0, 0.0), dropped_events=0, holdings=holdings,
        untrusted_s=0.0, started_unix_ms=started_unix_ms, namespaces=tuple(item.digest for item in namespaces),
    )  # fmt: skip


def coordinator(*nodes: NodeView, known: tuple[Namespace, ...] = (MODEL,), **fields: Any) -> CoordinatorFacts:
    status: dict[str, Any] = {
        "version": "1", "coordinator": "c", "uptime_s": 1.0, "warming": False, "blocks": 8, "index_bytes": 1,
        "streams_synced": len(nodes), "streams_total": len(nodes), "lookups": 10, "lookup_blocks": 1000, "lookup_hits": 900,
        "events_applied": 1,
        "namespaces": tuple(NamespaceView(ns.digest, ns.canonical(), ns.block_bytes, ns.block_tokens) for ns in known),
    }  # fmt: skip
    lives = fields.pop("lives", {})
    return CoordinatorFacts(
        address="c:7400", status=StatusView(**(status | fields)), nodes=nodes, lives=lives, now_unix_ms=1_000_000
    )


def cluster(*coordinators: CoordinatorFacts, reached: dict[str, str] | None = None) -> ClusterFacts:
    return ClusterFacts(coordinators=coordinators, reached=reached or {})


HEALTHY = cluster(coordinator(node("a", MODEL), node("b", MODEL, address="10.0.0.2:7410")), reached={"10.0.0.1:7410": ""})


def only(findings: list[Finding], check: str) -> Finding:
    (found,) = (item for item in findings if item.check == check and item.verdict is not Verdict.OK)
    return found


def test_everything_is_in_order_when_nodes_share_a_namespace() -> None:
    findings = examine(HEALTHY)
    assert [item for item in findings if item.verdict is not Verdict.OK] == []
    checks = {item.check for item in findings}
    assert checks == {
        "coordinator", "streams", "one name, one agent", "events", "namespaces", "hash seed", "block size", "lookups", "peers",
        "refused events", "readable", "index", "clock",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "check", "verdict", "words"),
    [
        (cluster(CoordinatorFacts(address="c:7400", failure="refused")), "coordinator", Verdict.FAULT, "refused"),
        (cluster(coordinator(node("a", MODEL), warming=True)), "coordinator", Verdict.WARNING, "warming up"),
        (cluster(coordinator(node("a", MODEL), partial=True)), "coordinator", Verdict.WARNING, "gave up warming"),
        (cluster(coordinator(node("a", MODEL), store_fault="timeout")), "coordinator", Verdict.WARNING, "does not answer"),
        (
            cluster(coordinator(node("a", MODEL)), coordinator(node("a", MODEL), version="2")),
            "coordinator", Verdict.WARNING, "c:7400 1, c:7400 2",
        ),
        (cluster(coordinator(node("a", MODEL, state=StreamState.STALE))), "streams", Verdict.FAULT, "stale"),
        (
            cluster(coordinator(node("a", MODEL, state=StreamState.GAP, reason="doubt: slow subscriber"))),
            "streams", Verdict.WARNING, "slow subscriber",
        ),
        (cluster(coordinator()), "streams", Verdict.WARNING, "no node has said hello"),
        (cluster(coordinator(node("a", MODEL), lives={"a": 3})), "one name, one agent", Verdict.FAULT, "3 lives"),
        (cluster(coordinator(node("a", MODEL, seq=0, blocks=0))), "events", Verdict.WARNING, "not one event"),
        (
            cluster(coordinator(node("a", MODEL), lookup_hits=0)), "lookups", Verdict.FAULT, "0 found, although 8 blocks",
        ),
        (cluster(coordinator(node("a", MODEL), stale_reports=500)), "lookups", Verdict.WARNING, "not there any more"),
        (
            cluster(coordinator(node("a", MODEL)), reached={"10.0.0.1:7410": "Connection refused"}),
            "peers", Verdict.FAULT, "Connection refused",
        ),
        (
            cluster(coordinator(node("a", MODEL, address="127.0.0.1:7410"), node("b", MODEL))),
            "peers", Verdict.WARNING, "127.0.0.1:7410",
        ),
        (
            cluster(coordinator(node("a", MODEL), events_rejected={"medium 'tape'": 4})),
            "refused events", Verdict.WARNING, "medium 'tape'",
        ),
        (cluster(coordinator(node("a/vllm-0", announced(), address=""))), "readable", Verdict.WARNING, "all 8 blocks"),
        (cluster(coordinator(node("a", MODEL), evicted_blocks=9)), "index", Verdict.WARNING, "9 entries"),
        (cluster(coordinator(node("a", MODEL, started_unix_ms=1_060_000))), "clock", Verdict.WARNING, "60 s from now"),
    ],
)  # fmt: skip
def test_a_check_finds_it_when_it_is_not_in_order(facts: ClusterFacts, check: str, verdict: Verdict, words: str) -> None:
    found = only(examine(facts), check)
    assert found.verdict is verdict
    assert words in found.seen
    assert found.meaning
    assert found.fix


def test_no_other_check_speaks_up_when_no_coordinator_answers() -> None:
    findings = examine(cluster(CoordinatorFacts(address="c:7400", failure="refused")))
    assert [item.check for item in findings] == ["coordinator"]


def test_each_coordinator_is_judged_when_a_node_is_heard_by_one_of_them_only() -> None:
    first = coordinator(node("a", MODEL), node("b", MODEL))
    second = dataclasses.replace(coordinator(node("a", MODEL, state=StreamState.STALE, age_s=9.0)), address="d:7400")
    found = {item.subject: item for item in examine(cluster(first, second)) if item.check == "streams"}
    assert {subject: item.verdict for subject, item in found.items()} == {
        "a at d:7400": Verdict.FAULT, "b at d:7400": Verdict.WARNING,
    }  # fmt: skip
    assert "has not heard of it" in found["b at d:7400"].seen


def test_an_engine_that_restarts_is_not_taken_for_two_agents() -> None:
    facts = cluster(coordinator(node("a", MODEL), node("a/vllm-0", announced(), address=""), lives={"a": 1, "a/vllm-0": 5}))
    found = only(examine(facts), "one name, one agent")
    assert (found.subject, found.verdict) == ("a/vllm-0", Verdict.WARNING)
    assert "engine's log" in found.fix


def test_an_agent_need_not_say_anything_when_it_only_listens_to_engines() -> None:
    """It warns of an agent with a namespace and no block, engines or not."""
    engine = node("a/vllm-0", announced(), address="")
    for agent, warned in ((node("a", seq=0, blocks=0), []), (node("a", MODEL, seq=0, blocks=0), ["a"])):
        findings = examine(cluster(coordinator(agent, engine)))
        assert [i.subject for i in findings if i.check == "events" and i.verdict is not Verdict.OK] == warned


def test_lookups_are_not_judged_when_few_were_asked_for() -> None:
    facts = cluster(coordinator(node("a", MODEL), lookup_hits=0, lookup_blocks=99))
    assert worst(examine(facts)) is Verdict.OK


def test_an_engine_is_told_to_switch_events_on_when_its_stream_is_silent() -> None:
    facts = cluster(coordinator(node("a", MODEL), node("a/vllm-0", announced(), seq=0, blocks=0, address="")))
    found = only(examine(facts), "events")
    assert found.subject == "a/vllm-0"
    assert "enable_kv_cache_events" in found.fix


@pytest.mark.parametrize(
    ("fields", "check", "fix"),
    [
        ({"hash_seed": "1"}, "hash seed", "PYTHONHASHSEED"),
        ({"hash_scheme": "vllm:xxhash"}, "hash seed", "--prefix-caching-hash-algo"),
        ({"block_tokens": 32}, "block size", "--block-size"),
        ({"weights": "rev-2"}, "namespaces", "load the same weights"),
        ({"kv_dtype": "bfloat16", "hash_seed": "1"}, "namespaces", "--kv-cache-dtype"),
        ({"position": "rope-2"}, "namespaces", "make position the same"),
    ],
)
def test_nodes_of_one_model_are_told_why_when_they_can_never_share(fields: dict[str, Any], check: str, fix: str) -> None:
    other = namespace(**fields)
    found = only(check_namespaces({"a": [MODEL], "b": [other]}), check)
    assert (found.verdict, found.subject) == (Verdict.FAULT, "a and b")
    for name, value in fields.items():
        assert f"{name}: {getattr(MODEL, name)!r} here, {value!r} there" in found.seen
    assert fix in found.fix


@pytest.mark.parametrize(
    "others",
    [
        [namespace(parallel="tp=1/2")],
        [namespace(adapter="lora@1")],
        [namespace(tenant="salt:" + "0" * 32)],
        [namespace(hash_seed="1"), MODEL],
        [namespace(model="other", hash_seed="1")],
        [announced(hash_seed="1")],
    ],
)
def test_nothing_is_said_when_namespaces_differ_as_they_may(others: list[Namespace]) -> None:
    first = namespace(parallel="tp=0/2") if others[0].parallel != "replicated" else MODEL
    assert worst(check_namespaces({"a": [first], "b": others})) is Verdict.OK


def test_nodes_with_equal_namespaces_are_one_party_when_many_differ_from_few() -> None:
    views = {f"n{number}": [MODEL] for number in range(50)} | {"odd": [namespace(hash_seed="1")]}
    found = only(check_namespaces(views), "hash seed")
    assert found.subject == "n0 (and 49 like it) and odd"


def test_engines_are_compared_for_routers_when_they_only_announce() -> None:
    found = only(check_namespaces({"a/vllm-0": [announced()], "b/vllm-0": [announced(hash_seed="1")]}), "hash seed")
    assert "router" in found.meaning


def test_block_size_is_named_when_an_engine_differs_from_its_agent() -> None:
    findings = check_namespaces({"a": [MODEL], "a/vllm-0": [announced(block_tokens=32)]})
    found = only(findings, "block size")
    assert found.subject == "a/vllm-0"
    assert "blocks of 32 tokens, its agent of [16]" in found.seen


def test_faults_come_first_when_findings_are_shown() -> None:
    findings = examine(
        cluster(
            coordinator(
                node("a", MODEL, seq=0, blocks=0), node("b", namespace(hash_seed="1")), known=(MODEL, namespace(hash_seed="1"))
            )
        )
    )
    verdicts = [item.verdict for item in ranked(findings)]
    assert verdicts == sorted(verdicts, key=[Verdict.FAULT, Verdict.WARNING, Verdict.OK].index)
    assert worst(findings) is Verdict.FAULT
