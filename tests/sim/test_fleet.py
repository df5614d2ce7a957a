"""A small fleet with all that befalls the large one (bench/fleet.py): trusted figures are true, and all is right at the end."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvdir.index import LEAST_MAX_BYTES
from kvdir.testing.fleet import Fleet
from kvdir.testing.fleet_faults import enter_faults
from kvdir.testing.fleet_requests import fleet_requests
from kvdir.testing.fleet_results import FleetOutcome, FleetSetup

TRACE = Path(__file__).parents[2] / "peer_agent" / "demo" / "conversation_1000.jsonl.gz"
SMALL = FleetSetup(nodes=100, duration_s=40.0, tick_s=0.1, cut_s=8.0, restarts=0.3, kills=0.1, leaves=0.05, explain=True)


def run(setup: FleetSetup, *, rounds: int = 1) -> FleetOutcome:
    fleet = Fleet(setup)
    enter_faults(fleet)
    return fleet.run(fleet_requests(TRACE, setup, rounds=rounds))


def converged(outcome: FleetOutcome) -> None:
    assert outcome.trust_checks > 1000
    assert (outcome.trust_violations, outcome.violations) == (0, [])
    assert outcome.settle_s is not None
    assert outcome.settle_s < 20
    assert outcome.differences == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_fleet_converges_and_never_trusts_what_is_wrong_when_nodes_and_coordinators_come_and_go(seed: int) -> None:
    outcome = run(dataclasses.replace(SMALL, seed=seed))
    converged(outcome)
    reads = outcome.reads
    assert reads.requests == 1000
    assert reads.hit_local + reads.hit_peer + reads.recomputed == reads.blocks
    assert reads.hit_peer > reads.blocks // 10
    assert outcome.failed_lookups == 0
    assert reads.messages_lost > 0
    assert outcome.messages_cut > 0
    assert all(outcome.repairs[kind].done for kind in ("replay", "snapshot"))
    states = [sample.states for sample in outcome.timeline]
    assert any(state["unknown"] for state in states)
    assert any(state["stale"] for state in states)
    assert states[-1]["synced"] == sum(states[-1].values())


def test_fleet_converges_when_the_index_of_every_coordinator_is_much_too_small() -> None:
    outcome = run(dataclasses.replace(SMALL, max_index_bytes=LEAST_MAX_BYTES, loss=0.2))
    converged(outcome)
    assert outcome.evicted_blocks > 10_000
    asked = sum(cost.asked for cost in outcome.repairs.values())
    assert asked < 20 * SMALL.nodes, "repairs loop"
    assert max(sample.index_blocks for sample in outcome.timeline) < 4000


def test_runs_are_equal_when_seeds_are() -> None:
    setup = FleetSetup(nodes=20, duration_s=15.0, tick_s=0.1, cut_s=2.0, restarts=0.5)
    assert run(setup) == run(setup)
    assert run(setup) != run(dataclasses.replace(setup, seed=1))
