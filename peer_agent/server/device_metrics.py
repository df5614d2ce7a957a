"""Metrics of device memory (tier gpu). Labels are bounded: configured namespaces, outcomes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from peer_agent.server.staging import Stager
from peer_agent.server.store import Store


def device_families(stager: Stager, store: Store) -> Iterator[Metric]:
    """Reads integers only; safe on the HTTP thread."""
    yield GaugeMetricFamily("peer_agent_device_pools", "Pools of device memory registered now.", value=len(stager.pools))
    published = GaugeMetricFamily("peer_agent_device_blocks", "Blocks published from devices.", labels=["namespace"])
    for digest, blocks in stager.pools.counts():
        published.add_metric([store.namespaces[digest].short], blocks)
    yield published
    outcomes = CounterMetricFamily(
        "peer_agent_staged_blocks", "Blocks asked of devices, by what became of it.", labels=["outcome"]
    )
    for outcome, blocks in asdict(stager.counters).items():
        outcomes.add_metric([outcome], blocks)
    yield outcomes
