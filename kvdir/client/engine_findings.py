"""What stands between an engine's events and the directory, as people should hear it: each finding with its fix.

Rules: a finding is in the log once, and again only after it had gone or when its words are others; it is in metrics by kind, in
words wherever streams are listed, and a value for the doctor. Does not: decide what an engine's figures are worth (its doubt
does).
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

from kvdir.obs.logs import say

log = logging.getLogger("kvdir.engines")


class FindingKind(enum.StrEnum):
    """By what is wrong."""

    DISCOVERY = "discovery"
    NOBODY = "nobody_serves"
    SILENT = "no_events"
    LOST = "lost_events"
    REJECTED = "rejected_events"
    PROBE = "hash_mismatch"
    BLOCK_SIZE = "block_size"
    ADAPTER = "lora_without_name"
    SALT = "salt_missing"
    RANK = "rank"
    FENCED = "fenced"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """stream: its name in the directory. words: what was seen, what it means, and the fix. count: how often. since_s:
    monotonic.
    """

    stream: str
    kind: FindingKind
    words: str
    since_s: float
    count: int = 1


class Findings:
    """Of one stream."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._found: dict[FindingKind, Finding] = {}

    def found(self, kind: FindingKind, words: str, *, now_s: float, count: int = 1) -> None:
        """It is so now."""
        before = self._found.get(kind)
        if before is not None and before.words == words:
            self._found[kind] = Finding(self._stream, kind, words, before.since_s, before.count + count)
            return
        self._found[kind] = Finding(self._stream, kind, words, now_s, count)
        say(log, logging.WARNING, "engine stream", stream=self._stream, finding=kind, words=words)

    def gone(self, *kinds: FindingKind) -> None:
        """It is so no more."""
        for kind in kinds:
            if self._found.pop(kind, None) is not None:
                say(log, logging.INFO, "engine stream is well again", stream=self._stream, finding=kind)

    @property
    def all(self) -> tuple[Finding, ...]:
        return tuple(self._found.values())
