"""Nothing that is secret leaves: real daemons at debug level, with marked secrets wherever one can come in.

Looked through: logs, standard output, errors, metrics, probes, the page, explanations and spans; for each secret as it is, and
in the writings in which bytes get about.
"""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import grpc
import grpc.aio
import pytest
from click.testing import CliRunner

from kvdir.cli.main import main as kvdir
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from kvdir.rpc.lookup_codec import encode_fingerprints
from kvdir.testing.span_collector import SpanCollector
from kvdir.testing.wait import eventually
from peer_agent.cli.main import main as peer_agent
from peer_agent.client import aio
from peer_agent.testing import sample_namespace
from peer_agent.testing.processes import ProcessCluster
from peer_agent.v1 import peer_pb2, peer_pb2_grpc

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = f"00-{TRACE}-00f067aa0ba902b7-01"
SALT = "tenant-salt-MARKED-1f8e"
HEADER = "collector-token-MARKED-77aa"
PASSWORD = "store-password-MARKED-90cd"
CACHE_SALT = "cache-salt-MARKED-4711"
PEM = "cGVtLW1hcmtlZC1rZXktYm9keS0xMjM0NTY3ODkw"
TOKENS = [987_654_321, 987_654_322, 987_654_323]


class Heard:
    """Everything that came out, by where."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        self.secrets: dict[str, bytes] = {
            "salt": SALT.encode(),
            "header": HEADER.encode(),
            "password": PASSWORD.encode(),
            "cache salt": CACHE_SALT.encode(),
            "key": PEM.encode(),
        }
        self.secrets |= {f"token {token}": str(token).encode() for token in TOKENS}

    def add(self, place: str, what: object) -> None:
        text = what.decode("latin-1") if isinstance(what, bytes) else str(what)
        self.places[place] = self.places.get(place, "") + text

    def leaks(self) -> list[str]:
        return [
            f"{name} in {place}"
            for name, secret in self.secrets.items()
            for place, text in self.places.items()
            if any(form in text for form in set(writings(secret)))
        ]


def writings(secret: bytes) -> Iterator[str]:
    yield secret.decode("latin-1")
    yield repr(secret)[2:-1]
    yield secret.hex()
    yield secret.hex().upper()
    yield base64.b64encode(secret).decode().rstrip("=")
    yield base64.urlsafe_b64encode(secret).decode().rstrip("=")
    yield urllib.parse.quote_from_bytes(secret)
    yield str(list(secret))[1:-1]


def fetch(url: str, body: bytes | None = None) -> bytes:
    """The answer, whatever its status."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"} if body is not None else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        return str(error).encode() + error.read()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
async def cluster(heard: Heard) -> AsyncIterator[ProcessCluster]:
    """Of one salted namespace, whose file has the salt in it."""
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path:
        plain = sample_namespace()
        fields = json.loads(plain.canonical())
        for name in ("version", "tenant"):
            fields.pop(name)
        made = ProcessCluster(Path(path), Namespace.create(**fields, tenant_salt=SALT))
        made.namespace_file.write_text(json.dumps(fields | {"tenant_salt": SALT}))
        try:
            yield made
        finally:
            await made.close()
            for child in made.children.values():
                heard.add(f"log of {child.name}", child.log.read_text())
            assert heard.leaks() == []


def run(heard: Heard, name: str, *arguments: str, program: click.Command = kvdir) -> int:
    """A command that ends by itself, with all that it says. It sets up no log: what daemons log is looked at elsewhere."""
    with mock.patch("kvdir.obs.logs.configure"), mock.patch("peer_agent.cli.serve.configure"):
        result = CliRunner().invoke(program, arguments)
    heard.add(name, result.output)
    heard.add(name, result.exception)
    return result.exit_code


async def test_no_secret_leaves_when_blocks_are_stored_loaded_lost_and_explained(
    cluster: ProcessCluster, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer%20{HEADER}")
    with SpanCollector() as collector:
        watched = ("--log-level", "debug", "--otlp-endpoint", collector.url, "--http-listen", "127.0.0.1:0")
        coordinator = await cluster.start_coordinator(*watched, "--lookup-workers", "1", "--indexer-listen", "127.0.0.1:0")
        for node in ("owner", "reader"):
            await cluster.start_agent(node, coordinator, *watched, "--arena-bytes", "1MiB", "--directory-timeout-s", "10")
        wanted = cluster.blocks.chain(8)
        heard.secrets |= {f"fingerprint {number}": bytes(item) for number, item in enumerate(wanted)}
        owner, reader = await cluster.engine("owner", deadline_s=10), await cluster.engine("reader", deadline_s=10)
        await owner.store(wanted, cluster.blocks.data(wanted))
        await cluster.wait_known(coordinator, "owner", 8)
        await cluster.wait_nominated(reader, wanted)
        result = await load(reader, cluster, wanted)
        assert result.hits == 8
        heard.add("explanation", result.explanation)
        await look_at_everything(cluster, heard)
        await provoke(cluster, heard, wanted)
        await cluster.children["owner"].kill()
        heard.add("a load that fails", await load(reader, cluster, cluster.blocks.chain(4, root="lost"), deadline_s=0.5))
        await eventually(lambda: len({span.service for span in collector.trace(TRACE)}) >= 2, what="spans of two daemons")
        collector.status = 401
        heard.add("a load whose spans are refused", await load(reader, cluster, wanted))
        log = cluster.children["reader"].log
        await eventually(lambda: "spans refused" in log.read_text(), what="the collector's refusal in the log")
        heard.add("spans", b"".join(collector.bodies))
        assert HEADER in collector.headers[0]["authorization"]
    assert "level=debug" in log.read_text(), "there is something to look through"


async def load(engine: aio.Engine, cluster: ProcessCluster, wanted: Fingerprints, deadline_s: float = 10.0) -> Any:
    room = cluster.blocks.room(wanted)
    return await engine.load(wanted, into=room, deadline_s=deadline_s, explain=True, trace=SAMPLED, request_id="cmpl-7")


async def look_at_everything(cluster: ProcessCluster, heard: Heard) -> None:
    """Metrics, probes and the page, of all; what an operator asks for by commands."""
    for child in cluster.children.values():
        for path in ("/metrics", "/readyz", "/page/node?name=owner"):
            heard.add(f"{path} of {child.name}", await asyncio.to_thread(fetch, f"http://{child.ready['http']}{path}"))
        heard.add(f"ready line of {child.name}", child.ready)
    ready = cluster.children["coordinator"].ready
    question = json.dumps({"text": "cmpl-7"}).encode()
    heard.add("page by request id", await asyncio.to_thread(fetch, f"http://{ready['http']}/page/explain", question))
    for command in ("status", "nodes", "trust", "quota"):
        code = await asyncio.to_thread(run, heard, command, command, "--coordinator", ready["grpc"], "--output", "json")
        assert code == 0, heard.places[command]


async def provoke(cluster: ProcessCluster, heard: Heard, wanted: Fingerprints) -> None:
    """Requests that are wrong, with secrets in them; and a capability, which is one."""
    ready = cluster.children["coordinator"].ready
    for body in (
        {"model": "test", "token_ids": TOKENS, "cache_salt": CACHE_SALT},
        {"model": "test", "token_ids": [*TOKENS, "x"], "cache_salt": [CACHE_SALT]},
        {"model": "absent", "token_ids": TOKENS, "cache_salt": CACHE_SALT, "additional_salt": CACHE_SALT},
    ):
        answer = await asyncio.to_thread(fetch, f"http://{ready['indexer']}/query", json.dumps(body).encode())
        heard.add("indexer", answer)
    async with grpc.aio.insecure_channel(cluster.children["owner"].ready["peer"]) as channel:
        stub = peer_pb2_grpc.PeerStub(channel)
        asked = peer_pb2.LockRequest(
            namespace_digest=cluster.namespace.digest, fingerprints=encode_fingerprints(wanted), lease_ms=5000, reader="reader"
        )
        answer = await stub.Lock(asked, timeout=20)
        assert answer.capability
        heard.secrets["capability"] = answer.capability
        for wrong in (
            peer_pb2.LockRequest(namespace_digest=b"?" * 32, fingerprints=encode_fingerprints(wanted)),
            peer_pb2.LockRequest(namespace_digest=cluster.namespace.digest, expected_epoch=1),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Lock(wrong, timeout=20)
            heard.add("refusals", refused.value.details())


@pytest.mark.parametrize("what", ["store", "store url", "key", "salt", "policy", "otlp"])
def test_no_secret_is_repeated_when_a_setting_with_it_is_wrong(what: str, heard: Heard, tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text(f"-----BEGIN PRIVATE KEY-----\n{PEM}\n-----END PRIVATE KEY-----\n")
    (tmp_path / "policy.toml").write_text(f'[tenants.acme]\nsalts = ["{SALT}"]\nsalt = "{SALT}"\n')
    (tmp_path / "namespace.json").write_text(json.dumps({"model": "m", "tenant": SALT, "tenant_salt": SALT}))
    bad = str(tmp_path / "bad.pem")
    serve = ("serve", "--listen", "127.0.0.1:0", "--http-listen", "")
    arguments = {
        "store": (*serve, "--store", f"redis://user:{PASSWORD}@127.0.0.1:1/0", "--print-config"),
        "store url": (*serve, "--store", f"redis://user:{PASSWORD}@127.0.0.1:nonsense/0"),
        "key": (*serve, "--tls-cert", bad, "--tls-key", bad, "--tls-ca", bad),
        "salt": ("serve", "--namespaces", str(tmp_path / "namespace.json")),
        "policy": (*serve, "--policy", str(tmp_path / "policy.toml")),
        "otlp": (*serve, "--otlp-endpoint", f"http://user:{PASSWORD}@127.0.0.1:4318"),
    }[what]
    code = run(heard, what, *arguments, program=peer_agent if what == "salt" else kvdir)
    assert (code == 0) is (what == "store")
    assert len(heard.places[what]) > 40, "it said what is wrong"
    assert heard.leaks() == []


async def test_password_is_nowhere_when_the_store_is_away(heard: Heard, tmp_path: Path) -> None:
    """A coordinator that serves without its store, says so, and is asked about it."""
    url = f"redis://user:{PASSWORD}@127.0.0.1:1/0?sentinel_password={PASSWORD}"
    cluster = ProcessCluster(tmp_path, sample_namespace())
    try:
        try:
            await cluster.start_coordinator("--store", url, "--log-level", "debug", "--http-listen", "127.0.0.1:0")
        except Exception as error:  # a store that never answered may be a refusal to start
            heard.add("refusal", error)
        else:
            await look_at_probes(cluster, heard)
    finally:
        await cluster.close()
    heard.add("log", (tmp_path / "coordinator.log").read_text())
    assert "store" in heard.places["log"]
    assert heard.leaks() == []


async def look_at_probes(cluster: ProcessCluster, heard: Heard) -> None:
    ready = cluster.children["coordinator"].ready
    for path in ("/metrics", "/readyz"):
        heard.add(path, await asyncio.to_thread(fetch, f"http://{ready['http']}{path}"))
    await asyncio.to_thread(run, heard, "status", "status", "--coordinator", ready["grpc"], "--output", "json")


def test_leak_is_found_when_there_is_one(heard: Heard) -> None:
    for secret in heard.secrets.values():
        for form in writings(secret):
            other = Heard()
            other.add("log", f"x={form} ")
            assert other.leaks()
