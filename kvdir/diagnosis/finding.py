"""What a doctor says: one finding per thing that is wrong, and one per check that is in order."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """The worst last. A warning may be as intended; a fault is why something does not work."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """check: its name, as in docs/doctor.md. seen: the facts, for people. meaning, fix: empty where all is in order.

    subject: the node, coordinator or endpoint it is about; empty for the whole.
    """

    check: str
    verdict: Verdict
    seen: str
    subject: str = ""
    meaning: str = ""
    fix: str = ""


def in_order(check: str, seen: str, *, subject: str = "") -> Finding:
    """What a check says that has nothing to say."""
    return Finding(check=check, verdict=Verdict.OK, seen=seen, subject=subject)


def worst(findings: Iterable[Finding]) -> Verdict:
    """OK when there is none."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Faults first, what is in order last; otherwise as they came."""
    order = list(Verdict)
    return sorted(findings, key=lambda finding: -order.index(finding.verdict))
