"""Metrics of data planes: what they serve to peers, and over what bytes really travel.

Planes count for themselves and differ in what they see (transport/*.py `stats`, `lanes`); what one does not count is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from kvdir.obs.definition import Family
from kvdir.obs.definitions import family
from kvdir.obs.labels import CAPABILITY, HANDSHAKE, SERVING_FAULT
from kvdir.obs.tally import Tally
from peer_agent.transport.base import Transport

_COUNTS = {
    "reads": "peer_agent_served_reads_total",
    "blocks": "peer_agent_served_blocks_total",
    "bytes": "peer_agent_served_bytes_total",
    "mover_starts": "peer_agent_mover_starts_total",
    "mover_kills": "peer_agent_mover_kills_total",
    "connections": "peer_agent_plane_connections",
    "peers": "peer_agent_plane_connections",
}


def plane_families(planes: Mapping[str, Transport]) -> Iterator[Family]:
    """Reads integers only; safe on the HTTP thread."""
    counts = {name: family(name) for name in _COUNTS.values()}
    faults, handshakes = family("peer_agent_serving_faults_total"), family("peer_agent_tls_handshakes_total")
    for plane, figures in ((name, _stats(transport)) for name, transport in planes.items()):
        for what, count in figures.items():
            if what in _COUNTS:
                counts[_COUNTS[what]].add(count, plane)
            elif what in SERVING_FAULT.values:
                faults.add(count, plane, what)
            elif (outcome := what.removeprefix("tls_")) in HANDSHAKE.values:
                handshakes.add(count, outcome)
    yield from (*counts.values(), faults, handshakes)
    lanes, transports = family("peer_agent_plane_lanes"), family("peer_agent_transport_info")
    for name, transport in planes.items():
        in_use: dict[str, int] = getattr(transport, "lanes", {})
        for lane, count in in_use.items():
            lanes.add(count, name, lane)
            transports.add(1, name, lane.partition("/")[0])
    yield from (lanes, transports)


def watch_planes(tally: Tally, planes: Mapping[str, Transport]) -> None:
    """Of the tcp plane: what is wrong with the capabilities of its readers, and its certificate, where it has one."""
    tcp = planes.get("tcp")
    if tcp is None:
        return
    for reason in CAPABILITY.values:
        tally.watch("capability_refused_total", partial(_refused, tcp, reason), reason)
    if not getattr(tcp, "tls_expires_unix_s", 0):
        return
    tally.watch("tls_expires_timestamp_seconds", lambda: getattr(tcp, "tls_expires_unix_s", 0), "data")
    tally.watch("tls_reloads_total", lambda: _stats(tcp).get("tls_reloads", 0), "used")
    tally.watch("tls_reloads_total", lambda: _stats(tcp).get("tls_failed_reloads", 0), "refused")


def _refused(transport: Transport, reason: str) -> int:
    return _stats(transport).get(f"capability_{reason}", 0)


def _stats(transport: Transport) -> dict[str, int]:
    stats: Callable[[], dict[str, int]] = getattr(transport, "stats", dict)
    return stats()
