"""Metrics of the streams of nodes: by state, and the figures of each node. Read by metrics.py and store_metrics.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvdir.core.node import Stream
from kvdir.core.views import NodeView
from kvdir.location import StreamState
from kvdir.obs.definition import Family
from kvdir.obs.definitions import family
from kvdir.obs.exposition import Breather


@dataclass(frozen=True, slots=True)
class StreamRow:
    """What is shown of one stream, as of one moment. Counts are of the current epoch."""

    node: str
    state: StreamState
    age_s: float
    lag_events: int
    missing_events: int
    missed_events: int
    confirmed: float
    gaps: int
    replays: int
    sketches: int
    snapshots: int
    untrusted_s: float


def stream_row(stream: Stream, *, now_s: float) -> StreamRow:
    """Of a stream in this process. now_s: of the scrape, which the stream may be ahead of."""
    now_s = max(now_s, stream.cursor.untrusted_since_s)  # else a counter would fall
    cursor, trust = stream.cursor, stream.trust(now_s)
    synced = cursor.state is StreamState.SYNCED
    return StreamRow(
        stream.node,
        cursor.state,
        trust.age_s,
        cursor.top_seq - cursor.applied_seq,
        cursor.missing_events,
        cursor.missed_events,
        trust.confirmed,
        cursor.gaps,
        cursor.replays,
        cursor.sketches,
        cursor.snapshots,
        cursor.untrusted_total_s + (0.0 if synced else now_s - cursor.untrusted_since_s),
    )


def view_row(view: NodeView) -> StreamRow:
    """Of a stream that some coordinator of the same store follows."""
    trust = view.trust
    return StreamRow(
        trust.node,
        trust.state,
        trust.age_s,
        view.announced_seq - view.last_seq,
        trust.missing_events,
        view.missed_events,
        trust.confirmed,
        view.gaps,
        view.replays,
        view.sketches,
        view.snapshots,
        view.untrusted_s,
    )


_BY_NODE: tuple[tuple[str, Callable[[StreamRow], float]], ...] = (
    ("kvdir_stream_age_seconds", lambda row: row.age_s),
    ("kvdir_stream_lag_events", lambda row: row.lag_events),
    ("kvdir_stream_missing_events", lambda row: row.missing_events),
    ("kvdir_stream_missed_events_total", lambda row: row.missed_events),
    ("kvdir_stream_confirmed_ratio", lambda row: row.confirmed),
    ("kvdir_stream_gaps_total", lambda row: row.gaps),
    ("kvdir_stream_untrusted_seconds_total", lambda row: row.untrusted_s),
)


def in_order(rows: Iterable[StreamRow]) -> tuple[StreamRow, ...]:
    """Those in trouble first, then by name: a fleet that is larger than the bound shows the nodes that matter."""
    return tuple(sorted(rows, key=lambda row: (row.state is StreamState.SYNCED, row.node)))


def stream_families(rows: tuple[StreamRow, ...]) -> Iterator[Family]:
    """One family at a time, since each may be long; gives way to other threads, as writing them does."""
    breathe = Breather()
    states = family("kvdir_streams")
    for row in rows:
        states.add(1, row.state.name.lower())
    yield states
    for name, figure in _BY_NODE:
        out = family(name)
        for row in rows:
            out.add(figure(row), row.node)
            breathe()
        yield out
    repairs = family("kvdir_stream_repairs_total")
    for row in rows:
        repairs.add(row.replays, row.node, "replay")
        repairs.add(row.sketches, row.node, "sketch")
        repairs.add(row.snapshots, row.node, "snapshot")
        breathe()
    yield repairs
