"""The event streams of this host's engines, as `--engine` names them: begun with the agent, in its metrics and its inventory.

Does not: follow them (kvdir/client/engine_streams.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvdir.client.discovery import Discovery
from kvdir.client.engine_findings import FindingKind
from kvdir.client.engine_judge import BlockSizes
from kvdir.client.engine_life import Publishing
from kvdir.client.engine_options import read_engines
from kvdir.client.engine_streams import EngineStreams
from kvdir.client.events_out import EventsOut
from kvdir.errors import ConfigError, KvdirError
from peer_agent.server.config import AgentConfig
from peer_agent.server.identity import version
from peer_agent.server.store import Store
from peer_agent.v1 import engine_pb2


def open_engines(
    config: AgentConfig, coordinators: Discovery | None, store: Store, events_out: EventsOut | None = None
) -> EngineStreams:
    """Follows all that are configured, and tells of them in events_out, if that is on.

    Raises ConfigError for what cannot be followed, such as for want of pyzmq.
    """

    def expected() -> BlockSizes:
        sizes: dict[str, set[int]] = {}
        for namespace in store.namespaces.values():
            sizes.setdefault(namespace.model, set()).add(namespace.block_tokens)
        return sizes

    publishing = Publishing(
        coordinators=coordinators,
        version=version(),
        queue_events=config.queue_events,
        ring_bytes=config.ring_bytes,
        follow=events_out.follow if events_out is not None else None,
    )
    streams = EngineStreams(config.node_name, publishing, expected=expected)
    engines, faults = read_engines(config.engine)
    for engine in engines:
        try:
            streams.add(engine)
        except KvdirError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError([f"engine: {fault}" for fault in dict.fromkeys(faults)])
    return streams


def stream_inventory(engines: EngineStreams) -> list[engine_pb2.EngineStreamInventory]:
    """For `peer-agent inventory`; an engine whose streams are not found yet is in it with what stands in the way."""
    findings = engines.findings()
    figures = engines.figures()
    known = {item.stream for item in figures}
    return [
        engine_pb2.EngineStreamInventory(
            stream=item.stream,
            endpoint=item.endpoint,
            connected=item.connected,
            blocks=item.blocks,
            batches=item.batches,
            lost_batches=item.lost_batches,
            restarts=item.restarts,
            state=item.state,
            findings=[finding.kind for finding in findings if finding.stream == item.stream],
        )
        for item in figures
    ] + [
        engine_pb2.EngineStreamInventory(stream=finding.stream, state=finding.words, findings=[finding.kind])
        for finding in findings
        if finding.stream not in known
    ]


def engine_families(engines: EngineStreams) -> Iterator[Metric]:
    """Metrics of engine streams; labels are bounded by the configured engines."""
    figures = engines.figures()
    if not len(engines):
        return
    gauges: tuple[tuple[str, str], ...] = (
        ("connected", "1 if somebody is at the other end of the subscription."),
        ("blocks", "Blocks that the engine is said to hold, over all tiers and groups."),
        ("in_doubt", "1 while nobody can vouch for what the engine holds."),
        ("last_event_age_seconds", "Since the last event; -1 before the first."),
    )
    for name, help in gauges:
        gauge = GaugeMetricFamily(f"peer_agent_engine_{name}", help, labels=["stream"])
        for item in figures:
            age_s = -1.0 if item.last_event_age_s is None else item.last_event_age_s
            values = {"connected": item.connected, "blocks": item.blocks, "in_doubt": bool(item.doubt)}
            gauge.add_metric([item.stream], float(values.get(name, age_s)))
        yield gauge
    for name, help in (
        ("batches", "Batches of events taken."),
        ("events", "Events in them."),
        ("payload_bytes", "Bytes of them."),
        ("replays", "Replays asked for."),
        ("lost_batches", "Batches that nothing brought back."),
        ("restarts", "Times that the engine began anew."),
        ("malformed", "Messages that are none of an event stream."),
    ):
        counter = CounterMetricFamily(f"peer_agent_engine_{name}", help, labels=["stream"])
        for item in figures:
            counter.add_metric([item.stream], getattr(item, name))
        yield counter
    rejected = CounterMetricFamily("peer_agent_engine_rejected", "Events not taken.", labels=["stream", "reason"])
    for item in figures:
        for reason, count in item.rejected.items():
            rejected.add_metric([item.stream, reason], count)
    yield rejected
    found = GaugeMetricFamily("peer_agent_engine_findings", "1 for what stands in the way.", labels=["stream", "kind"])
    for finding in engines.findings():
        found.add_metric([finding.stream, FindingKind(finding.kind).value], 1.0)
    yield found
