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
  `_bucket` (those by node begin at 0 with each epoch of the node); take `rate()` or `increase()`.
  Sums over a label mean something.
- A metric whose labels all have known values begins with all of them at 0, so a rate over it is never absent.
- What is **untrusted** is shown as such: a sum of blocks (`kvdir_views`, `kvdir_quota_used_bytes`) has its trust beside it.
- Never a label: fingerprints, requests, tokens, salts, peers. A tenant appears as the digest of its salt, and only where
  a quota was configured for it.
- Every label is bounded. Beyond its bound, values share one series named `other`: the sum, or where a sum would mean
  nothing, the largest (ages, lags) or the smallest (trust, confirmed shares). Of nodes, those in trouble come first. Counters
  of what comes and goes (nodes, coordinators, engine streams) have no `other`: it would fall when one of them leaves it, and
  Prometheus would take that for a reset. Sums over a fleet beyond the bound are those of the metrics without that label.
"""

_COST = """## What it costs

`python bench/ops_cost.py` measures it: coordinators side by side, one client that asks each in turn, rounds of 200 messages;
CPU of the server, all threads, by lookup message of 64 blocks, as the median of the ratios to a coordinator that counts no call
and has no HTTP side. One run of 40 rounds on two cores, one of them busy with something else (load 1); runs at a load above 15
said 1.18 for mTLS.

| with | CPU by message |
|---|---|
| nothing | 1 |
| metrics | 0.96 |
| and tracing, no request sampled | 0.99 |
| and mTLS | 1.04 |
| and every message naming an unsampled trace of its caller | 1.19 |

So the first lines are within what this machine can tell from nothing. The last is what a client pays for that passes trace
contexts on with every lookup: they are read, set and taken down again for each.

A scrape of a coordinator with 8 namespaces in two tiers, from asking to the answer, in the same run; the event loop works in
slices of 0.5 ms (3 ms and 24 ms of CPU in all):

| nodes | median | slowest | event loop late, p99 | and when nobody scrapes |
|---|---|---|---|---|
| 100 | 19 ms | 48 ms | 2.7 ms | 3.4 ms |
| 1,000 | 123 ms | 217 ms | 3.0 ms (once 54 ms) | 2.6 ms |

Text takes 2 to 4 us a line; prometheus_client's writer takes 15.
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
    if not metric.has_other:
        labels += "<br>beyond: no series"
    if metric.fold is not Fold.SUM:
        labels += f"<br>`other`: {metric.fold.value}"
    return f"| `{metric.name}` | {kind} | {metric.help} | {labels} |"


if __name__ == "__main__":
    sys.stdout.write(page())
