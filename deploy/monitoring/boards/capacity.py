"""Capacity: how full are nodes and the directory, what is thrown away for want of room, and when is more needed?"""

from __future__ import annotations

from deploy.monitoring.boards.words import (
    CLUSTER,
    COORDINATOR,
    COORDINATORS,
    NAMESPACE,
    SAME_PROCESS,
    node_total,
    of_one,
    quantile,
    rate,
    share,
    total,
)
from deploy.monitoring.boards.words import FLEET as SCOPE
from deploy.monitoring.grafana import BLUE, ORANGE, RED, Dashboard, Empty, Kind, Panel, Query, Row

_FULL = share(node_total("peer_agent_slots", SCOPE, where='state="committed"'), node_total("peer_agent_slots", SCOPE))
_STREAMS = total("kvdir_streams", COORDINATOR, by="instance", where='state!="fenced"')

_NODES = Row(
    "Memory of the nodes",
    (
        Panel(
            title="Held by the fleet", width=8, unit="bytes",
            good="Close to what there is: memory that is empty saves nothing.",
            queries=[
                Query(total("peer_agent_arena_bytes", SCOPE), "arenas"),
                Query(total("peer_agent_held_bytes", SCOPE), "held"),
            ],
            colours={"arenas": "#6e7681", "held": "semi-dark-blue"},
        ),
        Panel(
            title="Full, by node", width=8, kind=Kind.BARS, unit="percentunit", most=1, base="semi-dark-blue",
            good="About alike. The eight fullest.",
            queries=[Query(f"topk(8, {_FULL})", "{{node}}")],
        ),
        Panel(
            title="Blocks evicted a second", width=8,
            good="Steady. Beside a falling share of hits it says that more memory would pay.",
            queries=[
                Query(rate("peer_agent_evicted_blocks_total", SCOPE), "evicted"),
                Query(rate("peer_agent_no_space_blocks_total", SCOPE), "not read, no slot was free"),
            ],
        ),
    ),
)  # fmt: skip

_INDEX = Row(
    "Memory of the directory",
    (
        Panel(
            title="Blocks known", empty=Empty.WITH_STORE, width=6,
            good="Every coordinator the same: the distinct blocks of all nodes.",
            queries=[Query(f"kvdir_index_blocks{{{COORDINATOR}}}", "{{instance}}")],
        ),
        Panel(
            title="Index", empty=Empty.WITH_STORE, width=6, unit="bytes",
            good="Below the bound, where one is set (max_index_bytes).",
            queries=[
                Query(f"kvdir_index_bytes{{{COORDINATOR}}}", "{{instance}}"),
                Query(f"kvdir_index_max_bytes{{{COORDINATOR}}} > 0", "bound of {{instance}}"),
            ],
        ),
        Panel(
            title="Bytes a block", empty=Empty.WITH_STORE, width=6, unit="bytes", good="20 to 40, once there are many.",
            queries=[Query(f"kvdir_index_bytes{{{COORDINATOR}}} / (kvdir_index_blocks{{{COORDINATOR}}} > 0)", "{{instance}}")],
        ),
        Panel(
            title="Forgotten for want of room a second", empty=Empty.WITH_STORE, width=6,
            good="0, or the index is smaller than the fleet's memory on purpose.",
            queries=[
                Query(of_one("kvdir_index_evicted_blocks_total", COORDINATOR), "evicted from the index"),
                Query(of_one("kvdir_orphan_blocks_forgotten_total", COORDINATOR), "of nodes that are gone"),
            ],
        ),
        Panel(
            title="Holders, namespaces, nodes", width=6, good="Steady: holders are nodes times namespaces times tiers.",
            queries=[
                Query(total("kvdir_holders", COORDINATOR, over="max"), "holders"),
                Query(total("kvdir_namespaces", COORDINATOR, over="max"), "namespaces"),
                Query(f"max({_STREAMS})", "nodes"),
            ],
        ),
        Panel(
            title="Quotas", width=6, unit="percentunit", empty=Empty.WITHOUT_QUOTAS, thresholds=[(1, RED)],
            good="Below 100 %; above it blocks are evicted, as soon as the figure is trusted.",
            queries=[Query(share(
                total("kvdir_quota_used_bytes", COORDINATOR, by="subject", over="max"),
                total("kvdir_quota_limit_bytes", COORDINATOR, by="subject", over="max"),
            ), "{{subject}}")],
        ),
        Panel(
            title="Checkpoint", empty=Empty.WITH_STORE, width=6, unit="bytes",
            good="About as large as the index; 0 without checkpoints.",
            queries=[Query(f"kvdir_checkpoint_bytes{{{COORDINATOR}}}", "{{instance}}")],
        ),
        Panel(
            title="Watchers", empty=Empty.WITH_STORE, width=6, good="One for every agent with a replica.",
            queries=[
                Query(total("kvdir_watchers", COORDINATOR, by="instance"), "at {{instance}}"),
                Query(rate("kvdir_watch_cut_off_total", COORDINATOR), "cut off a second"),
            ],
        ),
    ),
)  # fmt: skip

_PROCESSES = Row(
    "Coordinators",
    (
        Panel(
            title="CPU", width=5, thresholds=[(0.8, RED)],
            good="Below 0.8 of a core; beyond, add coordinators or lookup workers.",
            queries=[Query(
                f"rate(process_cpu_seconds_total{{{COORDINATOR}}}[$__rate_interval]) and {SAME_PROCESS} kvdir_build_info",
                "{{instance}}",
            )],
        ),
        Panel(
            title="Resident memory", width=5, unit="bytes", good="The index, and some 100 MiB beside it.",
            queries=[
                Query(f"process_resident_memory_bytes{{{COORDINATOR}}} and {SAME_PROCESS} kvdir_build_info", "{{instance}}")
            ],
        ),
        Panel(
            title="Open files", width=5, unit="percentunit", most=1, thresholds=[(0.8, ORANGE)],
            good="Below 80 % of what the process may open: a few for every agent.",
            queries=[Query(
                f"process_open_fds{{{COORDINATOR}}} / process_max_fds{{{COORDINATOR}}} and {SAME_PROCESS} kvdir_build_info",
                "{{instance}}",
            )],
        ),
        Panel(
            title="A scrape, 99 % within", width=5, unit="s", good="Below 50 ms.",
            queries=[
                Query(quantile(0.99, "kvdir_scrape_duration_seconds", COORDINATOR), "coordinators"),
                Query(quantile(0.99, "peer_agent_scrape_duration_seconds", SCOPE), "agents"),
            ],
            colours={"coordinators": BLUE},
        ),
        Panel(
            title="Lookup workers", width=4, empty=Empty.WITHOUT_LOOKUP_WORKERS,
            good="As many as were asked for, and no restarts.",
            queries=[
                Query(f"kvdir_lookup_workers{{{COORDINATOR}}}", "at {{instance}}"),
                Query(rate("kvdir_lookup_worker_restarts_total", COORDINATOR), "restarts a second"),
            ],
        ),
    ),
)  # fmt: skip

CAPACITY = Dashboard(
    "capacity", "Capacity",
    "How full are nodes and the directory, what is thrown away for want of room, and when is more needed?",
    (CLUSTER, NAMESPACE, COORDINATORS), (_NODES, _INDEX, _PROCESSES),
)  # fmt: skip
