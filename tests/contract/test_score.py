"""Scores over real gRPC: from a directory in memory, from a shared store, and through lookup workers; and `kvdir score`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import grpc.aio
import pytest
from click.testing import CliRunner, Result

from kvdir.cli.main import main
from kvdir.client.sync import Client
from kvdir.core.score import ScoreGroup, ScoreName, ScorePart, Scores
from kvdir.errors import InvalidInput, TooLarge, UnknownNamespace
from kvdir.hashing import fingerprints
from kvdir.location import MinTrust, Tier
from kvdir.namespace import Namespace
from kvdir.store.memory import MemoryBlockStore
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import FAST_CONFIG, Served, serving
from kvdir.testing.shared import Shared, shared
from kvdir.v1 import directory_pb2, directory_pb2_grpc

ENGINE = Namespace.announced(
    model=EXAMPLE_NAMESPACE.model, block_tokens=16, hash_scheme="vllm:sha256_cbor:low64", hash_seed="builtin"
)
ANNOUNCED = some_fingerprints(20, seed=1, width=8)
STORED = some_fingerprints(20, seed=2)
PROMPT = ScorePart((ScoreGroup((ScoreName(ENGINE.digest, ANNOUNCED), ScoreName(EXAMPLE_NAMESPACE.digest, STORED))),))


async def check_scores(served: Served | Shared) -> None:
    """Two ranks of an engine, the arena of their node, and an engine elsewhere."""
    async with (
        FakeNode(served.address, "n1") as arena,
        FakeNode(served.address, "n1/vllm-0@0", namespace=ENGINE) as first,
        FakeNode(served.address, "n1/vllm-0@1", namespace=ENGINE) as second,
        FakeNode(served.address, "n2/vllm-0", namespace=ENGINE) as other,
    ):
        first.store(ANNOUNCED.slice(0, 4), Tier.GPU)
        second.store(ANNOUNCED.slice(0, 2), Tier.GPU)
        other.store(ANNOUNCED.slice(0, 5), Tier.GPU)
        arena.store(STORED.slice(0, 8))
        for node in (arena, first, second, other):
            await node.synced()
        scores = await served.client.score([PROMPT])
        assert [(item.instance, item.matched_tokens) for item in scores.instances] == [("n1/vllm-0", 128), ("n2/vllm-0", 80)]
        near, far = scores.instances
        assert near.tiers == ((Tier.GPU, 64), (Tier.CPU, 64))
        assert near.score == pytest.approx(64 + 64 * 0.8)
        assert [(rank.dp_rank, rank.tokens, rank.through[0]) for rank in near.ranks] == [(0, 128, 64), (1, 128, 32)]
        assert [scores.nodes[number].node for number in far.nodes] == ["n2/vllm-0"]
        assert {scores.nodes[number].node for number in near.nodes} == {"n1", "n1/vllm-0@0", "n1/vllm-0@1"}
        assert scores.nodes[far.nodes[0]].epoch == other.epoch
        best = await served.client.score([PROMPT], weights={Tier.GPU: 1.0}, max_instances=1, min_trust=MinTrust.SYNCED)
        assert [(item.instance, item.score) for item in best.instances] == [("n2/vllm-0", 80.0)]
        await asyncio.to_thread(check_blocking, served.address, scores)


def check_blocking(address: str, expected: Scores) -> None:
    with Client(address, deadline_s=10.0, connect_timeout_s=5.0) as client:
        assert client.score([PROMPT]).instances == expected.instances


async def test_instances_are_scored_when_the_directory_is_in_memory() -> None:
    async with serving() as served:
        await check_scores(served)


async def test_instances_are_scored_when_the_directory_is_in_a_shared_store() -> None:
    async with shared(MemoryBlockStore()) as served:
        await check_scores(served)


async def test_workers_pass_scores_on_when_there_are_any() -> None:
    async with serving(replace(FAST_CONFIG, lookup_workers=1)) as served, FakeNode(served.address, "n1") as node:
        node.store(STORED)
        await node.synced()
        answers = []
        for _ in range(8):  # which process answers is the kernel's choice
            async with grpc.aio.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                name = directory_pb2.ScoreName(namespace_digest=EXAMPLE_NAMESPACE.digest)
                name.fingerprints.packed, name.fingerprints.width = STORED.packed, STORED.width
                part = directory_pb2.ScorePart(groups=[directory_pb2.ScoreGroup(names=[name])])
                request = directory_pb2.ScoreRequest(parts=[part])
                answers.append(await directory_pb2_grpc.DirectoryStub(channel).Score(request, timeout=5))
        assert [[(item.instance, item.matched_tokens) for item in answer.instances] for answer in answers] == [
            [("n1", 320)]
        ] * 8


async def test_unknown_names_are_told_and_the_others_counted_when_a_group_has_both() -> None:
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(STORED)
        await node.synced()
        scores = await served.client.score([PROMPT])
        assert [(item.instance, item.matched_tokens) for item in scores.instances] == [("n1", 320)]
        assert scores.unknown_namespaces == (ENGINE.digest,)
        with pytest.raises(UnknownNamespace, match=EXAMPLE_NAMESPACE.short):
            await served.client.score([ScorePart.of(ENGINE.digest, ANNOUNCED)])


async def test_bad_requests_are_refused_with_words_when_scored() -> None:
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(STORED)
        await node.synced()
        with pytest.raises(InvalidInput, match="at least one part"):
            await served.client.score([])
        with pytest.raises(InvalidInput, match="each group a name"):
            await served.client.score([ScorePart((ScoreGroup(()),))])
        with pytest.raises(InvalidInput, match="weight"):
            await served.client.score([PROMPT], weights={Tier.GPU: -1.0})
        with pytest.raises(TooLarge, match="max_fingerprints is 4096"):
            await served.client.score([ScorePart.of(EXAMPLE_NAMESPACE.digest, some_fingerprints(4097))])
        with pytest.raises(TooLarge, match="600 names in one score"):
            await served.client.score([ScorePart.of(EXAMPLE_NAMESPACE.digest, some_fingerprints(1))] * 600)


async def test_doubtful_engine_is_left_out_when_the_caller_asks_for_trust() -> None:
    async with serving() as served, FakeNode(served.address, "n1/e", namespace=ENGINE) as node:
        node.store(ANNOUNCED, Tier.GPU)
        await node.synced()
        directory = served.coordinator.directory
        stream = directory.nodes["n1/e"].stream
        assert stream is not None
        stream.cursor.heartbeat(node.outbox.last_seq + 3, now_s=served.coordinator.now_s())  # three events that never came
        part = ScorePart.of(ENGINE.digest, ANNOUNCED)
        doubtful = await served.client.score([part])
        trusted = await served.client.score([part], min_trust=MinTrust.SYNCED)
    (item,) = doubtful.instances
    assert not doubtful.nodes[item.nodes[0]].state.trusted
    assert (trusted.instances, trusted.below_trust) == ((), 1)


async def test_command_shows_instances_when_asked() -> None:
    async with serving() as served, FakeNode(served.address, "n1/e", namespace=ENGINE) as node:
        node.store(ANNOUNCED.slice(0, 3), Tier.GPU)
        await node.synced()
        arguments = ["score", ENGINE.digest.hex()[:8], *(item.hex() for item in ANNOUNCED), "--coordinator", served.address]
        shown = await asyncio.to_thread(CliRunner().invoke, main, arguments)
        document = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--output", "json"])
    assert shown.exit_code == 0, shown.stderr
    assert "n1/e" in shown.stdout
    assert "48 gpu" in shown.stdout
    (item,) = json.loads(document.stdout)["instances"]
    assert (item["instance"], item["score"], item["matched_tokens"], item["tiers"]) == ("n1/e", 48.0, 48, {"gpu": 48})
    assert [node["node"] for node in item["nodes"]] == ["n1/e"]


async def test_command_names_the_prompt_itself_when_it_is_given_tokens() -> None:
    tokens = list(range(64))
    prompt = fingerprints(tokens, scheme=ENGINE.hash_scheme, block_tokens=16)
    async with serving() as served, FakeNode(served.address, "n1/e", namespace=ENGINE) as node:
        node.store(prompt.slice(0, 3), Tier.GPU)
        await node.synced()

        async def run(*arguments: str, text: str = "") -> Result:
            arguments = ("score", *arguments, "--coordinator", served.address)
            return await asyncio.to_thread(CliRunner().invoke, main, arguments, input=text)

        for text in (str(tokens), " ".join(map(str, tokens))):
            shown = await run("--model", ENGINE.model, "--tokens", "-", "--output", "json", text=text)
            (item,) = json.loads(shown.stdout)["instances"]
            assert (item["instance"], item["matched_tokens"]) == ("n1/e", 48)
        unknown = await run("--model", "other", "--tokens", "-", text="1 2")
        assert f"models: {ENGINE.model}" in unknown.stderr
        assert "write token ids" in (await run("--model", ENGINE.model, "--tokens", "-", text="one two")).stderr
        assert "--model with --tokens" in (await run("--model", "m")).stderr
