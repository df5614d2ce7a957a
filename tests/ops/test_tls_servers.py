"""Who gets in with which certificate, and what those hear who do not: coordinator, lookup worker, agent, by every client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import click
import grpc
import grpc.aio
import numpy as np
import pytest
from click.testing import CliRunner, Result

import kvdir
import peer_agent
from kvdir.cli.main import main as kvdir_main
from kvdir.client.aio import DirectoryClient
from kvdir.client.sync import Client
from kvdir.errors import ConfigError, Unavailable
from kvdir.hashing import fingerprints
from kvdir.rpc import tls as tls_module
from kvdir.rpc.certificates import TlsFiles
from kvdir.rpc.channel import client_options, wait_ready
from kvdir.rpc.tls import Dialer
from kvdir.server.app import build_coordinator
from kvdir.server.serve import running
from kvdir.testing.certificates import shared_certificates
from kvdir.testing.fake_engine import FakeEngine, stored
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.indexing import call
from kvdir.testing.served import FAST_CONFIG, Served, serving
from kvdir.testing.wait import eventually
from peer_agent.cli.main import main as peer_agent_main
from peer_agent.testing.cluster import LocalCluster, local_cluster, sample_namespace

CERTIFICATES = shared_certificates()
ADMIN = CERTIFICATES.files("admin")
BLOCKS = some_fingerprints(10)
OUTSIDERS = ("past", "foreign-a", "none", "plaintext")


def settings(name: str, **more: str) -> dict[str, str]:
    files = CERTIFICATES.files(name)
    return {"tls_cert": files.certificate, "tls_key": files.key, "tls_ca": files.ca, **more}


SECURED = replace(FAST_CONFIG, **settings("coordinator"))


def channel_of(outsider: str, address: str) -> grpc.aio.Channel:
    """As no Dialer would make it: its files are refused before anybody is dialled."""
    if outsider == "plaintext":
        return grpc.aio.insecure_channel(address, options=client_options())
    chain, key, ca = None, None, Path(ADMIN.ca).read_bytes()
    if outsider != "none":
        files = CERTIFICATES.files(outsider)
        chain, key = Path(files.certificate).read_bytes(), Path(files.key).read_bytes()
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, chain), options=client_options())


async def refused(outsider: str, address: str, secure: bool = True) -> str:
    async with channel_of(outsider, address) as channel:
        with pytest.raises(Unavailable) as caught:
            await wait_ready(channel, target=address, timeout_s=20, secure=secure)
    return str(caught.value)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(SECURED, tls=ADMIN) as made:
        yield made


async def test_streams_lookups_and_questions_work_when_everybody_has_a_certificate(served: Served) -> None:
    async with FakeNode(served.address, "n1", dialer=Dialer.of(CERTIFICATES.files("agent-a"))) as node:
        node.store(BLOCKS)
        await node.synced()
        assert (await served.client.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS)).hits == 10
        async with DirectoryClient(served.address, tls=ADMIN, stream=False, deadline_s=20, connect_timeout_s=20) as unary:
            assert (await unary.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS)).hits == 10
            assert [view.trust.node for view in await unary.nodes()] == ["n1"]

        def blocking() -> list[int]:
            with Client(served.address, tls=ADMIN, deadline_s=20, connect_timeout_s=20) as client:
                hits = [client.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS).hits, client.status().blocks]
            with kvdir.attach("/nowhere", coordinators=served.address, tls=ADMIN, deadline_s=20) as attached:
                return [*hits, attached.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS).hits]

        assert await asyncio.to_thread(blocking) == [10, 10, 10]


async def test_connect_takes_the_files_of_a_certificate_when_it_is_given_them(served: Served) -> None:
    files = kvdir.TlsFiles(ADMIN.certificate, ADMIN.key, ADMIN.ca)

    def asked() -> bool:
        with contextlib.suppress(Unavailable), kvdir.connect(served.address, tls=files) as client:
            return client.nodes() == ()
        return False  # it connects within half a second, or not: once more

    await eventually(lambda: asyncio.to_thread(asked), what="it is asked")
    with pytest.raises(ConfigError, match=r"past\.pem would be refused"):
        kvdir.connect(served.address, tls=CERTIFICATES.files("past"))
    with pytest.raises(ConfigError, match=r"past\.pem would be refused"):
        kvdir.attach("/nowhere", tls=CERTIFICATES.files("past"))


@pytest.mark.parametrize("outsider", OUTSIDERS)
async def test_connection_is_refused_in_words_when_the_caller_has_no_good_certificate(served: Served, outsider: str) -> None:
    said = await refused(outsider, served.address)
    assert "it wants a certificate that it accepts" in said
    assert "ours may be missing, expired, or signed by no CA" in said


async def test_plaintext_client_is_told_of_tls_when_it_is_refused(served: Served) -> None:
    assert "does it want TLS?" in await refused("plaintext", served.address, secure=False)
    async with DirectoryClient(served.address, deadline_s=20, connect_timeout_s=20) as client:
        with pytest.raises(Unavailable, match="does it want TLS"):
            await client.nodes()


async def test_server_is_refused_in_words_when_its_certificate_is_not_for_the_name_that_was_dialled() -> None:
    async with serving(replace(FAST_CONFIG, **settings("named")), tls=ADMIN) as served:
        with pytest.raises(Unavailable, match=r"its certificate is not for the name that was dialled.*tls_server_name"):
            await served.client.nodes()
        named = replace(ADMIN, server_name="elsewhere.test")
        async with DirectoryClient(served.address, tls=named, deadline_s=20, connect_timeout_s=20) as client:
            assert await client.nodes() == ()
        assert served.coordinator.tls is not None
        assert "is for elsewhere.test, not for 127.0.0.1" in served.coordinator.tls.remark()


async def test_server_is_refused_in_words_when_a_foreign_ca_signed_it() -> None:
    foreign = CERTIFICATES.files("foreign-a", ca="foreign-ca")
    theirs = {"tls_cert": foreign.certificate, "tls_key": foreign.key, "tls_ca": foreign.ca}
    async with serving(replace(FAST_CONFIG, **theirs), tls=ADMIN) as served:
        with pytest.raises(Unavailable, match="its certificate was refused here: it must be signed by a CA in our tls_ca"):
            await served.client.nodes()


async def test_plaintext_server_is_refused_in_words_when_we_speak_tls() -> None:
    async with serving(FAST_CONFIG, tls=ADMIN) as served:
        with pytest.raises(Unavailable, match="it speaks plaintext and we speak TLS"):
            await served.client.nodes()


async def test_slow_handshake_is_waited_for_when_a_server_has_many_to_make(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC by itself gives a connect half a second here, handshake included: too short when a fleet comes at once."""
    monkeypatch.setattr(tls_module, "HANDSHAKE_MS", 30_000)
    host, _, port = served.address.rpartition(":")
    dialer = Dialer.of(ADMIN)

    async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.read(65_536)
        await asyncio.sleep(1.0)  # the server's queue
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        far_writer.write(hello)
        with contextlib.suppress(OSError):
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    async with await asyncio.start_server(busy, "127.0.0.1", 0) as queue:
        address = f"127.0.0.1:{queue.sockets[0].getsockname()[1]}"
        async with dialer.aio(address, options=client_options()) as channel:
            await dialer.connected(channel, target=address, timeout_s=30)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65_536):
            target.write(data)
    finally:
        target.close()


async def test_start_is_refused_when_the_certificate_does_not_hold_the_name_that_clients_expect() -> None:
    config = replace(FAST_CONFIG, **settings("coordinator", tls_server_name="kvdir.prod"))
    with pytest.raises(ConfigError, match=r"not for kvdir\.prod"):
        async with running(build_coordinator(config)):
            raise AssertionError("it serves")


async def test_registered_engines_reach_their_own_coordinator_when_it_wants_certificates() -> None:
    """Over a private socket: it has no certificate of an agent."""
    model, tokens = "llama", list(range(1, 33))
    profile = {"strategy": "vllm_v1", "algorithm": "sha256_cbor", "python_hash_seed": "0", "index_projection": "low64_be"}
    named = fingerprints(np.array(tokens), scheme="vllm:sha256_cbor:low64", seed="0", block_tokens=16)
    publisher = FakeEngine()
    try:
        async with serving(replace(SECURED, indexer_listen="127.0.0.1:0"), tls=ADMIN) as served:
            registration = {
                "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint, "type": "vLLM",
                "modelname": model, "instance_id": "vllm-1", "block_size": 16, "dp_rank": 0, "hash_profile": profile,
            }  # fmt: skip
            status, answer = await call(served.indexer, "/register", registration)
            assert status == 200, answer
            publisher.publish(stored([int.from_bytes(item, "big") for item in named], token_ids=tokens))

            async def matched() -> bool:
                _, found = await call(served.indexer, "/query", {"model": model, "token_ids": tokens, "block_size": 16})
                return bool(found["instances"].get("vllm-1", {}).get("longest_matched") == 32)

            await eventually(matched, what="the router hears of both blocks")
    finally:
        publisher.close()


async def test_lookup_workers_speak_tls_and_pass_calls_on_when_the_coordinator_does() -> None:
    async with serving(replace(SECURED, lookup_workers=1), tls=ADMIN) as served:
        async with FakeNode(served.address, "n1", dialer=Dialer.of(CERTIFICATES.files("agent-a"))) as node:
            node.store(BLOCKS)
            await node.synced()
            for _ in range(6):  # the kernel chooses who answers a connection
                async with DirectoryClient(served.address, tls=ADMIN, deadline_s=20, connect_timeout_s=20) as client:
                    assert (await client.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS)).hits == 10
                    assert [view.trust.node for view in await client.nodes()] == ["n1"]
        for outsider in ("foreign-a", "plaintext"):
            for _ in range(4):
                await refused(outsider, served.address)


# -- agents ----------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def secured_cluster(directory: Path, *nodes: str, **more: object) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(directory, sample_namespace(), {})
    try:
        await cluster.start_coordinator(**settings("coordinator"))
        for node in nodes:
            await cluster.start_agent(
                node, **settings(f"agent-{node}"), connect_timeout_s=20.0, directory_timeout_s=20.0, **more
            )
        yield cluster
    finally:
        await cluster.close()


async def test_blocks_move_between_agents_when_control_and_data_plane_are_tls(tmp_path: Path) -> None:
    async with secured_cluster(
        tmp_path, "a", "b", replica=True, transports=("tcp",), tls_peer_name="{node}.agent.test"
    ) as cluster:
        writer, reader = await cluster.engine("a"), await cluster.engine("b")
        blocks = cluster.blocks.chain(8)
        await writer.store(blocks, cluster.blocks.data(blocks))
        await cluster.wait_known("a")
        into = cluster.blocks.room(blocks)
        result = await reader.load(blocks, into=into, deadline_s=20)
        cluster.blocks.check(blocks, into, result)
        assert result.hits == 8
        with pytest.raises(Unavailable):
            await wait_ready(channel_of("foreign-a", cluster.agents["a"].ready.peer), target="a", timeout_s=20, secure=True)


@pytest.mark.parametrize("outsider", OUTSIDERS)
async def test_agent_refuses_a_peer_when_it_has_no_good_certificate(tmp_path: Path, outsider: str) -> None:
    async with secured_cluster(tmp_path, "a") as cluster:
        assert "it wants a certificate that it accepts" in await refused(outsider, cluster.agents["a"].ready.peer)


async def test_engine_attaches_over_tcp_when_it_shows_a_certificate(tmp_path: Path) -> None:
    tls = CERTIFICATES.files("engine-a")
    async with secured_cluster(tmp_path, "a", engine_listen="127.0.0.1:0") as cluster:
        address = cluster.agents["a"].ready.engine
        engine = await cluster.engine("a", tls=tls)
        assert engine.attached

        def blocking() -> None:
            with peer_agent.connect(address, namespace=cluster.namespace, tls=tls, timeout_s=20) as made:
                assert made.attached
            with pytest.raises(Unavailable):
                peer_agent.connect(address, namespace=cluster.namespace, timeout_s=0.5)

        await asyncio.to_thread(blocking)


async def test_agent_is_refused_at_start_when_peers_would_dial_another_name(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, coordinator=False) as cluster:
        with pytest.raises(ConfigError, match=r"tls_cert: .*named.pem is for elsewhere.test, not for 127.0.0.1"):
            await cluster.start_agent("a", **settings("named"))
        await cluster.start_agent("a", **settings("named", tls_server_name="elsewhere.test"))


async def test_agent_is_no_peer_when_its_certificate_is_not_of_the_node_that_was_meant(tmp_path: Path) -> None:
    """b has the certificate of a coordinator, which the CA signed as well, and listens where the directory says that b is."""
    names = {"tls_peer_name": "{node}.agent.test"}
    async with secured_cluster(tmp_path, "a", transports=("tcp",), **names) as cluster:
        with pytest.raises(ConfigError, match=r"is for .*, not for b\.agent\.test"):
            await cluster.start_agent("b", **settings("coordinator"), **names)
        impostor = await cluster.start_agent("b", **settings("coordinator"), transports=("tcp",))
        blocks = cluster.blocks.chain(4)
        await (await cluster.engine("b")).store(blocks, cluster.blocks.data(blocks))
        await cluster.wait_known("b")
        reader = await cluster.engine("a")
        result = await reader.load(blocks, into=cluster.blocks.room(blocks), deadline_s=20)
        assert result.hits == 0
        assert "Hello" not in impostor._listeners.calls.methods


# -- commands --------------------------------------------------------------------------------------------------------------


def run(program: click.Command, *arguments: str, tls: TlsFiles | None, **more: str) -> Result:
    given = {"KVDIR_TLS_CERT": tls.certificate, "KVDIR_TLS_KEY": tls.key, "KVDIR_TLS_CA": tls.ca} if tls else {}
    return CliRunner().invoke(program, arguments, env=given | more)


async def test_commands_work_when_the_certificate_is_exported_once(tmp_path: Path) -> None:
    async with secured_cluster(tmp_path, "a") as cluster:
        asked, peer = ("nodes", "--coordinator", cluster.coordinator_address), cluster.agents["a"].ready.peer
        await cluster.wait_known("a")
        for program, arguments, tls, more, code, said in (
            (kvdir_main, asked, ADMIN, {}, 0, " a "),
            (peer_agent_main, ("probe", peer), ADMIN, {}, 0, "tcp"),
            (kvdir_main, asked, None, {}, 4, "does it want TLS?"),
            (kvdir_main, asked, None, {"KVDIR_TLS_CERT": "x"}, 3, "tls_key and tls_ca: missing"),
        ):

            def answered(program=program, arguments=arguments, tls=tls, more=more, code=code, said=said) -> bool:
                answer = run(program, *arguments, tls=tls, **more)
                return answer.exit_code == code and said in answer.output

            await eventually(lambda answered=answered: asyncio.to_thread(answered), what=said)


def test_doctor_names_the_certificate_when_it_is_what_is_wrong(tmp_path: Path) -> None:
    past = CERTIFICATES.files("past")
    file = tmp_path / "agent.toml"
    lines = {"accept_bytes": "1MiB", "tls_cert": past.certificate, "tls_key": past.key, "tls_ca": past.ca, "node": "a"}
    lines["arena_path"] = str(tmp_path / "arena")
    file.write_text("".join(f'{name} = "{value}"\n' for name, value in lines.items()))
    answer = run(peer_agent_main, "doctor", "--config", str(file), "--output", "json", tls=None)
    assert answer.exit_code == 1
    assert "past.pem would be refused by every peer: certificate has expired" in answer.output
