"""Capacity: a bound is near, or what acts on sums cannot."""

from __future__ import annotations

from deploy.monitoring.rules import PROCESS, Alert, Group

CAPACITY = Group(
    "kvdir-capacity",
    (
        Alert(
            name="KvdirIndexNearBound", after="15m", expr="kvdir_index_bytes / (kvdir_index_max_bytes > 0) > 0.9",
            why=(
                "At the bound entries used least lately go, and are unknown from then on: fewer hits. A tenth is time to "
                "raise it."
            ),
            summary="The directory is nearly as large as it may be",
            description="The index of {{ $labels.instance }} takes {{ $value | humanizePercentage }} of max_index_bytes.",
        ),
        Alert(
            name="KvdirQuotaNotTrusted", after="30m",
            expr=f'max by ({PROCESS}, subject) (kvdir_quota_verdict{{verdict="untrusted"}}) == 1',
            why="Quotas wait for trust, which comes back within seconds; for half an hour a tenant may grow without bound.",
            summary="A quota is not enforced, because its figure is not trusted",
            description="{{ $labels.instance }} does not know for sure what {{ $labels.subject }} holds.",
        ),
        Alert(
            name="KvdirCheckpointFails", after="0m", expr="increase(kvdir_checkpoints_failed_total[15m]) > 1.5",
            why=(
                "Written every minute (checkpoint_every_s). Two failures (one is extrapolated to a little more) are a disk "
                "that is full or not ours."
            ),
            summary="The checkpoint cannot be written",
            description=(
                "{{ $labels.instance }} failed {{ $value | humanize }} times within 15 minutes; a restart begins empty."
            ),
        ),
        Alert(
            name="KvdirOpenFiles", after="10m",
            expr=(
                "process_open_fds / process_max_fds > 0.8\n"
                f"and on ({PROCESS}) (kvdir_build_info or peer_agent_build_info)"
            ),
            why="A few descriptors a node: beyond 80 % the fleet outgrows the limit, and new connections fail.",
            summary="A process is short of file descriptors",
            description="{{ $labels.instance }} has {{ $value | humanizePercentage }} of its descriptors open.",
        ),
    ),
)  # fmt: skip
