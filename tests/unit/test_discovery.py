"""Where coordinators come from: lists, names, Services; and what happens when a source fails or changes its mind."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kvdir.client.aio import DirectoryClient
from kvdir.client.discovery import Discovery, DnsName, KubernetesService, Listed, parse, resolve_name
from kvdir.client.kubernetes import ApiServer, EndpointSlices
from kvdir.client.sync import Client
from kvdir.errors import InvalidInput, Unavailable
from kvdir.testing.certificates import shared_certificates
from kvdir.testing.check_resolver import check_resolver
from kvdir.testing.fake_kubernetes import FakeKubernetes
from kvdir.testing.wait import eventually


class FakeNames:
    """Names with records, which tests change. fails: as when no server answers."""

    def __init__(self, **names: Sequence[str]) -> None:
        self.names: dict[str, Sequence[str]] = dict(names)
        self.fails = ""

    def __call__(self, name: str, port: int) -> list[str]:
        if self.fails or name not in self.names:
            raise OSError(self.fails or "Name or service not known")
        return [f"{host}:{port}" for host in self.names[name]]


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[FakeKubernetes]:
    with FakeKubernetes(tmp_path) as cluster:
        yield cluster


def test_resolvers_keep_the_contract() -> None:
    check_resolver(resolve_name, known="localhost", unknown="no-such-name.invalid")
    check_resolver(FakeNames(kvdir=["10.0.0.1", "[fd00::1]"]), known="kvdir", unknown="other")


def test_lists_of_any_kind_are_parsed() -> None:
    assert parse("a:1, dns:///kvdir.prod.svc:7400,k8s:///kvdir.prod:grpc,a:1") == (
        Listed("a:1"),
        DnsName("kvdir.prod.svc", 7400),
        KubernetesService("kvdir", "prod", "grpc"),
    )
    assert parse(("a:1", "b:1,c:1")) == (Listed("a:1"), Listed("b:1"), Listed("c:1"))


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "nohost",
        "dns:///",
        "dns:///x",
        "dns:///x:y",
        "k8s:///x:1",
        "k8s:///a.b.c:1",
        "k8s:///a.b",
        "http:///x:1",
        "a:1,b",
        "a:0",
        "a:65536",
        "a:²",
        "dns:///x:70000",
    ],
)
def test_what_names_no_coordinators_is_refused_with_what_does(bad: str) -> None:
    with pytest.raises(InvalidInput, match="host:port"):
        Discovery(bad)


def test_list_needs_no_thread() -> None:
    before = threading.active_count()
    with Discovery("a:1,b:1") as discovery:
        assert discovery.addresses == ("a:1", "b:1")
        assert (threading.active_count(), discovery.listens) == (before, False)


async def test_changes_of_a_name_are_heard_and_failures_keep_what_was_known() -> None:
    names, heard = FakeNames(kvdir=["10.0.0.1"]), []
    with Discovery("fixed:1,dns:///kvdir:7400", resolve=names, refresh_s=0.01) as discovery:
        discovery.subscribe(heard.append)
        await eventually(lambda: heard and heard[-1] == ("fixed:1", "10.0.0.1:7400"), what="the name is known")
        names.names["kvdir"] = ["10.0.0.2", "10.0.0.3"]
        await eventually(lambda: heard[-1] == ("fixed:1", "10.0.0.2:7400", "10.0.0.3:7400"), what="the change is heard")
        changes = len(heard)
        names.fails = "Temporary failure in name resolution"
        await eventually(lambda: "Temporary failure" in discovery.problem, what="it says so")
        names.fails, names.names["kvdir"] = "", []
        await eventually(lambda: "nobody there" in discovery.problem, what="so does an empty answer")
        assert (len(heard), discovery.addresses) == (changes, ("fixed:1", "10.0.0.2:7400", "10.0.0.3:7400"))
        names.names["kvdir"] = ["10.0.0.3"]
        await eventually(lambda: heard[-1] == ("fixed:1", "10.0.0.3:7400"))
        assert discovery.problem == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_source_that_ends_by_a_bug_says_so_and_keeps_what_was_known() -> None:
    answers = [["10.0.0.1:1"]]
    with Discovery("dns:///kvdir:1", resolve=lambda name, port: answers.pop(), refresh_s=0.01) as discovery:
        await eventually(lambda: "IndexError" in discovery.problem, what="it says so")
        assert discovery.addresses == ("10.0.0.1:1",)


async def test_endpoints_are_watched_ready_or_not_but_not_those_that_end(kubernetes: FakeKubernetes) -> None:
    kubernetes.put("kvdir-1", ["10.0.0.1"], unready=("10.0.0.2",), terminating=("10.0.0.9",))
    with Discovery("k8s:///kvdir.prod:grpc", api=kubernetes.api) as discovery:
        await eventually(lambda: discovery.addresses == ("10.0.0.1:7400", "10.0.0.2:7400"), what=discovery.problem)
        assert "/namespaces/prod/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dkvdir" in kubernetes.requests[0]
        kubernetes.put("kvdir-2", ["fd00::1"], family="IPv6")
        await eventually(lambda: "[fd00::1]:7400" in discovery.addresses, what="a second slice")
        kubernetes.bookmark()
        kubernetes.put("kvdir-1", ["10.0.0.1"])
        await eventually(lambda: discovery.addresses == ("10.0.0.1:7400", "[fd00::1]:7400"), what="one has gone")
        kubernetes.delete("kvdir-2")
        await eventually(lambda: discovery.addresses == ("10.0.0.1:7400",), what="a slice has gone")
        kubernetes.delete("kvdir-1")
        await eventually(lambda: "nobody there" in discovery.problem, what="no endpoint: what was known is kept")
        assert discovery.addresses == ("10.0.0.1:7400",)
        assert len(kubernetes.requests) == 2, "one list, one watch"


async def test_pod_counts_once_when_a_slice_of_each_family_names_it(kubernetes: FakeKubernetes) -> None:
    kubernetes.put("kvdir-6", ["fd00::1", "fd00::2"], family="IPv6", pods=("one", "two"))
    kubernetes.put("kvdir-4", ["10.0.0.1"], pods=("one",))
    with Discovery("k8s:///kvdir.prod:grpc", api=kubernetes.api) as discovery:
        await eventually(lambda: discovery.addresses == ("10.0.0.1:7400", "[fd00::2]:7400"), what="one address each")
        kubernetes.delete("kvdir-4")
        await eventually(lambda: discovery.addresses == ("[fd00::1]:7400", "[fd00::2]:7400"), what="the other ones")


async def test_watch_goes_on_when_broken_begins_anew_when_compacted_and_reads_the_token_again(
    kubernetes: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdir.client.kubernetes._PAUSE_S", 0.02)
    kubernetes.put("kvdir-1", ["10.0.0.1"])
    with Discovery("k8s:///kvdir.prod:7400", api=kubernetes.api) as discovery:
        await eventually(lambda: kubernetes.watches == 1, what="it watches")
        kubernetes.rotate("second-token")
        kubernetes.drop_watches()
        await eventually(lambda: len(kubernetes.requests) == 3 and kubernetes.watches == 1, what="it watches again")
        assert "watch=1" in kubernetes.requests[2], "from where it was, without a list"
        kubernetes.compact()
        kubernetes.put("kvdir-1", ["10.0.0.7"])
        await eventually(lambda: discovery.addresses == ("10.0.0.7:7400",), what="listed anew")
        await eventually(lambda: kubernetes.watches == 1, what="it watches from there")
        kubernetes.revoke()
        kubernetes.drop_watches()
        await eventually(lambda: "401: Unauthorized" in discovery.problem, what="it says what is the matter")
        assert discovery.addresses == ("10.0.0.7:7400",)
        kubernetes.rotate("third-token")
        kubernetes.put("kvdir-1", ["10.0.0.8"])
        await eventually(lambda: discovery.addresses == ("10.0.0.8:7400",), what="well again")


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "{}",
        "nonsense",
        '{"metadata": {}, "items": [7]}',
        '{"metadata": {"resourceVersion": "1"}, "items": [{"metadata": {"name": "x"}, "endpoints": [{"addresses": []}]}]}',
        '{"items": null, "metadata": null}',
    ],
)
async def test_answer_that_makes_no_sense_is_said_and_not_the_end(
    kubernetes: FakeKubernetes, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr("kvdir.client.kubernetes._PAUSE_S", 0.01)
    monkeypatch.setattr("kvdir.client.kubernetes._PAUSE_MAX_S", 0.02)
    kubernetes.put("kvdir-1", ["10.0.0.1"])
    kubernetes.instead = body.encode()
    with Discovery("k8s:///kvdir.prod:7400", api=kubernetes.api) as discovery:
        await eventually(lambda: discovery.problem, what="it says so")
        kubernetes.instead = b""
        await eventually(lambda: discovery.addresses, what="and tries again")


@pytest.mark.parametrize(("ca", "words"), [("ca", ""), ("foreign-ca", "certificate verify failed")])
async def test_certificate_of_the_api_is_checked(tmp_path: Path, ca: str, words: str) -> None:
    made = shared_certificates()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(made.directory / "here.pem", made.directory / "here.key")
    with FakeKubernetes(tmp_path, tls=tls) as cluster:
        cluster.put("kvdir-1", ["10.0.0.1"])
        api = partial(cluster.api, certificates=made.directory / f"{ca}.pem")
        with Discovery("k8s:///kvdir.prod:7400", api=api) as discovery:
            await eventually(lambda: discovery.addresses or discovery.problem, what="an answer")
            assert words in discovery.problem
            assert discovery.addresses == (() if words else ("10.0.0.1:7400",))
            assert bool(cluster.requests) is not bool(words), "no token was sent to a stranger"


async def test_close_ends_a_watch_at_once(kubernetes: FakeKubernetes) -> None:
    kubernetes.put("kvdir-1", ["10.0.0.1"])
    discovery = Discovery("k8s:///kvdir.prod:7400", api=kubernetes.api)
    await eventually(lambda: kubernetes.watches == 1, what="it watches")
    discovery.close()
    assert [thread for thread in threading.enumerate() if thread.name == "kvdir-discovery"] == []


def test_close_ends_a_request_that_begins_at_that_moment(tmp_path: Path) -> None:
    """At a server that accepts, and says nothing."""
    (tmp_path / "token").write_text("token")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        api = ApiServer("127.0.0.1", mute.getsockname()[1], tmp_path / "token", None)
        source, stop = EndpointSlices("kvdir", "prod", "7400", api=lambda: api), threading.Event()
        stop.set()
        source.interrupt()
        with pytest.raises(OSError, match="interrupted"):
            next(source._watch(stop))


def test_service_outside_of_a_pod_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with Client("k8s:///kvdir.prod:7400", deadline_s=0.2) as client, pytest.raises(Unavailable, match="inside of a pod"):
        client.nodes()


async def test_call_waits_for_the_first_addresses_inside_its_deadline() -> None:
    names = FakeNames()
    with Discovery("dns:///kvdir:1", resolve=names, refresh_s=0.01) as discovery:
        async with DirectoryClient(discovery, deadline_s=0.1) as client:
            with pytest.raises(Unavailable, match="no coordinator is known yet: dns:///kvdir:1: Name or service not known"):
                await client.nodes()
            began_s = time.monotonic()
            waiting = await asyncio.gather(*(client.nodes() for _ in range(100)), return_exceptions=True)
            assert all(isinstance(item, Unavailable) for item in waiting)
            assert time.monotonic() - began_s < 1.0, "each by its own deadline, however many there are"
            asking = asyncio.create_task(client.nodes(deadline_s=5.0))
            names.names["kvdir"] = ["127.0.0.1"]
            with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):  # known now, and refused
                await asking
