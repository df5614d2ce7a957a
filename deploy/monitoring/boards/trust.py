"""Directory and trust: does the directory follow its nodes, what do losses cost, and does what it names exist?"""

from __future__ import annotations

from deploy.monitoring.boards.words import (
    CLUSTER,
    COORDINATOR,
    COORDINATORS,
    FLEET,
    NAMESPACE,
    of_one,
    quantile,
    rate,
    share,
    total,
)
from deploy.monitoring.grafana import BLUE, GREEN, ORANGE, RED, Dashboard, Empty, Kind, Panel, Query, Row

_NO_STREAM = 'method!~".*(Publish|Stream|Watch)"'
_QUANTILES = ((0.5, "half of them within"), (0.99, "99 %"))
_UNTRUSTED = f"max by (node) (rate(kvdir_stream_untrusted_seconds_total{{{COORDINATOR}}}[$__rate_interval]))"

_TRUST = Row(
    "Trust",
    (
        Panel(
            title="Streams by state", width=8, stacked=True,
            good=(
                "All synced. A gap is repaired in seconds; stale is a node that is silent, fenced one that was replaced or "
                "said goodbye. The mean of the coordinators chosen."
            ),
            queries=[Query(f'avg by (state) ({total("kvdir_streams", COORDINATOR, by="instance, state")})', "{{state}}")],
            colours={"synced": "semi-dark-green", "gap": "semi-dark-orange", "repairing": "semi-dark-yellow",
                     "stale": "semi-dark-red", "fenced": "#6e7681"},
        ),
        Panel(
            title="Sums that may be trusted", empty=Empty.WITH_STORE, width=8, unit="percentunit", most=1,
            good="100 %. What quotas and clean-up act upon; below it they wait.",
            queries=[Query(total("kvdir_view_trusted_ratio", COORDINATOR, by="scope", over="min"), "{{scope}}")],
        ),
        Panel(
            title="Nodes that are not trusted", width=8, kind=Kind.STATES, unit="percentunit",
            good="Green all along: the share of time in which the sums of a node could not be trusted. The twenty worst.",
            thresholds=[(0.05, ORANGE), (0.5, RED)],
            queries=[Query(f"topk(20, {_UNTRUSTED})", "{{node}}")],
        ),
    ),
)  # fmt: skip

_REPAIRS = Row(
    "Losses and repairs",
    (
        Panel(
            title="Events lost and not repaired", width=6, good="0; anything else goes back to 0 within seconds.",
            queries=[Query(total("kvdir_stream_missing_events", COORDINATOR, by="instance"), "at {{instance}}")],
        ),
        Panel(
            title="Holes in streams a second", empty=Empty.WITH_STORE, width=6, good="0 on a sound network.",
            queries=[
                Query(of_one("kvdir_gaps_total", COORDINATOR), "holes"),
                Query(of_one("kvdir_digest_contradictions_total", COORDINATOR), "wrong without a hole"),
            ],
            colours={"holes": "semi-dark-orange", "wrong without a hole": "semi-dark-red"},
        ),
        Panel(
            title="Repairs a second", empty=Empty.WITH_STORE, width=6,
            good="As many done as asked for: replays are cheap, snapshots are not.",
            queries=[
                Query(of_one("kvdir_repairs_total", COORDINATOR, by="kind", where='outcome="done"'), "{{kind}} done"),
                Query(of_one("kvdir_repairs_total", COORDINATOR, by="kind", where='outcome="failed"'), "{{kind}} failed"),
            ],
        ),
        Panel(
            title="A repair, duration", width=6, unit="s", empty=Empty.WHEN_WELL,
            good="Below a second: from asking to being whole.",
            queries=[
                Query(share(
                    rate("kvdir_repair_seconds_total", COORDINATOR, by="kind"),
                    rate("kvdir_repairs_total", COORDINATOR, by="kind", where='outcome="done"'),
                ), "{{kind}}")
            ],
        ),
        Panel(
            title="Bytes for repairs", empty=Empty.WITH_STORE, width=6, unit="Bps",
            good="Far below what the events themselves take.",
            queries=[Query(of_one("kvdir_repair_bytes_total", COORDINATOR, by="kind"), "{{kind}}")],
        ),
        Panel(
            title="Proofs a second", empty=Empty.WITH_STORE, width=6, good="One a node and heartbeat: both ends hold the same.",
            queries=[Query(of_one("kvdir_digest_proofs_total", COORDINATOR), "streams proven equal")],
        ),
        Panel(
            title="Refused a second", width=6, good="0. Else somebody publishes what makes no sense; the log says who.",
            queries=[
                Query(rate("kvdir_events_rejected_total", COORDINATOR), "events"),
                Query(rate("kvdir_snapshots_refused_total", COORDINATOR), "snapshots"),
                Query(rate("kvdir_namespaces_refused_total", COORDINATOR), "namespaces"),
            ],
        ),
        Panel(
            title="Events a second", width=6, good="Follows what engines store and evict.",
            queries=[
                Query(rate("kvdir_events_applied_total", COORDINATOR, by="instance"), "events at {{instance}}"),
                Query(rate("kvdir_batches_total", COORDINATOR, by="instance"), "batches at {{instance}}"),
            ],
        ),
    ),
)  # fmt: skip

_LOOKUPS = Row(
    "Lookups",
    (
        Panel(
            title="Lookups a second", width=6, good="Follows the requests of engines and routers.",
            queries=[Query(rate("kvdir_lookups_total", COORDINATOR, by="instance"), "{{instance}}")],
        ),
        Panel(
            title="Blocks that are known somewhere", empty=Empty.WITHOUT_CALLS, width=6, unit="percentunit", most=1,
            good="Depends on the prompts; a sudden fall does not.",
            queries=[
                Query(share(
                    rate("kvdir_lookup_hits_total", COORDINATOR), rate("kvdir_lookup_blocks_total", COORDINATOR)
                ), "named")
            ],
        ),
        Panel(
            title="Named, and not there", width=6, unit="percentunit", thresholds=[(0.05, ORANGE), (0.2, RED)],
            good="Below 5 %. Each costs one lock that finds nothing.",
            queries=[
                Query(share(
                    rate("peer_agent_owner_blocks_total", FLEET, where='answer="stale"'),
                    rate("peer_agent_owner_blocks_total", FLEET),
                ), "of what owners were asked for"),
                Query(share(
                    rate("kvdir_stale_blocks_total", COORDINATOR), rate("kvdir_lookup_hits_total", COORDINATOR)
                ), "of all that lookups named"),
            ],
        ),
        Panel(
            title="Age of entries that were used", width=6, unit="s",
            good="About a heartbeat: how long ago a node had been heard when it was named, and the read worked.",
            queries=[Query(quantile(q, "peer_agent_used_entry_age_seconds", FLEET), name) for q, name in _QUANTILES],
        ),
        Panel(
            title="Calls at coordinators a second", empty=Empty.WITHOUT_CALLS, width=6,
            good="OK alone. Other codes: the runbook says what each means.",
            queries=[Query(rate("kvdir_rpc_calls_total", COORDINATOR, by="code"), "{{code}}")],
        ),
        Panel(
            title="Calls at coordinators, 99 % within", empty=Empty.WITHOUT_CALLS, width=6, unit="s",
            good="Milliseconds; the streams of a connection are not in it.",
            queries=[Query(
                quantile(0.99, "kvdir_rpc_duration_seconds", COORDINATOR, by="method", where=_NO_STREAM), "{{method}}",
            )],
        ),
        Panel(
            title="Questions of agents a second", width=6,
            good="Few second questions, hardly any to the next coordinator.",
            queries=[
                Query(rate("peer_agent_directory_questions_total", FLEET), "questions"),
                Query(rate("peer_agent_directory_hedges_total", FLEET), "asked twice, for one was slow"),
                Query(rate("peer_agent_directory_moved_on_total", FLEET), "asked the next, for one failed"),
                Query(rate("peer_agent_directory_failures_total", FLEET), "no answer in time"),
            ],
        ),
        Panel(
            title="Loads by who named the owner", width=6, stacked=True, empty=Empty.WITHOUT_REPLICA,
            good="The replica on the node: it costs no call.",
            queries=[Query(rate("peer_agent_nominations_total", FLEET, by="source"), "{{source}}")],
        ),
    ),
)  # fmt: skip

_STORE = Row(
    "Shared store",
    (
        Panel(
            title="Store", width=6, height=6, kind=Kind.STATES, empty=Empty.WITHOUT_STORE, base=RED, thresholds=[(1, GREEN)],
            good="Green: it answers. Red: lookups find nothing, and engines recompute.",
            words={1: ("up", GREEN), 0: ("down", RED)},
            queries=[Query(f"kvdir_store_up{{{COORDINATOR}}}", "{{instance}}")],
        ),
        Panel(
            title="Memory of the store", width=6, height=6, unit="bytes", empty=Empty.WITHOUT_STORE,
            good="Below the bound, which is above 0.",
            queries=[
                Query(total("kvdir_store_used_bytes", COORDINATOR, over="max"), "used"),
                Query(total("kvdir_store_max_bytes", COORDINATOR, over="max"), "bound"),
            ],
            colours={"bound": RED, "used": BLUE},
        ),
        Panel(
            title="Calls to the store, 99 % within", width=6, height=6, unit="s", empty=Empty.WITHOUT_STORE,
            good="A few milliseconds.",
            queries=[Query(quantile(0.99, "kvdir_store_rpc_duration_seconds", COORDINATOR, by="method"), "{{method}}")],
        ),
        Panel(
            title="Lost with the store", width=6, height=6, empty=Empty.WITHOUT_STORE,
            good="0: lookups without an answer, keys that it evicted, parts found missing.",
            queries=[
                Query(rate("kvdir_lookups_without_store_total", COORDINATOR), "lookups without it a second"),
                Query(of_one("kvdir_store_evicted_total", COORDINATOR), "keys evicted a second"),
                Query(rate("kvdir_store_lost_buckets_total", COORDINATOR), "parts missing a second"),
            ],
        ),
    ),
)  # fmt: skip

TRUST = Dashboard(
    "trust", "Directory and trust", "Does the directory follow its nodes, what do losses cost, and does what it names exist?",
    (CLUSTER, NAMESPACE, COORDINATORS), (_TRUST, _REPAIRS, _LOOKUPS, _STORE),
)  # fmt: skip
