"""Figures of KvdirConnector as vLLM 0.32 passes them on: from its scheduler to its /metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from peer_agent.connectors.vllm.connector_values import COUNTERS


@dataclass
class KvdirStats(KVConnectorStats):
    """Counters of connector_values.COUNTERS, since the last time."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return KvdirStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvdirPromMetrics(KVConnectorPromMetrics):
    """vllm:kvdir_*_total, one counter for each of connector_values.COUNTERS."""

    def __init__(self, vllm_config: VllmConfig, metric_types: dict[Any, Any], labelnames: list[str], values: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        self._counters = {
            name: self._counter_cls(name=f"vllm:kvdir_{name}", documentation=f"kvdir: {meaning}.", labelnames=labelnames)
            for name, meaning in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
