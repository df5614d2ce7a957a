"""docs/metrics.md, from the definitions: `python -m kvdir.obs.reference > docs/metrics.md` (`make docs`)."""

from __future__ import annotations

import sys

from kvdir.obs.definition import Definition, Exposer, Fold, Group, Kind
from kvdir.obs.definitions import GROUPS, exposed_by

_INTRODUCTION = """# Metrics

<!-- Written by `make docs` from kvdir/obs/definitions.py; edit that. -->

Both daemons answer `GET /metrics` on `http_listen`, as Prometheus' text, or as OpenMetrics for who accepts that: then with
exemplars, the trace ids of sampled requests, on the `_rpc_duration_`, `_load_duration_` and `_read_duration_` histograms.
`kvdir_` is a coordinator's, `peer_agent_` an agent's. Dashboards that draw them: docs/dashboards.md; alerts: docs/runbook.md.

- Units are in the names: seconds, bytes, ratios from 0 to 1. `_total` only rises while a process lives, and so does every
  `_bucket`; take `rate()` or `increase()`. Sums over a label mean something.
- A metric whose labels all have known values begins with all of them at 0, so a rate over it is never absent.
- What is **untrusted** is shown as such: a sum of blocks (`kvdir_views`, `kvdir_quota_used_bytes`) has its trust beside it.
- Never a label: fingerprints, requests, tokens, salts, peers. A tenant appears as the digest of its salt, and only where
  a quota was configured for it.
- Every label is bounded. Beyond its bound, values share one series named `other`: the sum, or where a sum would mean
  nothing, the largest (ages, lags) or the smallest (trust, confirmed shares). Of nodes, those in trouble come first; so, in a
  fleet that is larger than the bound, the `other` of a counter can fall when nodes change places.
"""

_COST = """## What it costs

`python bench/ops_cost.py` measures it: coordinators side by side, one client, alternating rounds, CPU of the server by lookup
message of 64 blocks, median of the ratios to a coordinator that counts no call and has no HTTP side. Two cores that others
shared: read ratios.

| with | CPU by message |
|---|---|
| nothing | 1 |
| metrics, tracing with every message naming an unsampled trace | 1.21 |
| all that and mTLS | 1.32 |

Per scrape, CPU: a coordinator of 100 nodes (1,268 lines) 4 ms of the event loop in slices of half a millisecond and 5 ms of the
HTTP thread; of 1,000 nodes (5,398 lines) 24 ms and 30 ms. Our writer takes 2 to 4 us a line, prometheus_client's 15.
"""


def page() -> str:
    """The whole document."""
    parts = [_INTRODUCTION, _bounds(), *map(_section, GROUPS), _COST]
    return "\n".join(parts)


def _bounds() -> str:
    rows = [f"| {exposer.value} | {sum(item.series_at_most for item in exposed_by(exposer)):,} |" for exposer in Exposer]
    return "\n".join(["| daemon | series at most, with every label full |", "|---|---|", *rows, ""])


def _section(group: Group) -> str:
    who = ", ".join(sorted(exposer.value for exposer in group.exposers))
    when = f" Only when {group.when}." if group.when else ""
    lines = [f"## {group.title}", "", f"*{group.question}* Exposed by: {who}.{when} Dashboard: {group.dashboard}.", ""]
    lines += ["| metric | kind | meaning | labels |", "|---|---|---|---|", *map(_row, group.metrics)]
    return "\n".join([*lines, ""])


def _row(metric: Definition) -> str:
    labels = "<br>".join(
        f"`{label.name}`: {', '.join(label.values)}" if label.values else f"`{label.name}`: {label.why}, at most {label.bound}"
        for label in metric.labels
    )
    kind = metric.kind.value
    if metric.kind is Kind.HISTOGRAM:
        kind += f" {metric.buckets[0]:g} to {metric.buckets[-1]:g}"
    if metric.at_most:
        labels += f"<br>at most {metric.at_most} series"
    if metric.fold is not Fold.SUM:
        labels += f"<br>`other`: {metric.fold.value}"
    return f"| `{metric.name}` | {kind} | {metric.help} | {labels} |"


if __name__ == "__main__":
    sys.stdout.write(page())
