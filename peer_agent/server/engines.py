"""The event streams of this host's engines, as `--engine` names them: begun with the agent, in its metrics and its inventory.

Does not: follow them (kvdir/client/engine_streams.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from kvdir.client.discovery import Discovery
from kvdir.client.engine_findings import FindingKind
from kvdir.client.engine_judge import BlockSizes
from kvdir.client.engine_life import Publishing
from kvdir.client.engine_options import read_engines
from kvdir.client.engine_streams import EngineStreams
from kvdir.client.events_out import EventsOut
from kvdir.errors import ConfigError, KvdirError
from kvdir.obs.definition import Family
from kvdir.obs.definitions import family
from kvdir.rpc.tls import PLAINTEXT, Dialer
from peer_agent.server.config import AgentConfig
from peer_agent.server.identity import version
from peer_agent.server.store import Store
from peer_agent.v1 import engine_pb2


def open_engines(
    config: AgentConfig,
    coordinators: Discovery | None,
    store: Store,
    events_out: EventsOut | None = None,
    dialer: Dialer = PLAINTEXT,
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
        dialer=dialer,
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


_COUNTS = ("batches", "events", "payload_bytes", "replays", "lost_batches", "restarts", "malformed")


def engine_families(engines: EngineStreams) -> Iterator[Family]:
    """Metrics of engine streams; labels are bounded by the configured engines."""
    figures = engines.figures()
    if not len(engines):
        return
    connected, blocks = family("peer_agent_engine_connected"), family("peer_agent_engine_blocks")
    doubt, age_s = family("peer_agent_engine_in_doubt"), family("peer_agent_engine_last_event_age_seconds")
    rejected, found = family("peer_agent_engine_rejected_total"), family("peer_agent_engine_findings")
    counts = {name: family(f"peer_agent_engine_{name}_total") for name in _COUNTS}
    for item in figures:
        connected.add(item.connected, item.stream)
        blocks.add(item.blocks, item.stream)
        doubt.add(bool(item.doubt), item.stream)
        age_s.add(-1.0 if item.last_event_age_s is None else item.last_event_age_s, item.stream)
        for name, count in counts.items():
            count.add(getattr(item, name), item.stream)
        for reason, count_of in item.rejected.items():
            rejected.add(count_of, item.stream, reason)
    for finding in engines.findings():
        found.add(1, finding.stream, FindingKind(finding.kind).value)
    yield from (connected, blocks, doubt, age_s, *counts.values(), rejected, found)
