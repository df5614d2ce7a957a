"""A story: what happens to a simulated cluster, step by step, as text that can be kept, shrunk and told again.

    cluster nodes=2 seed=7 ring_events=8
    store 0 cpu 0 1,2
    partition 0
    advance 0.5
    restart 0 empty

Rules: one step a line; a step makes sense in every state (what does not apply does nothing), so any part of a story is a story;
node numbers wrap round. With several coordinators, `at 1` says that what follows befalls number 1 and its connections (0
before the first `at`). After the last step the network heals, and everything must settle. `#` begins a comment. What a step
does is said at its function in steps.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from kvdir.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Step:
    """verb: names a function in steps.py. args: its arguments, as text."""

    verb: str
    args: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.verb, *self.args))

    @classmethod
    def parse(cls, line: str) -> Self:
        verb, *args = line.split()
        return cls(verb, tuple(args))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The cluster of a story.

    sketch_cells: 0 for agents that keep no sketches. loss, duplicates: shares of messages. jitter_s: of their delay. index:
    native or reference. max_blocks: bound of the index; 0: none.
    """

    nodes: int = 3
    coordinators: int = 1
    seed: int = 0
    namespaces: int = 1
    ring_events: int = 65_536
    sketch_cells: int = 64
    chunk_blocks: int = 8_192
    credit_events: int = 8_192
    loss: float = 0.0
    duplicates: float = 0.0
    jitter_s: float = 0.0
    index: str = "native"
    max_blocks: int = 0

    def __str__(self) -> str:
        values = ((item.name, getattr(self, item.name), item.default) for item in dataclasses.fields(self))
        return " ".join(["cluster", *(f"{name}={value}" for name, value, default in values if value != default)])


@dataclass(frozen=True, slots=True)
class Story:
    """See the module docstring."""

    setup: Setup
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, (self.setup, *self.steps)))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises InvalidInput with the line that is wrong."""
        setup, steps = Setup(), []
        for line in text.splitlines():
            words = line.partition("#")[0].split()
            if not words:
                continue
            if words[0] == "cluster":
                setup = _setup(words[1:], line)
            else:
                steps.append(Step.parse(" ".join(words)))
        return cls(setup, tuple(steps))

    def with_steps(self, steps: Iterable[Step]) -> Story:
        """The same cluster, another course of events."""
        return Story(self.setup, tuple(steps))


def _setup(words: list[str], line: str) -> Setup:
    kinds: dict[str, Any] = {item.name: type(item.default) for item in dataclasses.fields(Setup)}
    values: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            values[name] = kinds[name](value)
        except (KeyError, ValueError):
            raise InvalidInput(f"{line!r}: {word!r} is not one of {', '.join(kinds)}, each with =VALUE") from None
    return Setup(**values)
