"""Directory: it does not hear of nodes, does not repair what it missed, or names what is not there."""

from __future__ import annotations

from deploy.monitoring.rules import FLEET, OF_NAMESPACE, PROCESS, Alert, Group, Severity

_HEARD = f"and on ({PROCESS}, node) kvdir_stream_age_seconds < 60"
"""Of nodes that have not gone: expire_after_s is 60 s."""

DIRECTORY = Group(
    "kvdir-directory",
    (
        Alert(
            name="KvdirNoCoordinator", after="2m", severity=Severity.CRITICAL,
            expr=f"max by ({FLEET}) (peer_agent_publisher_connected) == 0",
            why="No agent has any coordinator: no node finds blocks of another. Two minutes outlast a restart of all.",
            summary="No agent reaches any coordinator",
            description=f"Nothing moves between the nodes{OF_NAMESPACE}: every node has what it holds itself.",
        ),
        Alert(
            name="KvdirPublisherNotConnected", after="5m",
            expr="(peer_agent_publisher_connected == 0) and (peer_agent_publisher_standby == 0)",
            why="Reconnecting takes a second, a new address some more; five minutes are neither.",
            summary="An agent does not reach a coordinator",
            description=(
                "{{ $labels.instance }} does not publish to {{ $labels.coordinator }}, which soon names it no more."
            ),
        ),
        Alert(
            name="KvdirPublisherBehind", after="5m", expr="increase(peer_agent_skipped_events_total[4m]) > 0",
            why=(
                "Skipped events cost a sketch or a snapshot; once is a slow moment, for minutes is a coordinator that cannot "
                "follow. So the window is shorter than the wait."
            ),
            summary="A coordinator is too slow for an agent's events",
            description=(
                "{{ $labels.instance }} gave up {{ $value | humanize }} events to {{ $labels.coordinator }} within 4 "
                "minutes."
            ),
        ),
        Alert(
            name="KvdirStreamUntrusted", after="10m",
            expr=f"max by ({PROCESS}, node) (rate(kvdir_stream_untrusted_seconds_total[5m])) > 0.5\n{_HEARD}",
            why=(
                "Repairs take seconds. For ten minutes and most of the time means that none succeeds. A node that is silent "
                "has ended or is cut off, which KvdirAgentDown says, or KvdirPublisherNotConnected."
            ),
            summary="What is known of a node is not trusted",
            description=(
                "{{ $labels.instance }} could not trust the sums of {{ $labels.node }} for {{ $value | humanizePercentage }} "
                "of the last minutes. Quotas and clean-up leave it alone."
            ),
        ),
        Alert(
            name="KvdirGapNotRepaired", after="5m",
            expr=f"max by ({PROCESS}, node) (kvdir_stream_missing_events) > 0\n{_HEARD}",
            why="A replay is asked for at once, a snapshot after seconds; five minutes are several rounds of each.",
            summary="Lost events are not repaired",
            description="{{ $labels.instance }} misses {{ $value }} events of {{ $labels.node }}.",
        ),
        Alert(
            name="KvdirRepairsFail", after="0m",
            expr=(
                f'sum by ({PROCESS}, kind) (increase(kvdir_repairs_total{{outcome="failed"}}[15m])) > 5\n'
                f'and sum by ({PROCESS}, kind) (increase(kvdir_repairs_total{{outcome="failed"}}[15m]))\n'
                f'> 0.25 * sum by ({PROCESS}, kind) (increase(kvdir_repairs_total{{outcome="asked"}}[15m]))'
            ),
            why=(
                "A network that drops fails some and the next one succeeds. A quarter, and more than five, is no chance any "
                "more."
            ),
            summary="Repairs of streams fail",
            description=(
                "{{ $value | humanize }} {{ $labels.kind }} repairs failed at {{ $labels.instance }} within 15 minutes."
            ),
        ),
        Alert(
            name="KvdirDigestContradictions", after="0m", expr="increase(kvdir_digest_contradictions_total[1h]) > 2.5",
            why="They are repaired, but must not happen: nothing was lost, and the two ends differ. Twice may be two restarts.",
            summary="A stream is wrong although nothing was lost",
            description="{{ $labels.instance }} found {{ $value | humanize }} contradictions within an hour. Please report it.",
        ),
        Alert(
            name="KvdirFenced", after="1m", expr="peer_agent_fenced == 1",
            why="The newest registration of a name wins; the older agent ends or is told. A minute of it means both live on.",
            summary="Two agents have one name",
            description="A newer agent has the name of {{ $labels.instance }}, which is not in the directory any more.",
        ),
        Alert(
            name="KvdirStale", after="15m",
            expr=(
                "cluster:peer_agent_owner_stale:ratio_rate5m > 0.2\n"
                f"and on ({FLEET}) sum by ({FLEET}) (rate(peer_agent_owner_blocks_total[5m])) > 1"
            ),
            why=(
                "Full arenas make a few percent stale; with every fifth event lost it is still below 20 %. Few blocks say "
                "nothing."
            ),
            summary="Much of what the directory names is not there",
            description="Owners did not hold {{ $value | humanizePercentage }} of the blocks they were asked for.",
        ),
        Alert(
            name="KvdirDirectoryUnanswered", after="10m",
            expr=(
                f"sum by ({FLEET}) (rate(peer_agent_directory_failures_total[5m]))\n"
                f"/ (sum by ({FLEET}) (rate(peer_agent_loads_total[5m])) > 1) > 0.05"
            ),
            why="Loads wait 0.2 s for a directory and go on without; one in twenty is no accident.",
            summary="Loads get no answer from the directory",
            description=(
                "{{ $value | humanizePercentage }} of the loads reached no coordinator in time, and asked no other node."
            ),
        ),
        Alert(
            name="KvdirReplicaLag", after="5m",
            expr="peer_agent_replica_lag_seconds > 5",
            why="Beyond replica_max_lag_s (1 s) loads ask coordinators again; five times that is a feed that stands still.",
            summary="A node's replica of the directory is behind",
            description="The replica of {{ $labels.instance }} may be {{ $value | humanizeDuration }} behind.",
        ),
        Alert(
            name="KvdirReplicaIncomplete", after="15m", expr="peer_agent_replica_incomplete == 1",
            why="While a replica fills, it is incomplete for seconds.",
            summary="A node's replica does not hold all",
            description=(
                "Blocks are missing in the replica of {{ $labels.instance }} for want of memory; they are not found there."
            ),
        ),
        Alert(
            name="KvdirWatchersCutOff", after="0m", expr="increase(kvdir_watch_cut_off_total[15m]) > 5",
            why=(
                "A watcher that was cut off begins with a snapshot, the dearest of all reads; one that stalls once is no "
                "matter."
            ),
            summary="Replicas cannot follow a coordinator",
            description="{{ $labels.instance }} cut off {{ $value | humanize }} watchers within 15 minutes.",
        ),
        Alert(
            name="KvdirEngineInDoubt", after="10m", expr="peer_agent_engine_in_doubt == 1",
            why="A lost batch is replayed at once; without a replay port doubt lasts until the engine clears its cache.",
            summary="Nobody can vouch for what an engine holds",
            description="{{ $labels.instance }} lost events of engine {{ $labels.stream }}, and nothing brings them back.",
        ),
    ),
)  # fmt: skip
