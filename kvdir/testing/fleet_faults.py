"""What goes wrong in a simulated fleet, and when: a plan out of the setup's shares and its seed, entered into its agenda.

All faults are over, or left to `Fleet.run` to heal, before the end: nothing here waits for anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvdir.testing.fleet import Fleet

FIRST, LAST = 0.15, 0.85  # of the duration: between these nodes come and go
CUT_AT, LOSS_AT, HALF_CUT_AT, RESTART_AT = 0.25, 0.4, 0.55, 0.7
LOSS_FOR = 0.1


def enter_faults(fleet: Fleet) -> None:
    """Nodes join in the ramp; the rest is spread over the time behind it."""
    setup, rng, later = fleet.setup, fleet.rng, fleet.agenda.later
    names = [f"node-{number:05d}" for number in range(setup.nodes)]
    for number, name in enumerate(names):
        later(setup.ramp_s * number / len(names), partial(fleet.start_node, name))
    joining = [f"late-{number:05d}" for number in range(round(setup.joins * setup.nodes))]
    for count, action in (
        (round(setup.restarts * setup.nodes), partial(_restart, fleet)),
        (round(setup.kills * setup.nodes), partial(_kill, fleet)),
        (round(setup.leaves * setup.nodes), partial(_leave, fleet)),
    ):
        for _ in range(count):
            later(_moment(fleet, rng.uniform(FIRST, LAST)), action)
    for name in joining:
        later(_moment(fleet, rng.uniform(FIRST, LAST)), partial(fleet.start_node, name))
    fleet.note(f"{len(names)} nodes join; {len(joining)} more, and restarts, kills and leaves, all along")
    later(_moment(fleet, CUT_AT), partial(_cut, fleet, setup.cut_share, 0, setup.cut_s))
    later(_moment(fleet, HALF_CUT_AT), partial(_cut, fleet, 0.5, setup.coordinators - 1, setup.cut_s / 2))
    later(_moment(fleet, LOSS_AT), partial(_lose, fleet, setup.loss))
    later(_moment(fleet, LOSS_AT + LOSS_FOR), partial(_lose, fleet, 0.0))
    later(_moment(fleet, RESTART_AT), partial(_coordinator_restarts, fleet, 1 % setup.coordinators))


def _moment(fleet: Fleet, share: float) -> float:
    setup = fleet.setup
    return setup.ramp_s + share * (setup.duration_s - setup.ramp_s)


def _pick(fleet: Fleet) -> str | None:
    live = fleet.live()
    return fleet.rng.choice(live).name if len(live) > 2 else None


def _restart(fleet: Fleet) -> None:
    name = _pick(fleet)
    if name is not None:
        fleet.stop_node(name, silently=fleet.rng.random() < 0.5)
        fleet.agenda.later(fleet.setup.restart_s, partial(fleet.start_node, name))


def _kill(fleet: Fleet) -> None:
    name = _pick(fleet)
    if name is not None:
        fleet.stop_node(name, silently=fleet.rng.random() < 0.5)


def _leave(fleet: Fleet) -> None:
    name = _pick(fleet)
    if name is not None:
        fleet.stop_node(name, politely=True)


def _cut(fleet: Fleet, share: float, number: int, seconds: float) -> None:
    live = fleet.live()
    cut = fleet.rng.sample(live, min(len(live), round(share * len(live))))
    fleet.note(f"{len(cut)} nodes cut off from coordinator {number} for {seconds:g} s")
    mends: list[Callable[[], None]] = []
    for node in cut:
        fleet.cut(node, number)
        mends.append(partial(fleet.mend, node, number))
    fleet.agenda.later(seconds, lambda: [mend() for mend in mends])


def _lose(fleet: Fleet, share: float) -> None:
    fleet.loss = share
    fleet.note(f"{share:.0%} of messages lost" if share else "no message lost any more")


def _coordinator_restarts(fleet: Fleet, number: int) -> None:
    fleet.note(f"coordinator {number} dies, back with nothing after {fleet.setup.coordinator_down_s:g} s")
    fleet.stop_coordinator(number)
    fleet.agenda.later(fleet.setup.coordinator_down_s, partial(fleet.start_coordinator, number))
