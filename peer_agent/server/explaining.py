"""A load's explanation as JSON, for LoadResponse and logs. Its keys are told in docs/planner.md; none is ever renamed."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from kvdir.obs import trace
from kvdir.obs.spans import AnySpan
from peer_agent.core.effects import LoadStatus
from peer_agent.core.explanation import Explanation
from peer_agent.server.load import Load


def explanation_json(load: Load) -> str:
    """See `explanation_document`."""
    return msgspec.json.encode(explanation_document(load.plan.explain(), load)).decode()


def explanation_document(explanation: Explanation, load: Load) -> dict[str, Any]:
    """Times in microseconds since the load began, or durations."""
    return {
        "blocks": {status.name.lower(): count for status, count in explanation.blocks.items() if count},
        "predicted_us": _us(explanation.predicted_s),
        "took_us": _us(explanation.took_s),
        "lookup_us": _us(load.lookup_s),
        "net_gain_us": _us(load.net_gain_s),
        "directory_reached": load.directory_reached,
        "trace_id": trace.trace_id(),
        "request_id": trace.request_id(),
        "prefill_tokens_per_s": load.recompute.prefill_tokens_per_s,
        "nominees": [_plain(story) for story in explanation.nominees],
        "reads": [_plain(story) for story in explanation.fetches],
    }


def describe(span: AnySpan, load: Load) -> None:
    """What became of a load's blocks, on the span that stands for it."""
    if not span:
        return
    results = load.plan.results
    span.set("kvdir.blocks", len(load.fingerprints))
    span.set("kvdir.hits", sum(results.count(status) for status in LoadStatus if status.hit))
    for status in LoadStatus:
        if count := results.count(status):
            span.set(f"kvdir.{status.name.lower()}", count)
    span.set("kvdir.bytes", load.peer_bytes)
    span.set("kvdir.directory_reached", load.directory_reached)


def _plain(story: Any) -> dict[str, Any]:
    """A story's fields; seconds become microseconds, enums their words."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(story):
        value = getattr(story, field.name)
        if field.name.endswith("_s") and not field.name.endswith("per_s"):
            out[f"{field.name[:-2]}_us"] = None if value is None else _us(value)
        else:
            out[field.name] = value
    return out


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
