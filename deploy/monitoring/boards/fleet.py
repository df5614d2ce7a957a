"""Fleet: is it well, is it worth it, and which node is not like the others?"""

from __future__ import annotations

from deploy.monitoring.boards.results import result_of_blocks
from deploy.monitoring.boards.words import (
    CLUSTER,
    COORDINATOR,
    COORDINATORS,
    NAMESPACE,
    NODES,
    SAME_PROCESS,
    node_rate,
    node_total,
    quantile,
    rate,
    share,
    total,
)
from deploy.monitoring.boards.words import FLEET as SCOPE
from deploy.monitoring.grafana import BLUE, GREEN, ORANGE, RED, Dashboard, Empty, Kind, Panel, Query, Row

_HITS = 'status=~"hit_local|hit_peer"'
_LOADED = rate("peer_agent_load_blocks_total", SCOPE)

_NOW = Row(
    "Now",
    (
        Panel(
            title="Alerts", good="0. Each alert leads to its part of the runbook.", kind=Kind.STAT, width=3, height=4,
            queries=[Query(f'count(ALERTS{{alertname=~"Kvdir.*", alertstate="firing", {SCOPE}}}) or vector(0)')],
            thresholds=[(1, RED)],
        ),
        Panel(
            title="Coordinators", good="As many as were deployed.", kind=Kind.STAT, width=3, height=4, base=BLUE,
            queries=[Query(total("kvdir_build_info", COORDINATOR, over="count"))],
        ),
        Panel(
            title="Agents", good="As many as there are nodes.", kind=Kind.STAT, width=3, height=4, base=BLUE,
            queries=[Query(total("peer_agent_build_info", SCOPE, over="count"))],
        ),
        Panel(
            title="Streams in step", good="100 %. Below: the Directory and trust dashboard says which, and why.",
            kind=Kind.STAT, width=3, height=4, unit="percentunit", base=RED, thresholds=[(0.9, ORANGE), (0.999, GREEN)],
            queries=[
                Query(share(
                    total("kvdir_streams", COORDINATOR, where='state="synced"'),
                    total("kvdir_streams", COORDINATOR, where='state!="fenced"'),
                ))
            ],
        ),
        Panel(
            title="Blocks not recomputed", good="The higher the better: the share of blocks that engines asked for and got.",
            kind=Kind.STAT, width=3, height=4, unit="percentunit", base=BLUE, decimals=1,
            queries=[Query(share(rate("peer_agent_load_blocks_total", SCOPE, where=_HITS), _LOADED))],
        ),
        Panel(
            title="Of all, from other nodes", good="What kvdir adds to each node's own cache.",
            kind=Kind.STAT, width=3, height=4, unit="percentunit", base=BLUE, decimals=1,
            queries=[Query(share(rate("peer_agent_load_blocks_total", SCOPE, where='status="hit_peer"'), _LOADED))],
        ),
        Panel(
            title="Stale", good="Below 5 %: blocks that were named and not there. They cost a little time, nothing else.",
            kind=Kind.STAT, width=3, height=4, unit="percentunit", decimals=1, thresholds=[(0.05, ORANGE), (0.2, RED)],
            queries=[
                Query(share(
                    rate("peer_agent_owner_blocks_total", SCOPE, where='answer="stale"'),
                    rate("peer_agent_owner_blocks_total", SCOPE),
                ))
            ],
        ),
        Panel(
            title="Corrupt", good="0, always: blocks whose bytes were not what they must be. They were thrown away, not used.",
            kind=Kind.STAT, width=3, height=4, thresholds=[(1, RED)],
            queries=[Query(f'sum(increase(peer_agent_load_blocks_total{{status="corrupt", {SCOPE}}}[$__range]))')],
        ),
    ),
)  # fmt: skip

_ENGINES = Row(
    "What engines get",
    (
        result_of_blocks(SCOPE, width=9),
        Panel(
            title="Loads", good="As many as there are requests with something to look for.", width=7,
            queries=[
                Query(rate("peer_agent_loads_total", SCOPE), "loads a second"),
                Query(rate("peer_agent_refused_loads_total", SCOPE), "of those, too busy for peers"),
            ],
        ),
        Panel(
            title="Load from peers, duration", width=8, unit="s",
            good="The 99th percentile well below the engines' deadline, and below what recomputing takes.",
            queries=[
                Query(quantile(q, "peer_agent_load_duration_seconds", SCOPE, where='priority="load"'), name)
                for q, name in ((0.5, "half of them within"), (0.9, "90 %"), (0.99, "99 %"))
            ],
        ),
        Panel(
            title="Time saved and spent", width=8, unit="short",
            good=(
                "Saved above spent: seconds of prefill a second that blocks from peers saved, and the time their loads took. "
                "Both are 0 where nobody said how fast engines prefill (prefill_tokens_per_s)."
            ),
            queries=[
                Query(rate("peer_agent_saved_seconds_total", SCOPE), "saved"),
                Query(rate("peer_agent_spent_seconds_total", SCOPE), "spent"),
            ],
            colours={"saved": GREEN, "spent": ORANGE},
        ),
        Panel(
            title="Bytes between nodes", width=8, unit="Bps", good="Follows the share of blocks that come from other nodes.",
            queries=[Query(rate("peer_agent_peer_read_bytes_total", SCOPE), "read and verified")],
        ),
        Panel(
            title="vLLM: tokens found outside its own cache", width=8, unit="percentunit", most=1, empty=Empty.WITHOUT_VLLM,
            good=(
                "What engines themselves count as found through kvdir, of the tokens they asked for; beside it their own "
                "cache."
            ),
            queries=[
                Query(share(
                    f"sum(rate(vllm:external_prefix_cache_hits_total{{{SCOPE}}}[$__rate_interval]))",
                    f"sum(rate(vllm:external_prefix_cache_queries_total{{{SCOPE}}}[$__rate_interval]))",
                ), "through kvdir"),
                Query(share(
                    f"sum(rate(vllm:prefix_cache_hits_total{{{SCOPE}}}[$__rate_interval]))",
                    f"sum(rate(vllm:prefix_cache_queries_total{{{SCOPE}}}[$__rate_interval]))",
                ), "in its own cache"),
            ],
        ),
    ),
)  # fmt: skip

_NODES = Row(
    "Nodes",
    (
        Panel(
            title="Nodes", kind=Kind.TABLE, width=24, height=7, columns={"node": "node"}, drill="node",
            good=(
                "All lines alike. A click on a name leads to the node. Heard and lag as the coordinator sees them, the worst "
                "first."
            ),
            queries=[
                Query(f'topk(200, {total("kvdir_stream_age_seconds", COORDINATOR, by="node", over="max")})', "heard ago", "s"),
                Query(total("kvdir_stream_lag_events", COORDINATOR, by="node", over="max"), "events behind", "short"),
                Query(total("kvdir_stream_missing_events", COORDINATOR, by="node", over="max"), "events lost", "short"),
                Query(total("kvdir_stream_confirmed_ratio", COORDINATOR, by="node", over="min"), "confirmed", "percentunit"),
                Query(node_total("peer_agent_held_bytes", SCOPE), "holds", "bytes"),
                Query(share(
                    node_total("peer_agent_slots", SCOPE, where='state="committed"'), node_total("peer_agent_slots", SCOPE)
                ), "full", "percentunit"),
                Query(node_rate("peer_agent_loads_total", SCOPE), "loads a second", "short"),
                Query(node_rate("peer_agent_peer_read_bytes_total", SCOPE), "reads", "Bps"),
                Query(node_rate("peer_agent_served_bytes_total", SCOPE), "serves by network", "Bps"),
            ],
        ),
    ),
)  # fmt: skip

_BESIDE = "{{instance}}"
_PROCESSES = Row(
    "Processes",
    (
        Panel(
            title="CPU", width=6, unit="short", good="Coordinators below one core each: they answer on one.",
            queries=[
                Query(
                    f"rate(process_cpu_seconds_total{{{SCOPE}}}[$__rate_interval]) and {SAME_PROCESS} {name}_build_info",
                    _BESIDE,
                )
                for name in ("kvdir", "peer_agent")
            ],
        ),
        Panel(
            title="Late event loops", width=6, unit="s", good="Below 50 ms. Above, lookups wait as long.",
            thresholds=[(0.25, RED)],
            queries=[Query(f"{name}_loop_lag_seconds{{{SCOPE}}}", _BESIDE) for name in ("kvdir", "peer_agent")],
        ),
        Panel(
            title="Refused a second", width=6, good="0: calls refused for who was calling, and what hit a limit.",
            queries=[
                Query(rate(f"{name}_{what}_total", SCOPE), f"{who}: {words}")
                for name, who in (("kvdir", "coordinators"), ("peer_agent", "agents"))
                for what, words in (("auth_refused", "not allowed"), ("limited", "limits"))
            ],
        ),
        Panel(
            title="Certificates end in", width=6, unit="s", empty=Empty.WITHOUT_TLS,
            good="Days: they are renewed long before. The shortest of each process.",
            queries=[
                Query(f"min by (instance) ({name}_tls_expires_timestamp_seconds{{{SCOPE}}} > 0) - time()", _BESIDE)
                for name in ("kvdir", "peer_agent")
            ],
        ),
    ),
)  # fmt: skip

FLEET = Dashboard(
    "fleet", "Fleet", "Is it well, is it worth it, and which node is not like the others?",
    (CLUSTER, NAMESPACE, COORDINATORS, NODES), (_NOW, _ENGINES, _NODES, _PROCESSES),
)  # fmt: skip
