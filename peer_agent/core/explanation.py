"""Why a load went as it did: values for `--explain`, logs and traces. No decision is made here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from peer_agent.core.effects import LoadStatus
from peer_agent.core.nominees import Nominee
from peer_agent.core.sources import Source, Verdict


@dataclass(frozen=True, slots=True)
class NomineeStory:
    """One node that the directory named, with the figures that decided. Blocks: claims, holds, stale, served.

    first_byte_s: predicted from the ask to its first byte. asked_s: since the load began; answer_s: how long the answer took.
    Both None where it was not asked, or has not answered. remark: why it was given nothing (more).
    """

    node: str
    state: str
    verdict: Verdict
    plane: str
    same_host: bool
    first_byte_s: float
    bytes_per_s: float
    queued_bytes: int
    claims: int
    asked_s: float | None = None
    answer_s: float | None = None
    holds: int = 0
    stale: int = 0
    served: int = 0
    remark: str = ""


@dataclass(frozen=True, slots=True)
class FetchStory:
    """One read: `runs` are (first position, blocks). Times in seconds since the load began; took_s None: not ended.

    hedges: the number of the read that it doubles, None if it is none. outcome: blocks by status name.
    """

    number: int
    node: str
    runs: tuple[tuple[int, int], ...]
    size_bytes: int
    began_s: float
    predicted_s: float
    took_s: float | None
    hedges: int | None
    outcome: dict[str, int]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One load. predicted_s: from the first asks to the last byte; took_s: from its beginning to the last event so far."""

    blocks: dict[LoadStatus, int]
    predicted_s: float
    took_s: float
    net_gain_s: float
    nominees: tuple[NomineeStory, ...]
    fetches: tuple[FetchStory, ...]


def nominee_stories(
    sources: Iterable[Source], passed: Iterable[tuple[Nominee, Verdict]], began_s: float
) -> tuple[NomineeStory, ...]:
    """Those asked, in that order, then the others."""
    stories = [
        _story(
            source.nominee,
            source.verdict,
            asked_s=source.asked_s - began_s,
            answer_s=None if source.answered_s is None else source.answered_s - source.asked_s,
            holds=source.held,
            stale=source.stale,
            served=source.served,
            remark=source.remark,
        )
        for source in sources
    ]
    return (*stories, *(_story(nominee, verdict) for nominee, verdict in passed))


def _story(nominee: Nominee, verdict: Verdict, **details: Any) -> NomineeStory:
    figures = nominee.figures
    return NomineeStory(
        node=nominee.node.node,
        state=nominee.node.state.name.lower(),
        verdict=verdict,
        plane=figures.plane,
        same_host=figures.same_host,
        first_byte_s=figures.first_byte_s,
        bytes_per_s=figures.path.bytes_per_s,
        queued_bytes=figures.queued_bytes,
        claims=int(np.count_nonzero(nominee.claimed)),
        **details,
    )


def runs_of(positions: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(first, count) of consecutive ascending positions."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and position == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((position, 1))
    return tuple(runs)
