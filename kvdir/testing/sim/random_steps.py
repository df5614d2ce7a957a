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
    "store": 20, "remove": 12, "clear": 3, "lose": 3, "bus": 2, "garbage": 2, "advance": 30, "network": 2, "repeat": 3,
    "drop": 4, "cut": 4, "partition": 2, "rejoin": 3, "restart": 3, "twice": 1, "kill": 1, "leave": 1, "clock": 1,
    "coordinator": 3, "ghost": 2, "echo": 1, "read": 4, "accuse": 2, "reconcile": 2,
}  # fmt: skip


def random_steps(rng: random.Random, count: int) -> list[Step]:
    """At least `count` steps."""
    verbs, weights = list(WEIGHTS), list(WEIGHTS.values())
    steps: list[Step] = []
    while len(steps) < count:
        if rng.random() < COURSE_SHARE:
            steps += [Step.parse(line) for line in rng.choice(_COURSES)(rng).split(";")]
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
    "network": lambda rng: tuple(map(rng.choice, (["0", "0", "0.1", "0.5"], ["0", "0.2"], ["0", "0.1", "0.5"]))),
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
    "coordinator": lambda rng: (rng.choice(["restarts", "warm", "saves", "dies", "vanishes"]),),
    "ghost": lambda rng: (_node(rng),),
    "echo": lambda rng: (_node(rng),),
    "read": lambda rng: (str(rng.randrange(2)), _blocks(rng), rng.choice(_DELAYS)),
    "accuse": lambda rng: (*_place(rng), _blocks(rng), rng.choice(_DELAYS)),
    "reconcile": lambda rng: (_node(rng),),
}


# -- courses of events: steps with semicolons between them ----------------------------------------------------------------


def _feedback_of_an_earlier_life(rng: random.Random) -> str:
    place, blocks = " ".join(_place(rng)), _blocks(rng)
    return (
        f"store {place} {blocks}; accuse {place} {blocks} 0.6; restart {place[0]} {rng.choice(['kept', 'empty'])};"
        f"store {place} {blocks}; advance 1"
    )


def _feedback_older_than_a_restatement(rng: random.Random) -> str:
    place, blocks = " ".join(_place(rng)), _blocks(rng)
    return (
        f"remove {place} {blocks}; advance 0.3; accuse {place} {blocks} 3;"
        f"{rng.choice(['lose', 'bus'])} {place} stored {blocks}; advance 3; advance 0.3"
    )


def _an_event_again_after_its_opposite(rng: random.Random) -> str:
    place, block = " ".join(_place(rng)), rng.randrange(BLOCKS)
    first, then = rng.choice([("store", "remove"), ("remove", "store")])
    again = "; ".join(f"repeat {place[0]} {number}" for number in rng.sample(range(16), 5))
    return f"{first} {place} {block}; advance 0.05; {then} {place} {block}; advance 0.05; {again}; advance 0.1"


def _a_partition_and_a_late_past(rng: random.Random) -> str:
    place = " ".join(_place(rng))
    return (
        f"partition {place[0]}; store {place} {_blocks(rng)}; advance {rng.choice(['0.3', '3'])};"
        f"cut {place[0]} {rng.choice(['0.05', '0.5'])}; rejoin {place[0]}; remove {place} {_blocks(rng)};"
        f"advance {rng.choice(['0.1', '1'])}"
    )


def _a_chain_loses_its_root(rng: random.Random) -> str:
    place = " ".join(_place(rng))
    return (
        f"store {place} {_CHAIN}; remove {place} 0; advance {rng.choice(_SECONDS)};"
        f"store {place} 0; store {place} {_CHAIN}; advance 0.1"
    )


def _a_restatement_is_broken_off(rng: random.Random) -> str:
    place = " ".join(_place(rng))
    node = place[0]
    mishap = rng.choice(
        [f"cut {node} 0.05", f"restart {node} kept", "coordinator restarts", f"drop {node} 2", f"lose {place} stored 1"]
    )
    return (
        f"reconcile {node}; store {place} {_blocks(rng)}; advance {rng.choice(['0.1', '0.1', '0.3'])}; {mishap};"
        f"remove {place} {_blocks(rng)}; advance {rng.choice(_SECONDS)}"
    )


def _a_warm_start(rng: random.Random) -> str:
    place = " ".join(_place(rng))
    node = place[0]
    between = rng.choice([f"restart {node} kept", f"restart {node} empty", f"lose {place} stored 1", f"kill {node}"])
    return (
        f"store {place} {_blocks(rng)}; advance 0.3; coordinator saves;"
        f"store {place} {_blocks(rng)}; remove {place} {_blocks(rng)}; {between};"
        f"coordinator warm; advance {rng.choice(_SECONDS)}; read {place[-1]} {_CHAIN} 0"
    )


def _two_starts_at_once(rng: random.Random) -> str:
    place = " ".join(_place(rng))
    return (
        f"twice {place[0]}; store {place} {_blocks(rng)}; advance {rng.choice(['0.01', '0.1'])}; twice {place[0]};"
        f"store {place} {_blocks(rng)}; advance {rng.choice(['0.1', '1'])}; ghost {place[0]}; echo {place[0]}; advance 0.1"
    )


def _losses_that_cancel_out(rng: random.Random) -> str:
    """As many blocks come as go, so no count tells."""
    place, (old, new) = " ".join(_place(rng)), rng.sample(range(BLOCKS), 2)
    lost = rng.choice(["lose", "bus", "lose"])
    going = f"accuse {place} {old} 0; advance 0.01" if rng.random() < 0.3 else f"{lost} {place} removed {old}"
    return (
        f"store {place} {old}; remove {place} {new}; advance 0.6; {going}; {lost} {place} stored {new};"
        f"advance {rng.choice(['0.1', '0.6', '3'])}"
    )


def _a_tier_is_emptied_unheard(rng: random.Random) -> str:
    place = " ".join(_place(rng))
    return (
        f"store {place} {_blocks(rng)}; advance 0.6; {rng.choice(['lose', 'bus'])} {place} removed {_CHAIN};"
        f"advance {rng.choice(['0.1', '0.6', '3'])}"
    )


def _a_gap_while_others_press(rng: random.Random) -> str:
    """With a bound, what was heard beyond the gap is evicted before the gap is closed."""
    place, other = " ".join(_place(rng)), " ".join(_place(rng))
    lost = rng.choice([f"drop {place[0]} 1; store {place} {_blocks(rng)}", f"lose {place} stored {_blocks(rng)}"])
    return (
        f"store {place} {_blocks(rng)}; advance 0.6; {lost}; store {place} {_blocks(rng)}; advance 0.01;"
        f"store {other} {_CHAIN}; remove {place} {_blocks(rng)}; advance {rng.choice(['0.01', '0.1', '0.6'])};"
        f"remove {other} {_blocks(rng)}; advance 0.6"
    )


_CHAIN = ",".join(map(str, range(BLOCKS)))

_COURSES: tuple[Callable[[random.Random], str], ...] = (
    _feedback_of_an_earlier_life,
    _feedback_older_than_a_restatement,
    _an_event_again_after_its_opposite,
    _a_partition_and_a_late_past,
    _a_chain_loses_its_root,
    _a_restatement_is_broken_off,
    _two_starts_at_once,
    _a_warm_start,
    _losses_that_cancel_out,
    _a_tier_is_emptied_unheard,
    _a_gap_while_others_press,
)
