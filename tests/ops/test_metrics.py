"""What both daemons expose is what definitions.py declares, within its bounds, and as Prometheus wants it."""

from __future__ import annotations

import asyncio
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvdir.client.engine_findings import Finding, FindingKind
from kvdir.core.directory import Directory, Limits
from kvdir.index import Sketch, open_index
from kvdir.obs import definitions, trace
from kvdir.obs.call_figures import CallFigures
from kvdir.obs.definition import OTHER, Definition, Exposer, Histogram, Kind
from kvdir.obs.exposition import OPENMETRICS, TEXT, render
from kvdir.obs.http import HttpSide
from kvdir.obs.labels import HANDSHAKE, MAX_NODES, RATIO_BUCKETS, SERVING_FAULT
from kvdir.obs.metrics import CoordinatorMetrics
from kvdir.obs.stream_metrics import stream_row
from kvdir.rpc.interceptors import EdgeInterceptor
from kvdir.server.app import build_shared
from kvdir.server.config import CoordinatorConfig
from kvdir.server.serve import running
from kvdir.store.memory import MemoryBlockStore
from kvdir.testing.many_nodes import fill, many_namespaces
from kvdir.testing.prometheus_servers import Prometheus, program
from kvdir.testing.served import FAST_CONFIG, serving
from kvdir.testing.wait import eventually
from kvdir.v1 import directory_pb2, directory_pb2_grpc
from peer_agent.server.metrics import AgentCollector
from peer_agent.testing.cluster import LocalCluster, local_cluster

TIMEOUT_S = 30.0


async def scrape(address: str, accept: str = "") -> str:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept} if accept else {})
    answer = await asyncio.to_thread(urllib.request.urlopen, request, timeout=TIMEOUT_S)
    with answer:
        text: str = answer.read().decode()
    return text


def problems(text: str) -> str:
    """What promtool has to say."""
    return subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True).stderr


def exposed(text: str) -> dict[str, Any]:
    """Families by the names of the definitions."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): family for family in text_string_to_metric_families(text)
    }


def differences(text: str, exposer: Exposer, *, without: frozenset[str] = frozenset()) -> list[str]:
    """Where the exposition and the table part. without: groups that are not switched on."""
    families, faults = exposed(text), []
    wanted = {
        metric.name: metric
        for group in definitions.GROUPS
        if exposer in group.exposers and group.title not in without
        for metric in group.metrics
    }
    faults += [f"{name} is exposed and not declared" for name in families.keys() - wanted.keys()]
    faults += [f"{name} is declared and not exposed" for name in wanted.keys() - families.keys()]
    for name, family in families.items():
        if name in wanted:
            faults += _against(wanted[name], family)
    return sorted(faults)


def _against(definition: Definition, family: Any) -> list[str]:
    faults = []
    if family.type != ("gauge" if definition.kind is Kind.INFO else definition.kind.value):
        faults.append(f"{definition.name} is a {family.type}")
    if len(family.samples) > definition.series_at_most:
        faults.append(f"{definition.name} has {len(family.samples)} series")
    known = [label for label in definition.labels if label.values]
    for sample in family.samples:
        if set(sample.labels) - {"le"} != {label.name for label in definition.labels}:
            faults.append(f"{definition.name} has labels {sorted(sample.labels)}")
        faults += [f"{definition.name}: {sample.labels}" for label in known if sample.labels[label.name] not in label.values]
    if known and len(known) == len(definition.labels) and not family.samples:
        faults.append(f"{definition.name} does not begin at 0")
    return faults


async def test_coordinator_exposes_what_is_declared_when_everything_is_on() -> None:
    async with serving(replace(FAST_CONFIG, lookup_workers=1, quota=("none=1GiB",))) as served:
        text = await scrape(served.http)
    assert differences(text, Exposer.COORDINATOR) == []
    assert problems(text) == ""


async def test_coordinator_on_a_shared_store_exposes_what_is_declared() -> None:
    config = CoordinatorConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", store="redis://127.0.0.1:1")
    shared = build_shared(config, MemoryBlockStore())
    await shared.open()
    try:
        async with running(shared) as bound:
            text = await scrape(bound.http)
    finally:
        await shared.close()
    assert differences(text, Exposer.STORE) == []
    assert problems(text) == ""


async def test_agent_exposes_what_is_declared_when_it_has_loaded_from_a_peer(tmp_path: Path) -> None:
    async with local_cluster(
        tmp_path,
        "owner",
        "reader",
        transports=("tcp",),
        http_listen="127.0.0.1:0",
        replica=True,
        engine=("vllm=tcp://127.0.0.1:1", "model=test", "hash=opaque", "seed=1"),
    ) as cluster:
        await _load(cluster)
        text = await scrape(cluster.agents["reader"].ready.http)
    assert differences(text, Exposer.AGENT) == []
    assert problems(text) == ""
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    tokens = 20 * cluster.blocks.namespace.block_tokens
    assert samples["peer_agent_loaded_tokens_total", "peer"] == tokens
    assert samples["peer_agent_owner_blocks_total", "held"] == 20
    assert samples["peer_agent_used_entry_age_seconds_count",] == 20
    assert samples["peer_agent_read_bytes_total", "tcp"] == 20 * cluster.blocks.namespace.block_bytes
    assert samples["peer_agent_read_duration_seconds_count", "tcp"] >= 1
    assert samples["peer_agent_load_duration_seconds_count", "load"] == 1
    assert samples["peer_agent_metadata_calls_total", "lock"] == 1
    assert samples["peer_agent_fallback_peers",] == 0


async def _load(cluster: LocalCluster) -> None:
    fingerprints = cluster.blocks.chain(20)
    writer, reader = await cluster.engine("owner"), await cluster.engine("reader")
    await writer.store(fingerprints, cluster.blocks.data(fingerprints))
    await cluster.wait_known("owner")
    await reader.load(fingerprints, into=cluster.blocks.room(fingerprints))


async def test_prefetched_blocks_count_as_used_when_a_load_finds_them(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, "owner", "reader", transports=("tcp",)) as cluster:
        fingerprints = cluster.blocks.chain(20)
        writer, reader = await cluster.engine("owner"), await cluster.engine("reader")
        await writer.store(fingerprints, cluster.blocks.data(fingerprints))
        await cluster.wait_known("owner")
        await reader.prefetch(fingerprints, deadline_s=TIMEOUT_S)
        tally = cluster.agents["reader"].reader.counters.tally
        await eventually(lambda: tally.prefetched.brought == 20)
        await reader.load(fingerprints.select(range(5)), into=cluster.blocks.room(fingerprints.select(range(5))))
        assert (tally.prefetched.brought, tally.prefetched.used, tally.prefetched.unused) == (20, 5, 0)
        cluster.agents["reader"].store.discard(cluster.blocks.namespace.digest, fingerprints.select(range(15)))
        assert (tally.prefetched.used, tally.prefetched.unused) == (5, 10)
        assert tally.prefetched.unused_bytes == 10 * cluster.blocks.namespace.block_bytes


def crowded(nodes: int) -> CoordinatorMetrics:
    directory = Directory(open_index(seed=1), Sketch, Limits(), now_s=0.0)
    fill(directory, nodes=nodes, namespaces=many_namespaces(500, tenants=100), now_s=0.0, each=1, blocks=1)
    metrics = CoordinatorMetrics()
    for number in range(200):
        metrics.calls.began(f"Method{number}")
        metrics.calls.ended(f"Method{number}", f"CODE{number % 20}", 0.01)
        directory.ingest.rejected[f"reason-{number}"] += 1
        metrics.tally.add("auth_refused_total", f"reason-{number}")
    for _ in metrics.gather(directory, now_s=1.0):
        pass
    return metrics


def test_series_stay_within_the_bound_when_a_fleet_is_larger_than_any() -> None:
    text = render(crowded(2_000).collect(), TEXT).decode()
    families = exposed(text)
    assert sum(len(family.samples) for family in families.values()) <= 7_000
    ages = {sample.labels["node"] for sample in families["kvdir_stream_age_seconds"].samples}
    assert len(ages) == MAX_NODES + 1
    assert OTHER in ages
    assert {f"node-{number:05d}" for number in range(0, 2_000, 10)} <= ages, "those in trouble come first"
    streams = {sample.labels["state"]: sample.value for sample in families["kvdir_streams"].samples}
    assert sum(streams.values()) == 2_000
    missing = families["kvdir_stream_missing_events"].samples
    assert sum(sample.value for sample in missing) >= 200, "the sum over nodes is that of all of them"


class CrowdedPlane:
    """A data plane of an agent that has seen everything that one can see."""

    lanes = {f"lane-{number}/{side}": 1 for number in range(50) for side in "ab"}  # noqa: RUF012

    def stats(self) -> dict[str, int]:
        names = ("reads", "blocks", "bytes", "mover_starts", "mover_kills", "connections", *SERVING_FAULT.values)
        return dict.fromkeys(names, 1) | {f"tls_{outcome}": 1 for outcome in HANDSHAKE.values}


async def test_series_of_an_agent_stay_within_the_bound_when_everything_is_crowded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr("peer_agent.server.app.AgentCollector", lambda **parts: made.append(AgentCollector(**parts)) or made[0])
    async with local_cluster(
        tmp_path,
        "owner",
        http_listen="127.0.0.1:0",
        replica=True,
        engine=("vllm=tcp://127.0.0.1:1", "model=test", "hash=opaque", "seed=1"),
    ) as cluster:
        collector, address = made[0], cluster.agents["owner"].ready.http
        _crowd(collector, monkeypatch)
        text = await scrape(address)
    families = exposed(text)
    for name, family in families.items():
        assert len(family.samples) <= definitions.DEFINITIONS[name].series_at_most, name
    assert 1_000 <= sum(len(family.samples) for family in families.values()) <= 2_000
    assert problems(text) == ""


def _crowd(collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more of everything than labels have room for."""
    names = [f"thing-{number}" for number in range(60)]
    (occupied,), (publisher,) = collector._store.occupancy(), collector._publishing.stats()
    (stream,) = collector._engines.figures()
    for namespace in many_namespaces(100, tenants=20):
        collector._store.namespaces[namespace.digest] = namespace
    crowd = [replace(occupied, namespace_digest=digest) for digest in collector._store.namespaces]
    monkeypatch.setattr(type(collector._store), "occupancy", lambda self: crowd)
    monkeypatch.setattr(type(collector._store), "incomplete", lambda self, digest: 1)
    pools = collector._stager.pools
    monkeypatch.setattr(type(pools), "counts", lambda self: [(item.namespace_digest, 1) for item in crowd])
    publishers = [replace(publisher, address=name) for name in names]
    monkeypatch.setattr(type(collector._publishing), "stats", lambda self: publishers)
    streams = [replace(stream, stream=name, rejected=dict.fromkeys(names, 1)) for name in names]
    monkeypatch.setattr(type(collector._engines), "figures", lambda self: streams)
    findings = [Finding(name, kind, "", 0.0) for name in names for kind in FindingKind]
    monkeypatch.setattr(type(collector._engines), "findings", lambda self: findings)
    monkeypatch.setattr(type(collector._peers), "planes_in_use", lambda self: dict.fromkeys(names, 1))
    for name in names:
        collector._planes[name] = CrowdedPlane()
        collector._peers.predictions[name] = Histogram(RATIO_BUCKETS)
        collector._reader.counters.tally.read(name, took_s=0.1, size_bytes=1)
        for code in range(20):
            collector._calls.began(name)
            collector._calls.ended(name, f"CODE{code}", 0.01)
        collector.tally.set("tls_expires_timestamp_seconds", 1.0, name)


async def test_a_call_counts_with_its_code_when_its_handler_aborts_it_itself() -> None:
    async def handler(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "nothing here")

    figures = CallFigures()
    edge = EdgeInterceptor(figures, max_deadline_s=TIMEOUT_S, on_bug=lambda *_: None)
    server = grpc.aio.server(interceptors=[edge])
    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(handler), "Talk": grpc.stream_stream_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/test.Test/Ask")(b"", timeout=TIMEOUT_S)
        assert await channel.stream_stream("/test.Test/Talk")(timeout=TIMEOUT_S).code() is grpc.StatusCode.NOT_FOUND
    await server.stop(None)
    assert {name: method.by_code for name, method in figures.methods.items()} == {
        "Ask": {"NOT_FOUND": 1},
        "Talk": {"NOT_FOUND": 1},
    }


async def test_lookups_are_not_of_the_trace_in_which_their_stream_was_opened() -> None:
    async with serving(FAST_CONFIG) as served, grpc.aio.insecure_channel(served.address) as channel:
        metadata = ((trace.TRACEPARENT_KEY, f"00-{'ab' * 16}-{'cd' * 8}-01"),)
        call = directory_pb2_grpc.DirectoryStub(channel).LookupStream(timeout=TIMEOUT_S, metadata=metadata)
        await call.write(directory_pb2.LookupStreamRequest(lookups=[directory_pb2.StreamedLookup(id=1)]))
        assert [answer.id for answer in (await call.read()).answers] == [1]
        figures = served.coordinator.metrics.calls.methods["StreamedLookup"]
        assert (sum(figures.by_code.values()), figures.exemplars) == (1, {})


def test_untrusted_time_never_falls_when_a_stream_is_ahead_of_the_scrape() -> None:
    directory = Directory(open_index(seed=1), Sketch, Limits(), now_s=0.0)
    fill(directory, nodes=1, namespaces=many_namespaces(1, tenants=1), now_s=100.0)
    stream = directory.nodes["node-00000"].stream
    assert stream is not None
    assert stream_row(stream, now_s=99.0).untrusted_s == stream.cursor.untrusted_total_s


@pytest.mark.parametrize("nodes", [1, 100])
def test_openmetrics_say_the_same_when_a_scraper_accepts_them(nodes: int) -> None:
    metrics = crowded(nodes)
    plain = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(render(metrics.collect(), TEXT).decode())
        for sample in family.samples
    ]
    opened = [
        (sample.name, sample.labels, sample.value)
        for family in parse_openmetrics(render(metrics.collect(), OPENMETRICS).decode())
        for sample in family.samples
    ]
    assert plain == opened


async def test_everybody_else_has_turns_when_the_figures_of_a_large_fleet_are_put_aside() -> None:
    async with serving(FAST_CONFIG) as served:
        fill(
            served.coordinator.directory,
            nodes=1_000,
            namespaces=many_namespaces(8, tenants=4),
            now_s=time.monotonic(),
            blocks=1,
        )
        turns = 0
        scraping = asyncio.create_task(scrape(served.http))
        while not scraping.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(exposed(await scraping)["kvdir_stream_age_seconds"].samples) == MAX_NODES + 1
    steps = sum(1 for _ in served.coordinator.gather_metrics())
    assert steps >= 2_000, "one node at a time"
    assert turns > 10


def test_scraper_finds_the_trace_of_a_slow_call_when_a_real_prometheus_asks(
    start_prometheus: Callable[..., AbstractContextManager[Prometheus]],
) -> None:
    metrics = CoordinatorMetrics()
    with trace.within(trace.TraceContext("ab" * 16, "cd" * 8, sampled=True)):
        metrics.calls.began("Lookup")
        metrics.calls.ended("Lookup", "OK", 0.003)
    with (
        HttpSide(("127.0.0.1", 0), metrics, alive=lambda: "", ready=lambda: "") as side,
        start_prometheus({"kvdir": ["{}:{}".format(*side.address)]}) as prometheus,
    ):
        (sample,) = prometheus.until('kvdir_rpc_calls_total{method="Lookup"}')
        assert sample.value == 1
        window = {"start": time.time() - 600, "end": time.time() + 600}
        (found,) = prometheus.get("/api/v1/query_exemplars", query="kvdir_rpc_duration_seconds_bucket", **window)["data"]
        assert [item["labels"]["trace_id"] for item in found["exemplars"]] == ["ab" * 16]
