"""Transfers: wrong bytes, the wrong transport, late, or not worth it."""

from __future__ import annotations

from deploy.monitoring.rules import FLEET, PROCESS, Alert, Group, Severity

TRANSFERS = Group(
    "kvdir-transfers",
    (
        Alert(
            name="KvdirCorruptBlocks", after="0m", severity=Severity.CRITICAL,
            expr=f'sum by ({PROCESS}) (increase(peer_agent_load_blocks_total{{status="corrupt"}}[10m])) > 0',
            why=(
                "Never to happen. The block was refused and recomputed, but something wrote where it must not, or memory is "
                "bad."
            ),
            summary="A block had wrong bytes",
            description=(
                "{{ $labels.instance }} refused {{ $value | humanize }} blocks whose checksum was wrong. No engine got them."
            ),
        ),
        Alert(
            name="KvdirFallbackTransport", after="10m", expr="peer_agent_fallback_peers > 0",
            why=(
                "At start a plane may come late; after ten minutes peers are read by tcp where RDMA was offered, ten times "
                "slower."
            ),
            summary="Peers are read by a slower transport than was offered",
            description="{{ $labels.instance }} reads {{ $value }} peers by another plane than the first that both sides have.",
        ),
        Alert(
            name="KvdirLateBlocks", after="10m",
            expr=(
                "cluster:peer_agent_load_late:ratio_rate5m > 0.05\n"
                f'and on ({FLEET}) sum by ({FLEET}) (rate(peer_agent_load_blocks_total{{status=~"hit_peer|late"}}[5m])) > 1'
            ),
            why=(
                "The planner leaves out what cannot come in time; when one block in twenty is late all the same, it is wrong. "
                "Few blocks say nothing."
            ),
            summary="Blocks come after the deadline",
            description="{{ $value | humanizePercentage }} of the blocks from other nodes were late and recomputed.",
        ),
        Alert(
            name="KvdirPeersDoNotAnswer", after="10m",
            expr=(
                f"sum by ({FLEET}) (rate(peer_agent_peer_failures_total[5m]))\n"
                f"/ (sum by ({FLEET}) (rate(peer_agent_loads_total[5m])) > 1) > 0.05"
            ),
            why=(
                "A dead peer costs one try until its breaker opens; a share that stays is a network between agents that is "
                "cut."
            ),
            summary="Agents do not reach each other",
            description="In {{ $value | humanizePercentage }} of the loads some peer did not answer.",
        ),
        Alert(
            name="KvdirQuarantineGrows", after="15m",
            expr=f"sum by ({PROCESS}) (peer_agent_quarantined_bytes) / sum by ({PROCESS}) (peer_agent_arena_bytes) > 0.02",
            why="Slots return when a late transfer settled, within seconds; two percent for long are transfers that never do.",
            summary="Memory is out of use because of late transfers",
            description="{{ $value | humanizePercentage }} of the arena of {{ $labels.instance }} is quarantined.",
        ),
        Alert(
            name="KvdirLocksGrow", after="15m",
            expr=(
                f'sum by ({PROCESS}) (peer_agent_guarded_slots{{by="lock"}})\n'
                f"/ sum by ({PROCESS}) (peer_agent_slots) > 0.25"
            ),
            why="Leases end after 30 s (max_lease_s): a quarter of all slots under lock for long is readers that never unlock.",
            summary="A quarter of the blocks is locked",
            description=(
                "{{ $value | humanizePercentage }} of the slots of {{ $labels.instance }} are locked; eviction runs short."
            ),
        ),
        Alert(
            name="KvdirNoRoom", after="15m",
            expr=(
                f"sum by ({PROCESS}) (rate(peer_agent_no_space_blocks_total[5m]))\n"
                f"/ (sum by ({PROCESS}) (rate(peer_agent_load_blocks_total[5m])) > 1) > 0.1"
            ),
            why="Eviction makes room for what is read; a tenth without any means that the arena is locked, pinned or tiny.",
            summary="Blocks are not read for want of a free slot",
            description="{{ $labels.instance }} had no slot for {{ $value | humanizePercentage }} of the blocks asked for.",
        ),
        Alert(
            name="KvdirCostsMoreThanItSaves", after="30m",
            expr=(
                "cluster:peer_agent_net_gain:rate5m < 0\n"
                f"and on ({FLEET}) sum by ({FLEET}) (rate(peer_agent_spent_seconds_total[5m])) > 0.01"
            ),
            why="The planner fetches what it expects to pay. Half an hour of loss, at some load, says that it is mistaken.",
            summary="Loads from other nodes take longer than recomputing",
            description="A second of the fleet's time loses {{ $value | humanize }} s to loads from peers.",
        ),
        Alert(
            name="KvdirPredictionsWrong", after="30m",
            expr=(
                f"histogram_quantile(0.5, sum by (le, {FLEET}) (rate(peer_agent_load_prediction_ratio_bucket[15m]))) > 4\n"
                f"and on ({FLEET}) sum by ({FLEET}) (rate(peer_agent_load_prediction_ratio_count[15m])) > 0.1"
            ),
            why="Estimates follow what was measured within minutes; four times too low for half an hour they do not.",
            summary="Loads take much longer than predicted",
            description="Half of the loads take more than {{ $value | humanize }} times what was predicted.",
        ),
    ),
)  # fmt: skip
