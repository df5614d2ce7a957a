"""Metrics of device memory (tier gpu)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from kvdir.obs.definition import Family
from kvdir.obs.definitions import family, value
from peer_agent.server.staging import Stager
from peer_agent.server.store import Store


def device_families(stager: Stager, store: Store) -> Iterator[Family]:
    """Reads integers only; safe on the HTTP thread."""
    yield value("peer_agent_device_pools", len(stager.pools))
    published = family("peer_agent_device_blocks")
    for digest, blocks in stager.pools.counts():
        published.add(blocks, store.namespaces[digest].short)
    yield published
    outcomes = family("peer_agent_staged_blocks_total")
    for outcome, blocks in asdict(stager.counters).items():
        outcomes.add(blocks, outcome)
    yield outcomes
