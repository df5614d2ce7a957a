"""Transfers: how fast do blocks come, over what, how many for nothing, and do the predictions hold?"""

from __future__ import annotations

from deploy.monitoring.boards.results import result_of_blocks
from deploy.monitoring.boards.words import CLUSTER, NAMESPACE, mean, node_rate, quantile, rate, total
from deploy.monitoring.boards.words import FLEET as SCOPE
from deploy.monitoring.grafana import GREEN, ORANGE, RED, Dashboard, Empty, Kind, Panel, Query, Row

_QUANTILES = ((0.5, "half of them within"), (0.9, "90 %"), (0.99, "99 %"))
_CALLS = rate("peer_agent_metadata_calls_total", SCOPE, by="kind")
_TOKENS = rate("peer_agent_loaded_tokens_total", SCOPE, where='source="peer"')

_SPEED = Row(
    "How fast",
    (
        Panel(
            title="Bytes from other nodes, by plane", width=8, unit="Bps", stacked=True,
            good="The plane that was meant: shm on one host, ucx or nixl with RDMA, tcp otherwise.",
            queries=[Query(rate("peer_agent_read_bytes_total", SCOPE, by="plane"), "{{plane}}")],
        ),
        Panel(
            title="A read, 99 % within, by plane", width=8, unit="s", good="Milliseconds.",
            queries=[Query(quantile(0.99, "peer_agent_read_duration_seconds", SCOPE, by="plane"), "{{plane}}")],
        ),
        Panel(
            title="A load from peers", width=8, unit="s", good="Below the deadline that engines give.",
            queries=[
                Query(quantile(q, "peer_agent_load_duration_seconds", SCOPE, where='priority="load"'), name)
                for q, name in _QUANTILES
            ],
        ),
        Panel(
            title="Bytes under way", width=6, unit="bytes",
            good="Goes up and down; a plateau is the bound of max_flight_bytes.",
            queries=[Query(total("peer_agent_flight_bytes", SCOPE), "to all nodes")],
        ),
        Panel(
            title="Reads that wait for their turn", width=6, good="0 most of the time; loads never wait behind prefetches.",
            queries=[Query(total("peer_agent_queued_reads", SCOPE, by="priority"), "{{priority}}")],
        ),
        Panel(
            title="Who reads most", width=6, unit="Bps", kind=Kind.BARS, base="semi-dark-blue",
            good="About alike, or as requests are spread.",
            queries=[Query(f'topk(8, {node_rate("peer_agent_peer_read_bytes_total", SCOPE)})', "{{node}}")],
        ),
        Panel(
            title="Peers connected, by plane", width=6, stacked=True, good="Every agent with every other that has something.",
            queries=[Query(total("peer_agent_connected_peers", SCOPE, by="plane"), "{{plane}}")],
        ),
    ),
)  # fmt: skip

_TRANSPORTS = Row(
    "Transport really in use",
    (
        Panel(
            title="Peers on a fallback", width=6, kind=Kind.STAT, height=6, thresholds=[(1, ORANGE)],
            good="0: peers reached by another plane than the first that both sides have, for instance tcp instead of RDMA.",
            queries=[Query(total("peer_agent_fallback_peers", SCOPE))],
        ),
        Panel(
            title="Transports", width=9, kind=Kind.TABLE, height=6, columns={"plane": "plane", "transport": "transport"},
            empty=Empty.WITHOUT_RDMA_PLANES,
            good="What the libraries really chose. rc_mlx5 or dc_mlx5 is RDMA; tcp under ucx is not.",
            queries=[Query(total("peer_agent_transport_info", SCOPE, by="plane, transport", over="count"), "agents")],
        ),
        Panel(
            title="What could not be served a second", width=9, height=6, good="0.",
            queries=[
                Query(rate("peer_agent_serving_faults_total", SCOPE, by="reason"), "{{reason}}"),
                Query(rate("peer_agent_capability_refused_total", SCOPE), "no proof of a lock"),
            ],
        ),
    ),
)  # fmt: skip

_WASTE = Row(
    "For nothing",
    (
        result_of_blocks(SCOPE, width=8),
        Panel(
            title="Bytes that nobody used", width=8, unit="Bps", stacked=True,
            good="A few percent of all: read twice to be quick, late, or prefetched in vain.",
            queries=[Query(rate("peer_agent_unused_bytes_total", SCOPE, by="why"), "{{why}}")],
        ),
        Panel(
            title="Late and lost", width=8,
            good="0: blocks that came after the deadline, found no room, or whose peer did not answer.",
            queries=[
                Query(rate("peer_agent_load_blocks_total", SCOPE, where='status="late"'), "late blocks a second"),
                Query(rate("peer_agent_quarantined_blocks_total", SCOPE), "quarantined blocks a second"),
                Query(rate("peer_agent_no_space_blocks_total", SCOPE), "blocks without room a second"),
                Query(rate("peer_agent_peer_failures_total", SCOPE), "peers without answer a second"),
            ],
        ),
        Panel(
            title="Second reads a second", width=6, good="Few, and most of them won.",
            queries=[
                Query(rate("peer_agent_hedged_reads_total", SCOPE), "begun"),
                Query(rate("peer_agent_hedged_reads_won_total", SCOPE), "won"),
            ],
        ),
        Panel(
            title="Prefetched blocks a second", width=6, good="Used above unused.",
            queries=[Query(rate("peer_agent_prefetched_blocks_total", SCOPE, by="outcome"), "{{outcome}}")],
        ),
        Panel(
            title="Calls per 1,000 tokens loaded", width=6,
            good="Below 10: what tokens from other nodes cost in lookups and locks.",
            queries=[
                Query(f"1000 * {_CALLS} / on () group_left () ({_TOKENS} > 0)", "{{kind}}"),
            ],
        ),
        Panel(
            title="Memory out of use", width=6, unit="bytes",
            good="0: slots that wait until a late transfer can no longer write.",
            queries=[Query(total("peer_agent_quarantined_bytes", SCOPE), "quarantined")],
        ),
    ),
)  # fmt: skip

_WORTH = Row(
    "Worth it",
    (
        Panel(
            title="Time saved and spent", width=8,
            good="Saved above spent, in seconds a second; 0 where prefill_tokens_per_s is not known.",
            queries=[
                Query(rate("peer_agent_saved_seconds_total", SCOPE), "saved"),
                Query(rate("peer_agent_spent_seconds_total", SCOPE), "spent"),
            ],
            colours={"saved": GREEN, "spent": ORANGE},
        ),
        Panel(
            title="Loads beside their prediction", width=8, thresholds=[(4, RED)],
            good="Around 1: a load took as long as was predicted. At 4, what is fetched is chosen badly.",
            queries=[
                Query(quantile(0.5, "peer_agent_load_prediction_ratio", SCOPE), "half of them below"),
                Query(quantile(0.9, "peer_agent_load_prediction_ratio", SCOPE), "90 %"),
            ],
        ),
        Panel(
            title="Reads beside their prediction", width=8, good="Around 1, by plane: the mean.",
            queries=[Query(mean("peer_agent_read_prediction_ratio", SCOPE, by="plane"), "{{plane}}")],
        ),
    ),
)  # fmt: skip

TRANSFERS = Dashboard(
    "transfers", "Transfers", "How fast do blocks come, over what, how many for nothing, and do the predictions hold?",
    (CLUSTER, NAMESPACE), (_SPEED, _TRANSPORTS, _WASTE, _WORTH),
)  # fmt: skip
