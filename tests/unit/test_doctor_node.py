"""The doctor's checks of a node: each with facts that are in order, and with facts that are not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvdir.diagnosis import Finding, Verdict
from peer_agent.diagnosis.node import AgentFacts, Endpoint, EngineFacts, NodeFacts, SharedMemory, examine_node

GIB = 1 << 30
AGENT = AgentFacts(
    node="a", arena_path="/dev/shm/kvdir-a", arena_bytes=GIB, sessions=1, publishing="synced", namespaces=1, committed=9
)
MEMORY = SharedMemory(path="/dev/shm", total_bytes=8 * GIB, free_bytes=4 * GIB, wanted_bytes=GIB)
HEALTHY = NodeFacts(
    address="unix:/dev/shm/kvdir-a.sock", agent=AGENT, memory=MEMORY, planes={"shm": "", "tcp": ""}, open_files=65_536,
    engines=(Endpoint(name="tcp://127.0.0.1:5557", address="127.0.0.1:5557", failure=""),),
)  # fmt: skip


def with_agent(**fields: Any) -> dict[str, Any]:
    return {"agent": dataclasses.replace(AGENT, **fields)}


def with_memory(**fields: Any) -> dict[str, Any]:
    return {"memory": dataclasses.replace(MEMORY, **fields)}


def with_stream(state: str, *findings: str) -> dict[str, Any]:
    return {"streams": (EngineFacts(stream="a/vllm-0", endpoint="tcp://h:5557", batches=0, state=state, findings=findings),)}


def against(facts: NodeFacts) -> list[Finding]:
    return [item for item in examine_node(facts) if item.verdict is not Verdict.OK]


def test_everything_is_in_order_when_the_node_is() -> None:
    assert against(HEALTHY) == []
    assert {item.check for item in examine_node(HEALTHY)} == {
        "configuration", "agent", "publishing", "engines", "shared memory", "data planes", "limits", "engine events",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "check", "verdict", "words"),
    [
        ({"config_faults": ("listen: 0.0.0.0:1 is reachable",)}, "configuration", Verdict.FAULT, "0.0.0.0:1"),
        ({"insecure": True}, "configuration", Verdict.WARNING, "insecure"),
        ({"agent": None, "agent_failure": "no agent is at unix:x"}, "agent", Verdict.FAULT, "no agent is at unix:x"),
        (with_agent(publishing="fenced: a newer epoch"), "publishing", Verdict.FAULT, "a newer epoch"),
        (with_agent(publishing="no coordinator configured"), "publishing", Verdict.WARNING, "no coordinator"),
        (with_agent(publishing="c:7400: not connected (refused)"), "publishing", Verdict.FAULT, "refused"),
        (with_agent(sessions=0), "engines", Verdict.WARNING, "no engine is attached now; 9 blocks"),
        (with_agent(committed=0), "engines", Verdict.WARNING, "not one block"),
        (with_agent(refused=(("vllm-0", "hash_seed: '0' here, '1' there"),)), "hash seed", Verdict.FAULT, "'1' there"),
        (with_agent(refused=(("vllm-0", "block_tokens: 16 here"),)), "block size", Verdict.FAULT, "16 here"),
        (with_agent(sessions=0, refused=(("vllm-0", "weights: differ"),)), "engines", Verdict.FAULT, "weights: differ"),
        (with_memory(total_bytes=64 << 20, free_bytes=1 << 20), "shared memory", Verdict.WARNING, "64.0 MiB"),
        (
            {"agent": None} | with_memory(total_bytes=64 << 20, free_bytes=64 << 20),
            "shared memory", Verdict.FAULT, "the arena takes 1.0 GiB",
        ),
        ({"agent": None} | with_memory(free_bytes=GIB // 2), "shared memory", Verdict.FAULT, "512.0 MiB free"),
        ({"planes": {"shm": "", "ucx": "no RDMA device"}}, "data planes", Verdict.FAULT, "no RDMA device"),
        ({"planes": {"ucx": ""}, "memlock_bytes": 8 << 20}, "data planes", Verdict.WARNING, "8.0 MiB may be locked"),
        ({"open_files": 1024}, "limits", Verdict.WARNING, "1024 open files"),
        (
            {"engines": (Endpoint(name="vllm-0", address="h:5557", failure="Connection refused"),)},
            "engine events", Verdict.FAULT, "h:5557: Connection refused",
        ),
        (with_stream("no event within 60 s", "no_events"), "engine events", Verdict.WARNING, "no event within 60 s"),
        (with_stream("nobody serves it", "nobody_serves"), "engine events", Verdict.FAULT, "nobody serves it"),
        (with_stream("seed 7 would fit", "hash_mismatch"), "hash seed", Verdict.FAULT, "seed 7 would fit"),
        (with_stream("32 instead of 16", "block_size"), "block size", Verdict.FAULT, "32 instead of 16"),
        (with_stream("medium 'tape'", "rejected_events"), "refused events", Verdict.WARNING, "medium 'tape'"),
    ],
)  # fmt: skip
def test_a_check_finds_it_when_it_is_not_in_order(fields: dict[str, Any], check: str, verdict: Verdict, words: str) -> None:
    found = [item for item in against(dataclasses.replace(HEALTHY, **fields)) if item.check == check]
    assert [item.verdict for item in found] == [verdict]
    assert words in found[0].seen
    assert found[0].meaning
    assert found[0].fix


def test_locked_memory_is_not_asked_for_when_no_plane_pins_it() -> None:
    assert against(dataclasses.replace(HEALTHY, memlock_bytes=1)) == []


def test_docker_is_named_when_its_default_keeps_the_agent_from_starting() -> None:
    facts = dataclasses.replace(HEALTHY, agent=None, **with_memory(total_bytes=64 << 20, free_bytes=64 << 20))
    (found,) = (item for item in against(facts) if item.check == "shared memory")
    assert "64 MiB" in found.meaning
    assert "--shm-size" in found.fix
