"""Every command that asks, against a running cluster of real processes: answers, exit codes, one JSON document."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import peer_agent
from kvdir.cli.main import main
from kvdir.cli.output import Exit
from kvdir.fingerprint import Fingerprints
from kvdir.testing.simulate import trace_namespace
from kvdir.testing.trace import fingerprints_of
from kvdir.testing.wait import eventually
from peer_agent.cli.main import main as agent_main
from peer_agent.demo.cluster import ClusterPlan, DemoCluster, demo_cluster
from peer_agent.demo.content import Content

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NAMESPACE = trace_namespace(block_bytes=4096)
STORED = fingerprints_of(range(100, 120))
ASK_FOR_ONE = f"{NAMESPACE.digest.hex()} {STORED[0].hex()}"
COMMANDS = [
    "nodes",
    "trust",
    "status",
    "dump",
    "reconcile node-0",
    f"lookup {ASK_FOR_ONE}",
    "story node-0",
    "quota",
    f"explain {ASK_FOR_ONE}",
]


@dataclass(frozen=True, slots=True)
class Asking:
    """Runs commands against the cluster."""

    cluster: DemoCluster

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--coordinator", self.cluster.coordinator_address])

    def json(self, *arguments: str) -> Any:
        result = self.run(*arguments, "--output", "json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)


def store(cluster: DemoCluster, node: int, fingerprints: Fingerprints) -> None:
    content = Content(NAMESPACE.block_bytes)
    with peer_agent.connect(cluster.engine_address(node), namespace=NAMESPACE, engine="test") as engine:
        result = engine.store(fingerprints, [content.make(item) for item in fingerprints], deadline_s=20)
    assert result.stored == len(fingerprints)


@pytest.fixture(scope="module")
def asking() -> Iterator[Asking]:
    """Two nodes; node-0 holds all of STORED, node-1 the first half."""
    plan = ClusterPlan(namespace=NAMESPACE, nodes=2, blocks_per_node=64)
    with asyncio.Runner() as runner:
        entered = demo_cluster(plan)
        cluster = runner.run(entered.__aenter__())
        try:
            store(cluster, 0, STORED)
            store(cluster, 1, STORED.slice(0, 10))
            ask = Asking(cluster)
            runner.run(eventually(lambda: held(ask) == {"node-0": 20, "node-1": 10}, what="the directory knows the blocks"))
            yield ask
        finally:
            runner.run(entered.__aexit__(None, None, None))


def held(asking: Asking) -> dict[str, int]:
    return {node["node"]: sum(part["blocks"] for part in node["holdings"]) for node in asking.json("nodes")}


def test_nodes_say_state_holdings_and_address(asking: Asking) -> None:
    nodes = asking.json("nodes")
    assert [(node["node"], node["state"], node["missing_events"]) for node in nodes] == [
        ("node-0", "synced", 0),
        ("node-1", "synced", 0),
    ]
    assert nodes[0]["holdings"][0]["namespace"] == NAMESPACE.digest.hex()
    assert nodes[0]["holdings"][0]["tier"] == "cpu"


def test_trust_is_required_and_given(asking: Asking) -> None:
    assert asking.json("trust")["views_trusted"] is True
    assert asking.run("trust", "--require").exit_code == 0


def test_status_counts_streams_and_blocks(asking: Asking) -> None:
    status = asking.json("status")
    assert (status["streams_synced"], status["streams_total"], status["blocks"]) == (2, 2, 20)
    assert status["namespaces"][0]["model"] == "trace-replay"


def test_lookup_names_holders_of_each_run_and_leaves_gaps(asking: Asking) -> None:
    wanted = [STORED[3], fingerprints_of([7])[0], STORED[15]]
    answer = asking.json("lookup", NAMESPACE.digest.hex()[:6], *(item.hex() for item in wanted))
    assert (answer["asked"], answer["hits"]) == (3, 2)
    assert [(run["start"], run["count"], sorted(run["holders"])) for run in answer["runs"]] == [
        (0, 1, ["node-0/cpu", "node-1/cpu"]),
        (2, 1, ["node-0/cpu"]),
    ]


def test_dump_lists_every_block_once(asking: Asking) -> None:
    blocks = asking.json("dump")["blocks"]
    assert len(blocks) == len({block["key"] for block in blocks}) == 20
    assert len(asking.json("dump", "--node", "node-1")["blocks"]) == 10
    assert len(asking.json("dump", "--limit", "3")["blocks"]) == 3


def test_reconcile_restates_what_the_node_holds(asking: Asking) -> None:
    answer = asking.json("reconcile", "node-1")
    assert (answer["done"], answer["state"], answer["blocks"]) == (True, "synced", 10)


def test_story_tells_what_touched_a_block_and_a_node(asking: Asking) -> None:
    block = asking.json("story", STORED[15].hex())["entries"]
    assert [(entry["node"], entry["kind"]) for entry in block if entry["kind"] == "stored"] == [("node-0", "stored")]
    node = asking.json("story", "node-1")
    assert node["entries"][0]["kind"] == "registered"
    assert node["reaches_back_s"] > 0
    assert asking.json("story", "nobody")["entries"] == []


def test_quota_is_empty_when_none_is_set(asking: Asking) -> None:
    answer = asking.json("quota", "--require")
    assert (answer["quotas"], answer["orphans"], answer["enforcing"]) == ([], [], False)


def test_explain_asks_the_owners_for_every_block(asking: Asking) -> None:
    wanted = [STORED[3], STORED[15], fingerprints_of([7])[0]]
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    named = ("--trace", f"00-{trace_id}-00f067aa0ba902b7-01", "--request-id", "mine")
    answer = asking.json("explain", NAMESPACE.digest.hex()[:6], *(item.hex() for item in wanted), *named)
    assert answer["trace_id"] == trace_id
    assert [block["verdict"] for block in answer["blocks"]] == ["hit", "hit", "miss"]
    assert answer["blocks"][1]["claims"] == {"node-0": ["cpu"]}
    assert answer["blocks"][1]["owners"] == {"node-0": "present", "node-1": "absent"}


def test_explain_tells_the_differences_when_nobody_serves_the_namespace(asking: Asking, tmp_path: Path) -> None:
    fields = json.loads(NAMESPACE.canonical())
    fields.pop("version")
    file = tmp_path / "other.json"
    file.write_text(json.dumps(fields | {"hash_seed": "1"}))
    result = asking.run("explain", str(file), STORED[0].hex(), "--output", "json")
    assert result.exit_code == Exit.FAILED
    (served,) = json.loads(result.stdout)["served"]
    assert served["namespace"] == NAMESPACE.short
    assert "PYTHONHASHSEED" in served["differences"][0]


@pytest.mark.parametrize("command", COMMANDS)
def test_table_is_printed_for_people(asking: Asking, command: str) -> None:
    result = asking.run(*command.split())
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["lookup", "ffffff", STORED[0].hex()], Exit.USAGE, "0 namespaces begin with"),
        (["lookup", "ab" * 32, STORED[0].hex()], Exit.FAILED, "known: trace-replay"),
        (["lookup", NAMESPACE.digest.hex(), "xyz"], Exit.USAGE, "not hexadecimal"),
        (["lookup", NAMESPACE.digest.hex(), "abcd"], Exit.USAGE, "must be one of 8, 16, 32"),
        (["lookup", NAMESPACE.digest.hex()], Exit.USAGE, "--file"),
        (["reconcile", "node-9"], Exit.USAGE, "node-9"),
    ],
)
def test_bad_question_has_its_exit_code_and_says_what_to_do(
    asking: Asking, arguments: list[str], code: Exit, words: str
) -> None:
    result = asking.run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_unreachable_coordinator_has_exit_code_4_and_one_document(command: str) -> None:
    arguments = [*command.split(), "--coordinator", "127.0.0.1:1", "--timeout-s", "0.5", "--output", "json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == Exit.UNREACHABLE
    assert json.loads(result.stdout)["exit"] == 4
    assert "127.0.0.1:1" in result.stderr


def test_agent_tells_its_inventory(asking: Asking) -> None:
    result = CliRunner().invoke(agent_main, ["inventory", asking.cluster.engine_address(1), "--output", "json"])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["node"], document["namespaces"][0]["committed"]) == ("node-1", 10)


async def test_trust_is_refused_with_exit_code_5_when_a_node_has_fallen_silent() -> None:
    async with demo_cluster(ClusterPlan(namespace=NAMESPACE, nodes=1, blocks_per_node=16)) as cluster:
        asking = Asking(cluster)
        await asyncio.to_thread(store, cluster, 0, STORED.slice(0, 4))
        await eventually(lambda: held(asking) == {"node-0": 4})
        await cluster.kill(0)
        await eventually(lambda: asking.run("trust", "--require").exit_code == Exit.UNTRUSTED, within_s=30)
        figures = asking.json("trust")["figures"]
        assert [figure["trusted"] for figure in figures] == [False]
        assert figures[0]["reason"]
