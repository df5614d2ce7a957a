"""Chooses steps at random: single ones by weight, and now and then a short course of events that single ones meet too rarely.

Pure: everything comes from the generator that is handed in. Few blocks and few nodes, so that steps meet.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kvdir.testing.sim.story import Step

BLOCKS = 8
NODES = 4
COURSE_SHARE = 0.06

WEIGHTS = {
    "store": 20, "remove": 12, "clear": 3, "lose": 3, "bus": 2, "garbage": 2, "advance": 30, "network": 2, "repeat": 3, "drop": 4,
    "cut": 4, "partition": 2, "rejoin": 3, "restart": 3, "twice": 1, "kill": 1, "leave": 1, "clock": 1, "coordinator": 2,
    "ghost": 2, "echo": 1, "read": 4, "accuse": 2, "reconcile": 2,
}  # fmt: skip


def random_steps(rng: random.Random, count: int) -> list[Step]:
    """At least `count` steps."""
    verbs, weights = list(WEIGHTS), list(WEIGHTS.values())
    steps: list[Step] = []
    while len(steps) < count:
        if rng.random() < COURSE_SHARE:
            course = rng.choice(_COURSES)
            steps += [Step.parse(line) for line in course(rng)]
        else:
            (verb,) = rng.choices(verbs, weights)
            steps.append(Step(verb, tuple(_ARGUMENTS[verb](rng))))
    return steps


# -- arguments -------------------------------------------------------------------------------------------------------------


def _node(rng: random.Random) -> str:
    return str(rng.randrange(NODES))


def _place(rng: random.Random) -> tuple[str, str, str]:
    return _node(rng), rng.choice(["cpu", "cpu", "disk"]), str(rng.randrange(2))


def _blocks(rng: random.Random) -> str:
    return ",".join(map(str, sorted(rng.sample(range(BLOCKS), rng.choice([1, 1, 2, 4])))))


def _stored_or_removed(rng: random.Random) -> tuple[str, ...]:
    return *_place(rng), rng.choice(["stored", "removed"]), _blocks(rng)


def _clear(rng: random.Random) -> tuple[str, ...]:
    node, tier, namespace = _place(rng)
    return node, tier, rng.choice([namespace, "all"])


_DELAYS = ("0", "0", "0.3", "3")
_SECONDS = ("0.01", "0.05", "0.1", "0.1", "0.3", "0.6", "1", "3")
_GARBAGE = ("kind", "tier", "namespace", "width", "epoch", "zero", "chunk", "nothing")

_ARGUMENTS: dict[str, Callable[[random.Random], tuple[str, ...]]] = {
    "store": lambda rng: (*_place(rng), _blocks(rng)),
    "remove": lambda rng: (*_place(rng), _blocks(rng)),
    "clear": _clear,
    "lose": _stored_or_removed,
    "bus": _stored_or_removed,
    "garbage": lambda rng: (_node(rng), rng.choice(_GARBAGE)),
    "advance": lambda rng: (rng.choice(_SECONDS),),
    "network": lambda rng: (rng.choice(["0", "0", "0.1", "0.5"]), rng.choice(["0", "0.2"]), rng.choice(["0", "0.1", "0.5"])),
    "repeat": lambda rng: (_node(rng), str(rng.randrange(16))),
    "drop": lambda rng: (_node(rng), rng.choice(["1", "2", "5"])),
    "cut": lambda rng: (_node(rng), rng.choice(["0", "0.05", "0.5"])),
    "partition": lambda rng: (_node(rng),),
    "rejoin": lambda rng: (_node(rng),),
    "restart": lambda rng: (_node(rng), rng.choice(["kept", "empty"])),
    "twice": lambda rng: (_node(rng),),
    "kill": lambda rng: (_node(rng),),
    "leave": lambda rng: (_node(rng),),
    "clock": lambda rng: (_node(rng), rng.choice(["-86400", "-1", "3600"])),
    "coordinator": lambda rng: (rng.choice(["restarts", "restarts", "dies", "vanishes"]),),
    "ghost": lambda rng: (_node(rng),),
    "echo": lambda rng: (_node(rng),),
    "read": lambda rng: (str(rng.randrange(2)), _blocks(rng), rng.choice(_DELAYS)),
    "accuse": lambda rng: (*_place(rng), _blocks(rng), rng.choice(_DELAYS)),
    "reconcile": lambda rng: (_node(rng),),
}


# -- courses of events -----------------------------------------------------------------------------------------------------


def _feedback_of_an_earlier_life(rng: random.Random) -> list[str]:
    node, tier, namespace = _place(rng)
    blocks = _blocks(rng)
    return [
        f"store {node} {tier} {namespace} {blocks}", f"accuse {node} {tier} {namespace} {blocks} 0.6",
        f"restart {node} {rng.choice(['kept', 'empty'])}", f"store {node} {tier} {namespace} {blocks}", "advance 1",
    ]  # fmt: skip


def _feedback_older_than_a_restatement(rng: random.Random) -> list[str]:
    node, tier, namespace = _place(rng)
    blocks = _blocks(rng)
    return [
        f"remove {node} {tier} {namespace} {blocks}", "advance 0.3", f"accuse {node} {tier} {namespace} {blocks} 3",
        f"{rng.choice(['lose', 'bus'])} {node} {tier} {namespace} stored {blocks}", "advance 3", "advance 0.3",
    ]  # fmt: skip


def _an_event_again_after_its_opposite(rng: random.Random) -> list[str]:
    node, tier, namespace = _place(rng)
    block = str(rng.randrange(BLOCKS))
    first, then = rng.choice([("store", "remove"), ("remove", "store")])
    again = [f"repeat {node} {number}" for number in range(16)]
    return [
        f"{first} {node} {tier} {namespace} {block}", "advance 0.05", f"{then} {node} {tier} {namespace} {block}", "advance 0.05",
        *rng.sample(again, 5), "advance 0.1",
    ]  # fmt: skip


def _a_partition_and_a_late_past(rng: random.Random) -> list[str]:
    node, tier, namespace = _place(rng)
    return [
        f"partition {node}", f"store {node} {tier} {namespace} {_blocks(rng)}", f"advance {rng.choice(['0.3', '3'])}",
        f"cut {node} {rng.choice(['0.05', '0.5'])}", f"rejoin {node}", f"remove {node} {tier} {namespace} {_blocks(rng)}",
        f"advance {rng.choice(['0.1', '1'])}",
    ]  # fmt: skip


def _a_chain_loses_its_root(rng: random.Random) -> list[str]:
    node, tier, namespace = _place(rng)
    chain = ",".join(map(str, range(BLOCKS)))
    return [
        f"store {node} {tier} {namespace} {chain}", f"remove {node} {tier} {namespace} 0", f"advance {rng.choice(_SECONDS)}",
        f"store {node} {tier} {namespace} 0", f"store {node} {tier} {namespace} {chain}", "advance 0.1",
    ]  # fmt: skip


def _a_restatement_is_broken_off(rng: random.Random) -> list[str]:
    node, tier, namespace = _place(rng)
    return [
        f"reconcile {node}", f"store {node} {tier} {namespace} {_blocks(rng)}", f"advance {rng.choice(['0.1', '0.1', '0.3'])}",
        rng.choice([f"cut {node} 0.05", f"restart {node} kept", "coordinator restarts", f"drop {node} 2", f"lose {node} cpu 0 stored 1"]),
        f"remove {node} {tier} {namespace} {_blocks(rng)}", f"advance {rng.choice(_SECONDS)}",
    ]  # fmt: skip


def _two_starts_at_once(rng: random.Random) -> list[str]:
    node, tier, namespace = _place(rng)
    return [
        f"twice {node}", f"store {node} {tier} {namespace} {_blocks(rng)}", f"advance {rng.choice(['0.01', '0.1'])}", f"twice {node}",
        f"store {node} {tier} {namespace} {_blocks(rng)}", f"advance {rng.choice(['0.1', '1'])}", f"ghost {node}", f"echo {node}",
        "advance 0.1",
    ]  # fmt: skip


_COURSES = (
    _feedback_of_an_earlier_life,
    _feedback_older_than_a_restatement,
    _an_event_again_after_its_opposite,
    _a_partition_and_a_late_past,
    _a_chain_loses_its_root,
    _a_restatement_is_broken_off,
    _two_starts_at_once,
)
