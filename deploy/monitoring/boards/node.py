"""Node: what one node holds, gets and gives, whether the directory hears of it, and what its process takes."""

from __future__ import annotations

from deploy.monitoring.boards.results import result_of_blocks
from deploy.monitoring.boards.words import (
    AGENT,
    AGENTS,
    CLUSTER,
    FLEET,
    NAMESPACE,
    NODES,
    node_total,
    quantile,
    rate,
    share,
    total,
)
from deploy.monitoring.grafana import BLUE, GREEN, ORANGE, RED, Dashboard, Empty, Kind, Panel, Query, Row

_SAID_OF_IT = f'{FLEET}, node=~"$node"'
_HITS = 'status=~"hit_local|hit_peer"'
_SLOWEST = quantile(0.99, "peer_agent_rpc_duration_seconds", AGENT, by="method", where='method!~".*(Attach|Stream|Watch)"')

_NOW = Row(
    "Now",
    (
        Panel(
            title="Holds", kind=Kind.STAT, width=4, height=4, unit="bytes", base=BLUE, good="Close to the arena's size.",
            queries=[Query(total("peer_agent_held_bytes", AGENT))],
        ),
        Panel(
            title="Full", kind=Kind.STAT, width=4, height=4, unit="percentunit", base=BLUE,
            good="Any: a full arena evicts what was used least lately.",
            queries=[
                Query(share(total("peer_agent_slots", AGENT, where='state="committed"'), total("peer_agent_slots", AGENT)))
            ],
        ),
        Panel(
            title="Not recomputed", kind=Kind.STAT, width=4, height=4, unit="percentunit", base=BLUE, decimals=1,
            good="Like the other nodes.",
            queries=[Query(share(
                rate("peer_agent_load_blocks_total", AGENT, where=_HITS), rate("peer_agent_load_blocks_total", AGENT)
            ))],
        ),
        Panel(
            title="Engines attached", kind=Kind.STAT, width=4, height=4, base=BLUE, good="One for every engine process.",
            queries=[Query(total("peer_agent_engine_sessions", AGENT))],
        ),
        Panel(
            title="Coordinators it publishes to", kind=Kind.STAT, width=4, height=4, base=RED, thresholds=[(1, GREEN)],
            good="All; of those that share a store, one.",
            queries=[Query(total("peer_agent_publisher_connected", AGENT))],
        ),
        Panel(
            title="Failures", kind=Kind.STAT, width=4, height=4, thresholds=[(1, RED)],
            good="0: unexpected errors and background tasks that failed. The log has each; please report it.",
            queries=[Query(
                f"sum(increase(peer_agent_rpc_bugs_total{{{AGENT}}}[$__range]))"
                f" + sum(increase(peer_agent_task_failures_total{{{AGENT}}}[$__range]))"
            )],
        ),
    ),
)  # fmt: skip

_MEMORY = Row(
    "Memory",
    (
        Panel(
            title="Slots by state", width=8, stacked=True, good="Committed, and as many free as engines want at once.",
            queries=[Query(total("peer_agent_slots", AGENT, by="state"), "{{state}}")],
            colours={"committed": "semi-dark-blue", "free": "#4a5058", "reserved": "semi-dark-green",
                     "retired": "semi-dark-yellow", "quarantined": "semi-dark-red"},
        ),
        Panel(
            title="Bytes held, by namespace", width=8, unit="bytes", stacked=True, good="What the engines here use.",
            queries=[Query(total("peer_agent_held_bytes", AGENT, by="kv_namespace"), "{{kv_namespace}}")],
        ),
        Panel(
            title="Blocks evicted a second", width=8, good="Below what engines store, once the arena is full.",
            queries=[Query(rate("peer_agent_evicted_blocks_total", AGENT, by="kv_namespace"), "{{kv_namespace}}")],
        ),
        Panel(
            title="Locked and pinned slots", width=8,
            good="Few: reads under way. A rising line is an engine that never unpins.",
            queries=[
                Query(total("peer_agent_guarded_slots", AGENT, by="by"), "by {{by}}"),
                Query(total("peer_agent_locks", AGENT), "locks"),
            ],
        ),
        Panel(
            title="Blocks held, and not published", width=8,
            good="None that is not published, unless this node serves one rank of a split.",
            queries=[
                Query(total("peer_agent_slots", AGENT, where='state="committed"'), "held"),
                Query(total("peer_agent_incomplete_blocks", AGENT), "not published, another rank lacks its part"),
            ],
        ),
        Panel(
            title="Memory out of use", width=8, unit="bytes",
            good="0: slots that wait until a late transfer can no longer write.",
            queries=[Query(total("peer_agent_quarantined_bytes", AGENT), "quarantined")],
        ),
    ),
)  # fmt: skip

_WORK = Row(
    "What it gets and gives",
    (
        result_of_blocks(AGENT, width=8),
        Panel(
            title="A load from peers", width=8, unit="s", good="Below the deadline that engines give.",
            queries=[
                Query(quantile(q, "peer_agent_load_duration_seconds", AGENT, where='priority="load"'), name)
                for q, name in ((0.5, "half of them within"), (0.99, "99 %"))
            ],
        ),
        Panel(
            title="Bytes read and served", width=8, unit="Bps",
            good="Served over shared memory is not seen here: the reader copies.",
            queries=[
                Query(rate("peer_agent_read_bytes_total", AGENT, by="plane"), "read by {{plane}}"),
                Query(rate("peer_agent_served_bytes_total", AGENT, by="plane"), "served by {{plane}}"),
            ],
        ),
        Panel(
            title="Calls a second", width=8, good="OK alone.",
            queries=[Query(rate("peer_agent_rpc_calls_total", AGENT, by="code"), "{{code}}")],
        ),
        Panel(
            title="Calls, 99 % within", width=8, unit="s", good="Milliseconds; Load waits for peers, and is longer.",
            queries=[Query(f"topk(8, {_SLOWEST})", "{{method}}")],
        ),
        Panel(
            title="Did not work a second", width=8, good="0.",
            queries=[
                Query(rate("peer_agent_directory_failures_total", AGENT), "no directory in time"),
                Query(rate("peer_agent_peer_failures_total", AGENT), "no answer from a peer"),
                Query(rate("peer_agent_no_space_blocks_total", AGENT), "no room for a block"),
                Query(rate("peer_agent_refused_loads_total", AGENT), "too busy for peers"),
            ],
        ),
    ),
)  # fmt: skip

_HEARD = Row(
    "Does the directory hear of it",
    (
        Panel(
            title="Connected", width=6, kind=Kind.STATES, base=RED, thresholds=[(1, GREEN)],
            words={1: ("connected", GREEN), 0: ("not connected", RED)},
            good="Green for every coordinator, or for one where they share a store.",
            queries=[Query(f"peer_agent_publisher_connected{{{AGENT}}}", "{{coordinator}}")],
        ),
        Panel(
            title="Events not acknowledged", width=6, good="Hundreds at most, and back to 0.",
            queries=[Query(total("peer_agent_unacked_events", AGENT, by="coordinator", over="max"), "{{coordinator}}")],
        ),
        Panel(
            title="Sent for repair a second", width=6, good="0 on a sound network.",
            queries=[
                Query(rate("peer_agent_replays_total", AGENT), "replays"),
                Query(rate("peer_agent_sketches_total", AGENT), "sketches"),
                Query(rate("peer_agent_snapshots_total", AGENT), "snapshots"),
                Query(rate("peer_agent_skipped_events_total", AGENT), "events too old to be sent"),
            ],
        ),
        Panel(
            title="Heard ago, as coordinators say", width=6, unit="s", thresholds=[(10, ORANGE)], good="About a heartbeat.",
            queries=[Query(f"max by (node, instance) (kvdir_stream_age_seconds{{{_SAID_OF_IT}}})", "{{node}} at {{instance}}")],
        ),
    ),
)  # fmt: skip

_BESIDE = Row(
    "Engines, replica, process",
    (
        Panel(
            title="Event streams of engines", width=6, height=5, kind=Kind.STATES, empty=Empty.WITHOUT_ENGINE_STREAMS,
            thresholds=[(1, RED)], words={0: ("vouched for", GREEN), 1: ("in doubt", RED)},
            good="Green: what the engine holds is known.",
            queries=[Query(f"peer_agent_engine_in_doubt{{{AGENT}}}", "{{stream}}")],
        ),
        Panel(
            title="Events of engines a second", width=6, height=5, empty=Empty.WITHOUT_ENGINE_STREAMS,
            good="Follows requests; lost is 0.",
            queries=[
                Query(rate("peer_agent_engine_events_total", AGENT, by="stream"), "{{stream}}"),
                Query(rate("peer_agent_engine_lost_batches_total", AGENT), "batches lost"),
            ],
        ),
        Panel(
            title="Replica is behind by", width=6, height=5, unit="s", empty=Empty.WITHOUT_REPLICA, good="Milliseconds.",
            queries=[Query(node_total("peer_agent_replica_lag_seconds", AGENT), "{{node}}")],
        ),
        Panel(
            title="Blocks in the replica", width=6, height=5, empty=Empty.WITHOUT_REPLICA,
            good="As many as the directory knows.",
            queries=[Query(node_total("peer_agent_replica_blocks", AGENT), "{{node}}")],
        ),
        Panel(
            title="CPU", width=6, good="Far below one core.",
            queries=[Query(f"rate(process_cpu_seconds_total{{{AGENT}}}[$__rate_interval])", "{{instance}}")],
        ),
        Panel(
            title="Resident memory", width=6, unit="bytes", good="The arena, and some 100 MiB beside it.",
            queries=[Query(f"process_resident_memory_bytes{{{AGENT}}}", "{{instance}}")],
        ),
        Panel(
            title="Late event loop", width=6, unit="s", good="Below 50 ms.", thresholds=[(0.25, RED)],
            queries=[Query(f"peer_agent_loop_lag_seconds{{{AGENT}}}", "{{instance}}")],
        ),
        Panel(
            title="Open files", width=6, unit="percentunit", most=1, good="Below 80 % of what the process may open.",
            queries=[Query(f"process_open_fds{{{AGENT}}} / process_max_fds{{{AGENT}}}", "{{instance}}")],
        ),
    ),
)  # fmt: skip

NODE = Dashboard(
    "node", "Node", "What one node holds, gets and gives, whether the directory hears of it, and what its process takes.",
    (CLUSTER, NAMESPACE, NODES, AGENTS), (_NOW, _MEMORY, _WORK, _HEARD, _BESIDE),
)  # fmt: skip
