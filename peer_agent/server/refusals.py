"""Engines that were not let in, and why: for `peer-agent inventory` and the doctor, since an engine goes on without its agent.

Rules: bounded; an engine that is let in under the same name is forgotten here. Times are time.monotonic(), given.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_ENGINES = 16
"""Names that are remembered; the one refused longest ago goes."""

FORGET_S = 3600.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """engine: as it names itself. words: why, with the fix. at_s: the last time. times: in a row, for this reason."""

    engine: str
    words: str
    at_s: float
    times: int = 1


class Refusals:
    """See the module docstring."""

    def __init__(self) -> None:
        self._by_engine: OrderedDict[str, Refusal] = OrderedDict()

    def refused(self, engine: str, words: str, *, now_s: float) -> bool:
        """Returns whether that is news: an engine tries again and again."""
        before = self._by_engine.pop(engine, None)
        same = before is not None and before.words == words
        self._by_engine[engine] = Refusal(engine, words, now_s, before.times + 1 if before is not None and same else 1)
        if len(self._by_engine) > MAX_ENGINES:
            self._by_engine.popitem(last=False)
        return not same

    def admitted(self, engine: str) -> None:
        self._by_engine.pop(engine, None)

    def recent(self, *, now_s: float) -> list[Refusal]:
        """Of the last FORGET_S, the newest last."""
        return [item for item in self._by_engine.values() if now_s - item.at_s <= FORGET_S]
