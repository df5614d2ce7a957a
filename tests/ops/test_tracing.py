"""Traces, end to end: real gRPC, a real collector's protocol, decoded by OpenTelemetry's own definitions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdir.client.aio import DirectoryClient
from kvdir.testing.span_collector import Received, SpanCollector, children
from kvdir.testing.wait import eventually
from peer_agent.testing.cluster import LocalCluster, local_cluster

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"
CLOCK_NS = 1_000_000
"""Start and end of a span are read from two clocks; they may drift apart by so much."""


@pytest.fixture
def collector() -> Iterator[SpanCollector]:
    with SpanCollector() as made:
        yield made


@pytest.fixture
async def cluster(tmp_path: Path, collector: SpanCollector) -> AsyncIterator[LocalCluster]:
    patient = {"directory_timeout_s": 10.0, "connect_timeout_s": 10.0}
    async with local_cluster(tmp_path, coordinator=False, otlp_endpoint=collector.url, **patient) as made:
        await made.start_coordinator(otlp_endpoint=collector.url)
        yield made


async def loaded(cluster: LocalCluster, trace: str = SAMPLED, **options: Any) -> Any:
    """A load of blocks that only the other node has."""
    blocks = cluster.blocks
    for node in ("owner", "reader"):
        await cluster.start_agent(node)
    owner, reader = await cluster.engine("owner"), await cluster.engine("reader")
    wanted = blocks.chain(8)
    assert (await owner.store(wanted, blocks.data(wanted), deadline_s=10)).stored == 8
    await cluster.wait_known("owner")
    result = await reader.load(wanted, into=blocks.room(wanted), deadline_s=10, trace=trace, **options)
    assert result.hits == 8, result
    return result


async def complete(collector: SpanCollector, *wanted: tuple[str, str]) -> list[Received]:
    """The trace, once each (name, service) is in it: every process sends its own."""

    def there() -> bool:
        spans = collector.trace(TRACE)
        return all(any(span.name == name and span.service.endswith(service) for span in spans) for name, service in wanted)

    await eventually(there, what=f"spans {wanted}")
    return collector.trace(TRACE)


def named(spans: list[Received], name: str, service: str) -> Received:
    (found,) = [span for span in spans if span.name == name and span.service.endswith(service)]
    return found


LOAD = "peer_agent.v1.Engine/Load"
LOOKUP = "kvdir.v1.Directory/Lookup"
LOCK = "peer_agent.v1.Peer/Lock"


async def test_load_is_one_trace_when_it_needs_coordinator_and_owner(cluster: LocalCluster, collector: SpanCollector) -> None:
    result = await loaded(cluster)
    assert result.trace_id == TRACE
    coordinator = cluster.coordinator.name  # type: ignore[union-attr]
    spans = await complete(collector, (LOAD, "/reader"), (LOOKUP, coordinator), (LOCK, "/owner"))

    load = named(spans, LOAD, "/reader")
    assert (load.parent, load.kind) == (CALLER, 2)
    assert load.attributes | {"kvdir.blocks": 8, "kvdir.hits": 8, "kvdir.hit_peer": 8} == load.attributes
    assert load.attributes["rpc.response.status_code"] == "OK"
    nominate = named(spans, "nominate", "/reader")
    asked, answered = named(spans, LOOKUP, "/reader"), named(spans, LOOKUP, coordinator)
    lock, owner, read = named(spans, LOCK, "/reader"), named(spans, LOCK, "/owner"), named(spans, "read", "/reader")
    assert nominate.parent == load.span_id
    assert asked.parent == nominate.span_id
    assert answered.parent == asked.span_id
    assert answered.attributes["kvdir.hits"] == 8
    assert lock.parent == load.span_id
    assert owner.parent == lock.span_id
    assert owner.attributes["kvdir.reader"] == "reader"
    assert read.parent == load.span_id
    assert read.attributes["kvdir.peer"] == "owner"
    assert read.attributes["kvdir.bytes"] == 8 * cluster.namespace.block_bytes
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        if (parent := by_id.get(span.parent)) is not None:
            assert parent.start_ns - CLOCK_NS <= span.start_ns <= span.end_ns <= parent.end_ns + CLOCK_NS, (parent, span)
    assert asked.end_ns <= lock.start_ns + CLOCK_NS
    assert not any(span.error for span in spans)


async def test_bytes_are_opentelemetrys_own_when_its_definitions_decode_them(
    cluster: LocalCluster, collector: SpanCollector
) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    await loaded(cluster)
    ours = await complete(collector, (LOAD, "/reader"), (LOCK, "/owner"))
    requests = [ExportTraceServiceRequest.FromString(body) for body in collector.bodies]
    scopes = [scope for request in requests for group in request.resource_spans for scope in group.scope_spans]
    theirs = {span.span_id.hex(): span for scope in scopes for span in scope.spans}
    for span in ours:
        found = theirs[span.span_id]
        assert (found.name, found.kind, found.trace_id.hex()) == (span.name, span.kind, span.trace_id)
        assert (found.parent_span_id.hex(), dict(_values(found.attributes))) == (span.parent, span.attributes)
        assert (found.start_time_unix_nano, found.end_time_unix_nano) == (span.start_ns, span.end_ns)
    for request in requests:
        unknown = request.SerializeToString(deterministic=True)
        request.DiscardUnknownFields()
        assert request.SerializeToString(deterministic=True) == unknown  # nothing that they do not know


def _values(attributes: Any) -> Iterator[tuple[str, Any]]:
    for item in attributes:
        yield item.key, getattr(item.value, item.value.WhichOneof("value"))


async def test_nothing_is_exported_but_the_trace_goes_on_when_it_is_not_sampled(
    cluster: LocalCluster, collector: SpanCollector
) -> None:
    result = await loaded(cluster, UNSAMPLED, explain=True, request_id="cmpl-7")
    assert result.trace_id == TRACE
    assert (result.explanation["trace_id"], result.explanation["request_id"]) == (TRACE, "cmpl-7")
    second = await cluster.engine("reader")
    wanted = cluster.blocks.chain(8)
    await second.load(wanted, into=cluster.blocks.room(wanted), deadline_s=10, trace=SAMPLED)  # the queue is in order
    await complete(collector, (LOAD, "/reader"))
    assert [span.name for span in collector.trace(TRACE)] == [LOAD]


async def test_agent_begins_traces_when_its_callers_have_none_and_the_ratio_says_so(
    cluster: LocalCluster, collector: SpanCollector
) -> None:
    await cluster.start_agent("alone", trace_ratio=1.0)
    engine = await cluster.engine("alone")
    wanted = cluster.blocks.chain(2)
    result = await engine.load(wanted, into=cluster.blocks.room(wanted), deadline_s=10)
    assert len(result.trace_id) == 32
    await eventually(lambda: len(collector.trace(result.trace_id)) >= 3, what="its spans")
    spans = collector.trace(result.trace_id)
    (first,) = [span for span in spans if not span.parent]
    assert first.name == LOAD
    assert {span.service for span in spans if span.name == LOOKUP} >= {"kvdir-peer-agent/alone"}


async def test_every_lookup_begins_its_own_trace_when_many_share_a_stream_and_the_ratio_says_so(
    tmp_path: Path, collector: SpanCollector
) -> None:
    async with local_cluster(tmp_path, coordinator=False) as cluster:
        await cluster.start_coordinator(otlp_endpoint=collector.url, trace_ratio=1.0)
        agent = await cluster.start_agent("node")
        await cluster.wait_known("node")
        async with DirectoryClient(cluster.coordinator_address) as client:
            for _ in range(3):
                await client.lookup(next(iter(agent.store.namespaces)), cluster.blocks.chain(2), deadline_s=10)

        def lookups() -> list[Received]:
            return [span for span in collector.spans if span.name == LOOKUP]

        await eventually(lambda: len(lookups()) == 3, what="three lookups")
        assert len({span.trace_id for span in lookups()}) == 3
        assert not any(span.parent for span in lookups())


async def test_lookup_is_in_the_trace_when_a_worker_answers_it_or_passes_it_on(
    tmp_path: Path, collector: SpanCollector
) -> None:
    from kvdir.obs import trace

    async with local_cluster(tmp_path, coordinator=False) as cluster:
        await cluster.start_coordinator(otlp_endpoint=collector.url, lookup_workers=1)
        agent = await cluster.start_agent("owner")
        engine = await cluster.engine("owner")
        wanted = cluster.blocks.chain(3)
        await engine.store(wanted, cluster.blocks.data(wanted), deadline_s=10)
        await cluster.wait_known("owner")
        digest = next(iter(agent.store.namespaces))

        async def ask() -> bool:
            """Main and worker share the port, and the kernel chooses, for every connection; a touch is passed on to main."""
            for stream in (True, False):
                async with DirectoryClient(cluster.coordinator_address, stream=stream) as client:
                    with trace.within(trace.parse(SAMPLED)):
                        await client.lookup(digest, wanted, touch=True, deadline_s=10)
            return bool(passed_on())

        def passed_on() -> list[tuple[Received, Received, Received]]:
            """(of the worker's call, of its question to main, of main's answer), as far as they are complete."""
            spans = {span.span_id: span for span in collector.trace(TRACE)}
            mains = [span for span in spans.values() if span.kind == 2 and span.resource["kvdir.process"] == "main"]
            asked = [(spans[main.parent], main) for main in mains if main.parent in spans]
            return [(spans[question.parent], question, main) for question, main in asked if question.parent in spans]

        await eventually(ask, what="a worker's lookup in the trace")
        for answered, question, _ in passed_on():
            assert answered.resource["kvdir.process"] == question.resource["kvdir.process"] == "worker-0"
            assert (answered.name, answered.kind, answered.parent) == (LOOKUP, 2, CALLER)


async def test_load_is_a_child_of_the_engines_span_when_it_uses_opentelemetry(
    cluster: LocalCluster, collector: SpanCollector
) -> None:
    from opentelemetry import trace as otel
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    otel.set_tracer_provider(provider)  # once in this process; only spans that somebody begins are recorded
    await cluster.start_agent("node")
    engine = await cluster.engine("node")
    wanted = cluster.blocks.chain(2)
    with otel.get_tracer("engine").start_as_current_span("request") as request:
        result = await engine.load(wanted, into=cluster.blocks.room(wanted), deadline_s=10)
    (ours,) = [span for span in kept.get_finished_spans() if span.name == "kvdir load"]
    assert ours.parent is not None
    assert ours.parent.span_id == request.get_span_context().span_id
    assert ours.attributes is not None
    assert ours.attributes["kvdir.blocks"] == 2
    assert result.trace_id == f"{ours.context.trace_id:032x}"
    await eventually(lambda: any(span.name == LOAD for span in collector.trace(result.trace_id)), what="the agent's span")
    assert named(collector.trace(result.trace_id), LOAD, "/node").parent == f"{ours.context.span_id:016x}"


async def test_traces_of_calls_at_once_are_not_mixed_when_they_share_a_stream(
    cluster: LocalCluster, collector: SpanCollector
) -> None:
    import asyncio

    await cluster.start_agent("node")
    engine = await cluster.engine("node")
    lists = [cluster.blocks.chain(2, root=str(number)) for number in range(20)]
    ids = [f"{number + 1:032x}" for number in range(20)]
    await asyncio.gather(
        *(
            engine.load(wanted, into=cluster.blocks.room(wanted), deadline_s=20, trace=f"00-{trace}-{CALLER}-01")
            for wanted, trace in zip(lists, ids, strict=True)
        )
    )
    service = f"/{cluster.coordinator.name}"  # type: ignore[union-attr]

    def complete(trace: str) -> bool:
        """The agent's spans come in the order in which they ended, so the load's is the last."""
        spans = collector.trace(trace)
        return any(span.name == LOAD for span in spans) and any(span.service.endswith(service) for span in spans)

    await eventually(lambda: all(map(complete, ids)), what="all spans")
    for trace in ids:
        spans = collector.trace(trace)
        tree = children(spans)
        (load,) = tree[CALLER]
        reached, todo = 0, [load]
        while todo:
            reached += 1
            todo += tree[todo.pop().span_id]
        assert (load.name, reached) == (LOAD, len(spans))
