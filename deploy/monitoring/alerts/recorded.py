"""Ratios that alerts, dashboards of others and questions by hand need again and again, over five minutes.

A ratio is absent while its denominator is 0: no traffic is neither good nor bad.
A process that is down is remembered for as long as its target is scraped: its alert stays until it is back or taken out. The
hour is for a Prometheus that starts anew.
"""

from __future__ import annotations

from deploy.monitoring.rules import FLEET, PROCESS, Group, Record, seen


def _rate(metric: str, matchers: str = "") -> str:
    return f"sum by ({FLEET}) (rate({metric}{{{matchers}}}[5m]))" if matchers else f"sum by ({FLEET}) (rate({metric}[5m]))"


def _share(part: str, whole: str) -> str:
    return f"{part}\n/\n({whole} > 0)"


def _seen(info: str) -> Record:
    down = f"(group by ({PROCESS}) (up == 0) and on ({PROCESS}) {seen(info)})"
    return Record(name=seen(info), expr=f"group by ({PROCESS}) (last_over_time({info}[1h]))\nor\n{down}")


_BLOCKS = _rate("peer_agent_load_blocks_total")

RECORDED = Group(
    "kvdir-recorded",
    (
        _seen("kvdir_build_info"),
        _seen("peer_agent_build_info"),
        Record(
            name="cluster:peer_agent_load_hits:ratio_rate5m",
            expr=_share(_rate("peer_agent_load_blocks_total", 'status=~"hit_local|hit_peer"'), _BLOCKS),
        ),
        Record(
            name="cluster:peer_agent_load_peer_hits:ratio_rate5m",
            expr=_share(_rate("peer_agent_load_blocks_total", 'status="hit_peer"'), _BLOCKS),
        ),
        Record(
            name="cluster:peer_agent_load_late:ratio_rate5m",
            expr=_share(
                _rate("peer_agent_load_blocks_total", 'status="late"'),
                _rate("peer_agent_load_blocks_total", 'status=~"hit_peer|late"'),
            ),
        ),
        Record(
            name="cluster:peer_agent_owner_stale:ratio_rate5m",
            expr=_share(_rate("peer_agent_owner_blocks_total", 'answer="stale"'), _rate("peer_agent_owner_blocks_total")),
        ),
        Record(
            name="cluster:kvdir_lookup_hits:ratio_rate5m",
            expr=_share(_rate("kvdir_lookup_hits_total"), _rate("kvdir_lookup_blocks_total")),
        ),
        Record(
            name="cluster:peer_agent_net_gain:rate5m",
            expr=f"{_rate('peer_agent_saved_seconds_total')}\n-\n{_rate('peer_agent_spent_seconds_total')}",
        ),
        Record(name="cluster:peer_agent_peer_read_bytes:rate5m", expr=_rate("peer_agent_peer_read_bytes_total")),
        Record(
            name="cluster:peer_agent_load_duration_seconds:p99_rate5m",
            expr=(
                f"histogram_quantile(0.99, sum by (le, {FLEET}) "
                '(rate(peer_agent_load_duration_seconds_bucket{priority="load"}[5m])))'
            ),
        ),
    ),
)
