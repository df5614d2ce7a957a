"""Every interleaving of some actors' scripts over a lease world: a small explicit-state model checker.

Depth first over copies of the world. A state that was reached before by other steps is not followed again, because what
follows depends on the state alone. In every state the world is checked, and at every end nothing may be left.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

from kvdir.errors import InvalidInput
from peer_agent.testing.lease_world import Violation, World


@dataclass(frozen=True, slots=True)
class Explored:
    """states: different ones. ends: of those, where everybody has finished. accepted: steps in which a read was accepted."""

    states: int
    ends: int
    accepted: int


def explore(world: World, *, max_states: int = 200_000) -> Explored:
    """Runs every interleaving of the actors' scripts. Raises Violation with the steps; ValueError beyond max_states."""
    seen: set[int] = set()
    pending: list[tuple[bytes, tuple[str, ...]]] = [(pickle.dumps(world), ())]
    ends = accepted = 0
    while pending:
        packed, path = pending.pop()
        here: World = pickle.loads(packed)
        ready = [at for at, actor in enumerate(here.actors) if not actor.done]
        if not ready:
            _run(here.finish, path, "the end")
            ends += 1
        for at in ready:
            after: World = pickle.loads(packed)
            actor = after.actors[at]
            name = f"{type(actor).__name__} {actor.number} step {actor.at}"
            _run(partial(after.step, actor), path, name)
            accepted, after.accepted = accepted + after.accepted, 0
            key = hash(_key(after))
            if key in seen:
                continue
            seen.add(key)
            if len(seen) > max_states:
                raise ValueError(f"more than {max_states} states: make the scripts shorter")
            _run(after.check, path, name)
            pending.append((pickle.dumps(after), (*path, name)))
    return Explored(len(seen), ends, accepted)


def _run(act: Callable[[], Any], path: Sequence[str], name: str) -> None:
    try:
        act()
    except (AssertionError, InvalidInput, ValueError, OverflowError, KeyError) as error:
        raise Violation(f"{error}\n  after: {'; '.join(path)}; then {name}") from error


def _key(world: World) -> bytes:
    """Equal keys mean equal states. Some equal states have different keys, which only costs time."""
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.fast = True  # no back references: they would tell by which way the state was reached
    pickler.dump(world)
    return buffer.getvalue()
