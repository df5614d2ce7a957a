"""The store that coordinators share, where there is one."""

from __future__ import annotations

from deploy.monitoring.rules import FLEET, OF_NAMESPACE, Alert, Group, Severity

STORE = Group(
    "kvdir-store",
    (
        Alert(
            name="KvdirStoreDown", after="1m", severity=Severity.CRITICAL,
            expr=f"max by ({FLEET}) (kvdir_store_up) == 0",
            why=(
                "A fail-over of Redis Cluster or Sentinel takes some 4 s; no coordinator reaches the store, so none knows a "
                "block."
            ),
            summary="No coordinator reaches the shared store",
            description=f"All lookups{OF_NAMESPACE} are answered without hits: nodes recompute what others hold.",
        ),
        Alert(
            name="KvdirStoreUnreachable", after="2m", expr="kvdir_store_up == 0",
            why="One coordinator alone without the store: its network, or its credentials.",
            summary="A coordinator does not reach the shared store",
            description="{{ $labels.instance }} answers lookups without hits.",
        ),
        Alert(
            name="KvdirStoreBreakerOpens", after="0m",
            expr="increase(kvdir_store_breaker_opened_total[10m]) > 3.5 or min_over_time(kvdir_store_breaker_open[2m]) == 1",
            why="A fail-over opens it once. More often, or for minutes, is a store that is too slow (store_lookup_s).",
            summary="Lookups do not ask the store, because it is slow",
            description="{{ $labels.instance }} answers lookups without hits, to keep them quick.",
        ),
        Alert(
            name="KvdirStoreFull", after="10m", expr="kvdir_store_used_bytes / (kvdir_store_max_bytes > 0) > 0.9",
            why="With eviction Redis throws blocks away from here on, without it writes fail; a tenth is time to add memory.",
            summary="The shared store is nearly full",
            description="{{ $value | humanizePercentage }} of the store's memory is taken.",
        ),
        Alert(
            name="KvdirStoreLosesBlocks", after="0m",
            expr="increase(kvdir_store_lost_buckets_total[10m]) > 0 or increase(kvdir_store_evicted_total[10m]) > 0",
            why="The directory's keys must stay (maxmemory-policy noeviction): what vanished is found missing, and restated.",
            summary="The shared store lost parts of the directory",
            description="{{ $value | humanize }} parts or keys vanished within 10 minutes; agents restate what was in them.",
        ),
    ),
)  # fmt: skip
