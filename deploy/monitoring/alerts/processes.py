"""Processes: one is gone, restarts, or does not get round to its work."""

from __future__ import annotations

from deploy.monitoring.rules import PROCESS, Alert, Group, Severity, seen

_AGENT_SEEN = f"on ({PROCESS}) {seen('peer_agent_build_info')}"
_INTERNAL = 'kvdir_rpc_calls_total{code="INTERNAL"}'

PROCESSES = Group(
    "kvdir-processes",
    (
        Alert(
            name="KvdirCoordinatorDown", after="1m",
            expr=f"(up == 0) and on ({PROCESS}) {seen('kvdir_build_info')}",
            why="A restart takes seconds; agents ask another coordinator meanwhile, so one minute loses nothing.",
            summary="A coordinator cannot be scraped",
            description=(
                "{{ $labels.instance }} has not answered for a minute. Agents ask the other coordinators, if there are any."
            ),
        ),
        Alert(
            name="KvdirAgentDown", after="2m", expr=f"(up == 0) and {_AGENT_SEEN}",
            why="An agent takes seconds to start, and longer only to touch a large arena.",
            summary="An agent cannot be scraped",
            description=(
                "{{ $labels.instance }} has not answered for two minutes. Its engine recomputes what it does not hold itself."
            ),
        ),
        Alert(
            name="KvdirAgentDownEngineUp", after="2m",
            expr=f'(up{{pod!=""}} == 0) and {_AGENT_SEEN}\nand on (cluster, namespace, pod) vllm:num_requests_running',
            why=(
                "The same pod's engine answers its scrape: nobody drains this node, its agent is broken. Without a pod's name "
                "any engine would do."
            ),
            summary="An agent is down while its engine serves",
            description="Pod {{ $labels.pod }} serves requests without its agent: it neither finds nor gives blocks.",
        ),
        Alert(
            name="KvdirRestartsOften", after="0m",
            expr=(
                "changes(process_start_time_seconds[30m]) > 2\n"
                f"and on ({PROCESS}) ({seen('kvdir_build_info')} or {seen('peer_agent_build_info')})"
            ),
            why=(
                "Twice within half an hour can be a rollout and a change of mind; three times is a loop. A process that loops "
                "is down when it is looked at, so what counts is that it was seen."
            ),
            summary="A process starts again and again",
            description="{{ $labels.instance }} started {{ $value }} times within 30 minutes.",
        ),
        Alert(
            name="KvdirNotReady", after="10m", expr="kvdir_warming == 1",
            why="warm_limit_s ends warming after 30 s; a shared store that is away keeps it on.",
            summary="A coordinator does not get ready",
            description="{{ $labels.instance }} still waits for nodes to restate what they hold; /readyz says what for.",
        ),
        Alert(
            name="KvdirLoopLag", after="5m",
            expr=(
                "avg_over_time(kvdir_loop_lag_seconds[2m]) > 0.25\n"
                "or\n"
                "avg_over_time(peer_agent_loop_lag_seconds[2m]) > 0.25"
            ),
            why=(
                "Agents wait 0.2 s for a directory (directory_timeout_s): a loop that is later than that answers nobody in "
                "time."
            ),
            summary="An event loop is late",
            description="{{ $labels.instance }} turns {{ $value | humanizeDuration }} late; answers wait as long.",
        ),
        Alert(
            name="KvdirLookupWorkersRestart", after="0m",
            expr="increase(kvdir_lookup_worker_restarts_total[15m]) > 2.5",
            why="One can be killed by the system; three (2 are extrapolated to more) within a quarter of an hour have a cause.",
            summary="Lookup workers end and are replaced",
            description="{{ $labels.instance }} replaced {{ $value | humanize }} lookup workers within 15 minutes.",
        ),
        Alert(
            name="KvdirUnexpectedErrors", after="0m", severity=Severity.WARNING,
            expr=(
                f"sum by ({PROCESS}) (increase({_INTERNAL}[10m])) > 0\n"
                "or\n"
                f"sum by ({PROCESS}) ({_INTERNAL} unless {_INTERNAL} offset 10m) > 0\n"
                "or\n"
                "increase(peer_agent_rpc_bugs_total[10m]) > 0\n"
                "or\n"
                "increase(peer_agent_task_failures_total[10m]) > 0"
            ),
            why=(
                "Whatever callers do, they get a status of their own: INTERNAL is a fault of the program, and so is a failed "
                "task. The first INTERNAL of a method begins a series, which is no increase of any."
            ),
            summary="A fault of the program",
            description="{{ $labels.instance }} met {{ $value | humanize }} errors that nobody foresaw. The log has each.",
        ),
        Alert(
            name="KvdirLogLinesDropped", after="10m",
            expr=(
                "increase(kvdir_log_lines_dropped_total[5m]) > 0\n"
                "or\n"
                "increase(peer_agent_log_lines_dropped_total[5m]) > 0"
            ),
            why="Log lines are dropped rather than waited for; a burst may, a steady loss means that nobody reads.",
            summary="Log lines are lost",
            description="{{ $labels.instance }} lost {{ $value | humanize }} log lines within 5 minutes.",
        ),
    ),
)  # fmt: skip
