"""Certificates are renewed, and a CA is replaced, while Publish, Watch and LookupStream are open: nothing breaks, and what
connects afterwards shows the new certificate, on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import peer_agent
from kvdir.client.aio import DirectoryClient
from kvdir.client.replica import Replica
from kvdir.client.sync import Client
from kvdir.errors import Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, StreamState
from kvdir.rpc import tls as tls_module
from kvdir.rpc.certificates import TlsFiles
from kvdir.rpc.tls import Dialer
from kvdir.testing.certificates import install, shared_certificates
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import FAST_CONFIG, Served, serving
from kvdir.testing.wait import eventually
from peer_agent.testing.cluster import local_cluster

CERTIFICATES = shared_certificates()
DIGEST = EXAMPLE_NAMESPACE.digest


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_module, "LOOK_S", 0.0)


def copy(name: str, directory: Path, *, ca: str = "ca") -> TlsFiles:
    """Files of one's own, to be renewed."""
    directory.mkdir()
    source = CERTIFICATES.files(name, ca=ca)
    made = TlsFiles(*(str(directory / file) for file in ("tls.crt", "tls.key", "ca.crt")))
    for old, new in ((source.certificate, made.certificate), (source.key, made.key), (source.ca, made.ca)):
        shutil.copyfile(old, new)
    return made


def certificate_in(files: TlsFiles) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(files.certificate).read_text())


async def shown(address: str) -> bytes:
    """The certificate that a server shows now."""

    def look() -> bytes:
        host, _, port = address.rpartition(":")
        context = CERTIFICATES.python_client("admin")
        context.verify_mode = ssl.CERT_NONE
        with socket.create_connection((host, int(port)), timeout=10) as plain, context.wrap_socket(plain) as secured:
            return secured.getpeercert(binary_form=True) or b""

    return await asyncio.to_thread(look)


def bundle(path: Path, *files: str) -> str:
    path.write_text("".join(Path(file).read_text() for file in files))
    return str(path)


async def get(address: str, path: str) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


@dataclass
class World:
    """A coordinator that a node publishes to, a replica watches, and two clients ask over streams."""

    served: Served
    node: FakeNode
    replica: Replica
    client: DirectoryClient
    blocking: Client
    servers: TlsFiles
    agents: TlsFiles
    stop: Callable[[], Awaitable[None]]

    async def works(self, blocks: Fingerprints) -> None:
        self.node.store(blocks)
        await self.node.synced()
        held = len(self.node.held[next(iter(self.node.held))])
        await eventually(lambda: self.replica.figures().blocks >= held, what="the replica has all")
        assert (await self.client.lookup(DIGEST, blocks)).hits == len(blocks)
        assert (await asyncio.to_thread(self.blocking.lookup, DIGEST, blocks)).hits == len(blocks)

    def calls(self) -> tuple[int, int, int]:
        """Streams that were opened: by publisher, replica, clients."""
        lookups = self.served.coordinator.metrics.calls.methods["LookupStream"]
        opened = lookups.running + sum(lookups.by_code.values())
        return self.node.publisher.stats().calls, self.replica.figures().calls, opened


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    servers, agents = copy("coordinator", tmp_path / "server"), copy("agent-a", tmp_path / "agent")
    config = replace(FAST_CONFIG, tls_cert=servers.certificate, tls_key=servers.key, tls_ca=servers.ca)
    dialer = Dialer.of(agents)
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(config, tls=CERTIFICATES.files("admin")))
        replica = Replica(served.address, path=tmp_path / "replica", dialer=dialer)
        following = asyncio.create_task(replica.run())
        async with (
            FakeNode(served.address, "n1", dialer=dialer) as node,
            DirectoryClient(served.address, tls=dialer, deadline_s=20, connect_timeout_s=20) as client,
        ):
            with Client(served.address, tls=dialer, deadline_s=20, connect_timeout_s=20) as blocking:
                yield World(served, node, replica, client, blocking, servers, agents, stack.aclose)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_open_streams_go_on_and_new_connections_show_the_new_certificate_when_the_server_renews(world: World) -> None:
    await world.works(some_fingerprints(5))
    before = world.calls()
    assert await shown(world.served.address) == certificate_in(CERTIFICATES.files("coordinator"))
    install(CERTIFICATES.files("coordinator-2"), world.servers)
    assert await shown(world.served.address) == certificate_in(CERTIFICATES.files("coordinator-2"))
    await world.works(some_fingerprints(5, seed=1))
    assert world.calls() == before
    assert world.served.coordinator.tls is not None
    assert world.served.coordinator.tls.reloads >= 1  # more, if it looked while the three files were being put there
    assert world.served.coordinator.tls.remark() == ""


async def test_server_goes_on_with_the_last_good_certificate_when_its_files_are_spoilt(world: World) -> None:
    install(CERTIFICATES.files("past"), world.servers)
    assert await shown(world.served.address) == certificate_in(CERTIFICATES.files("coordinator"))
    await world.works(some_fingerprints(5))
    status, body = await get(world.served.http, "/readyz")
    assert status == 200
    assert "renewed certificates are not used: tls_cert" in body
    assert "certificate has expired" in body
    status, body = await get(world.served.http, "/metrics")
    assert "kvdir_tls_fault 1.0" in body
    assert re.search(r'kvdir_tls_reloads_total\{outcome="refused"\} [1-9]', body)


async def test_next_connections_show_the_new_certificate_when_a_client_renews(world: World) -> None:
    await world.works(some_fingerprints(5))
    before = world.calls()
    first = world.client._channels.copy()
    await world.client.nodes()
    await asyncio.to_thread(world.blocking.nodes)
    first, older = world.client._channels.copy(), world.blocking._channels.copy()
    install(CERTIFICATES.files("agent-a-2"), world.agents)
    await world.client.nodes()
    await asyncio.to_thread(world.blocking.nodes)
    assert world.client._channels[world.served.address] is not first[world.served.address]
    assert world.blocking._channels[world.served.address] is not older[world.served.address]
    await world.works(some_fingerprints(5, seed=1))
    assert world.calls() == before
    assert world.client._retired == []
    assert world.blocking._retired == []


async def test_ca_is_replaced_without_a_break_when_it_is_done_in_three_steps(world: World, tmp_path: Path) -> None:
    """Both CAs are trusted, then certificates are of the new one, then only that is trusted."""
    old, new = CERTIFICATES.files("agent-a"), CERTIFICATES.files("foreign-a", ca="foreign-ca")
    both = bundle(tmp_path / "both.pem", old.ca, new.ca)
    await world.works(some_fingerprints(5))
    before = world.calls()
    for files in (world.servers, world.agents):
        install(replace(files, ca=both), files)
    for files in (world.servers, world.agents):
        install(replace(new, ca=both), files)
    async with DirectoryClient(world.served.address, tls=world.agents, deadline_s=20, connect_timeout_s=20) as client:
        await client.nodes()
    for files in (world.servers, world.agents):
        install(new, files)
    await world.works(some_fingerprints(5, seed=1))
    assert world.calls() == before
    async with DirectoryClient(world.served.address, tls=world.agents, deadline_s=20, connect_timeout_s=20) as client:
        await client.nodes()
    async with DirectoryClient(world.served.address, tls=replace(old, ca=both), deadline_s=20, connect_timeout_s=20) as client:
        with pytest.raises(Unavailable, match="it wants a certificate that it accepts"):
            await client.nodes()


async def test_streams_come_back_with_the_new_certificate_when_they_break_after_it_was_renewed(
    world: World, tmp_path: Path
) -> None:
    """The coordinator dies and comes back, trusting only the new CA."""
    await world.works(some_fingerprints(5))
    new = CERTIFICATES.files("foreign-a", ca="foreign-ca")
    install(new, world.agents)
    listen = world.served.address
    await world.stop()
    config = replace(FAST_CONFIG, listen=listen, tls_cert=new.certificate, tls_key=new.key, tls_ca=new.ca)
    async with serving(config, tls=new) as served:
        await world.node.synced()
        assert (await world.client.lookup(DIGEST, some_fingerprints(5))).hits == 5
        await eventually(lambda: world.replica.figures().connected, what="the replica follows again")
        assert served.coordinator.directory.nodes


async def test_workers_renew_as_the_coordinator_does(tmp_path: Path) -> None:
    files = copy("coordinator", tmp_path / "server")
    config = replace(FAST_CONFIG, tls_cert=files.certificate, tls_key=files.key, tls_ca=files.ca, lookup_workers=1)
    async with serving(config, tls=CERTIFICATES.files("admin")) as served:
        install(CERTIFICATES.files("coordinator-2"), files)
        seen = {await shown(served.address) for _ in range(16)}  # the kernel chooses the process
        assert seen == {certificate_in(CERTIFICATES.files("coordinator-2"))}


async def test_agents_go_on_reading_from_each_other_when_both_renew(tmp_path: Path) -> None:
    files = {name: copy(f"agent-{name}", tmp_path / name) for name in "ab"}
    async with local_cluster(tmp_path, transports=("tcp",), connect_timeout_s=20.0, directory_timeout_s=20.0) as cluster:
        for name, own in files.items():
            tls = {"tls_cert": own.certificate, "tls_key": own.key, "tls_ca": own.ca}
            await cluster.start_agent(name, coordinators=(), **tls)
        peer = cluster.agents["a"].ready.peer
        assert await shown(peer) == certificate_in(CERTIFICATES.files("agent-a"))
        install(CERTIFICATES.files("agent-a-2"), files["a"])
        assert await shown(peer) == certificate_in(CERTIFICATES.files("agent-a-2"))
        node = NodeTrust("a", cluster.agents["a"].epoch, StreamState.SYNCED, "", 0.0, 0, peer)
        peers = cluster.agents["b"].reader._peers
        first = await peers.reach(node, timeout_s=20)
        install(CERTIFICATES.files("agent-b"), files["b"])  # the same again: newer files all the same
        assert await peers.reach(node, timeout_s=20) is first
        assert first.generation < peers._dialer.generation


async def test_engines_attach_again_with_the_new_certificate_when_their_agent_comes_back_and_trusts_no_older_one(
    tmp_path: Path,
) -> None:
    """One that had a session, and one that was waiting for an agent when its certificate was renewed."""
    mine, new = copy("engine-a", tmp_path / "engine"), CERTIFICATES.files("foreign-a", ca="foreign-ca")
    async with local_cluster(tmp_path, coordinator=False, engine_listen="127.0.0.1:0") as cluster:
        old = CERTIFICATES.files("agent-a")
        agent = await cluster.start_agent("a", tls_cert=old.certificate, tls_key=old.key, tls_ca=old.ca)
        engine = await cluster.engine("a", tls=mine, timeout_s=20)
        address = agent.ready.engine
        blocking = await asyncio.to_thread(peer_agent.connect, address, namespace=cluster.namespace, tls=mine, timeout_s=20)
        try:
            await cluster.stop_agent("a")
            await eventually(lambda: not engine.attached and not blocking.attached, what="both wait for an agent")
            install(new, mine)
            await cluster.start_agent("a", tls_cert=new.certificate, tls_key=new.key, tls_ca=new.ca, engine_listen=address)
            await eventually(lambda: engine.attached and blocking.attached, within_s=30, what="both are attached again")
        finally:
            await asyncio.to_thread(blocking.close)
