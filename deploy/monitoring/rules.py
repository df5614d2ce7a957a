"""Recording rules and alerts as values, and the file that Prometheus reads.

An alert says what is wrong in its summary, with values in its description, and leads to its part of docs/runbook.md; `why` is
the reason of its threshold and becomes a comment. Severity: critical wakes somebody up, warning waits until morning. Hardly
anything is critical, because what is broken here is recomputed by engines.
Rules: expressions name no job: a scraper calls it what it likes. Series are kept apart by cluster, namespace, job and instance.
"""

from __future__ import annotations

import enum
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

RUNBOOK = "docs/runbook.md"
"""The chart puts the address under which you serve it in its place (monitoring.runbook)."""
FLEET = "cluster, namespace"
PROCESS = "cluster, namespace, job, instance"
OF_NAMESPACE = "{{ with $labels.namespace }} of {{ . }}{{ end }}"
"""Of a description: outside Kubernetes there is no such label."""


class Severity(enum.StrEnum):
    """See the module docstring."""

    CRITICAL = "critical"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """name: level:metric:operations, as Prometheus' own convention has it."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """after: how long the condition must hold. description: with {{ $labels.x }} and {{ $value }}."""

    name: str
    expr: str
    after: str
    why: str
    summary: str
    description: str
    severity: Severity = Severity.WARNING

    @property
    def runbook_url(self) -> str:
        return f"{RUNBOOK}#{self.name.lower()}"


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated together, in order."""

    name: str
    rules: Sequence[Record | Alert]


def seen(info: str) -> str:
    """The record of processes that are one of ours, whatever their job is called, or were before they went down."""
    return f"process:{info}:seen"


def to_yaml(groups: Sequence[Group]) -> str:
    """The rule file: YAML with the reasons as comments. Strings are JSON, which is YAML."""
    head = [
        "# Written by `make monitoring` from deploy/monitoring; edit there. When each alert fires and when not:",
        "# tests/ops/rules_cases.py.",
        "groups:",
    ]
    return "\n".join((*head, *(line for group in groups for line in _group(group)))) + "\n"


def _group(group: Group) -> Iterator[str]:
    yield f"  - name: {group.name}"
    yield "    rules:"
    for rule in group.rules:
        yield from _record(rule) if isinstance(rule, Record) else _alert(rule)


def _record(rule: Record) -> Iterator[str]:
    yield f"      - record: {rule.name}"
    yield from _expr(rule.expr)


def _alert(rule: Alert) -> Iterator[str]:
    for line in textwrap.wrap(rule.why, 118):
        yield f"      # {line}"
    yield f"      - alert: {rule.name}"
    yield from _expr(rule.expr)
    if rule.after != "0m":
        yield f"        for: {rule.after}"
    yield from _map("labels", {"severity": rule.severity.value})
    yield from _map(
        "annotations",
        {"summary": rule.summary, "description": rule.description, "runbook_url": rule.runbook_url},
    )


def _expr(expr: str) -> Iterator[str]:
    lines = textwrap.dedent(expr).strip().splitlines()
    if len(lines) == 1:
        yield f"        expr: {json.dumps(lines[0])}"
        return
    yield "        expr: |-"
    for line in lines:
        yield f"          {line}".rstrip()


def _map(name: str, pairs: Mapping[str, str]) -> Iterator[str]:
    yield f"        {name}:"
    for key, value in pairs.items():
        yield f"          {key}: {json.dumps(value, ensure_ascii=False)}"
