"""LocalCluster as a tool for tests: it behaves as its docstring says, and it notices what it promises to notice."""

from __future__ import annotations

import asyncio

import pytest

from kvdir.core.ingest import Ingest
from kvdir.errors import InvalidInput, UntrustedView
from kvdir.location import StreamState, Tier
from kvdir.testing import LocalCluster, ManualClock
from kvdir.testing.sim.invariants import Violation
from kvdir.testing.sim.loop import SimulatedLoop, Standstill


def test_usage_is_untrusted_until_the_loss_is_repaired() -> None:
    with LocalCluster(nodes=3, seed=7) as cluster:
        cluster.settle()
        cluster.network.drop_events(1, share=1.0)
        cluster.node(1).store(range(100))
        cluster.advance(1.1)
        with pytest.raises(UntrustedView, match="missing"):
            cluster.directory.blocks(1).require_trusted()
        assert cluster.directory.trust(1).missing_events == 1
        cluster.network.heal()
        cluster.settle()
        assert cluster.directory.blocks(1).require_trusted() == 100
        assert cluster.reconcile(1).state is StreamState.SYNCED


def test_lookup_names_holders_when_nodes_have_stored() -> None:
    with LocalCluster(nodes=2, namespaces=2) as cluster:
        cluster.node(0).store([1, 2])
        cluster.node(1).store([2, 3], tier=Tier.DISK)
        cluster.node(1).store([1], namespace=1)
        cluster.settle()
        assert cluster.directory.holders([1, 2, 3, 4]) == [{"node-0"}, {"node-0", "node-1"}, {"node-1"}, set()]
        assert cluster.directory.lookup([1, 2, 4], prefix=True).hits == 2
        cluster.node(0).remove([1])
        cluster.node(1).clear()
        cluster.settle()
        assert cluster.directory.holders([1, 2]) == [set(), {"node-0", "node-1"}]
        assert cluster.directory.holders([1], namespace=1) == [set()]


def test_figures_are_equal_when_the_index_is_the_oracle() -> None:
    def run(index: str) -> tuple[object, int]:
        with LocalCluster(nodes=2, seed=3, index="reference" if index == "reference" else "native") as cluster:
            cluster.node(0).store(range(10))
            cluster.node(0).remove([3, 4])
            cluster.settle()
            return cluster.directory.claims(0), cluster.network.digest

    assert run("native") == run("reference")


def test_wrong_belief_is_noticed_when_a_removal_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ingest, "_remove", lambda *_: None)
    with LocalCluster(nodes=1) as cluster:
        cluster.node(0).store([1, 2])
        cluster.settle()
        cluster.node(0).remove([1])
        with pytest.raises(Violation, match="trusted figure 2 at event 2, its owner held 1"):
            cluster.advance(1)


def test_settling_says_what_is_missing_when_it_fails() -> None:
    with LocalCluster(nodes=2) as cluster:
        cluster.network.partition(1)
        with pytest.raises(Violation, match="node-1 is not known"):
            cluster.settle(heartbeats=3)
        cluster.network.heal()
        cluster.settle()


def test_unknown_node_is_an_error_when_asked_about() -> None:
    with LocalCluster(nodes=1) as cluster:
        with pytest.raises(KeyError, match="node-9"):
            cluster.directory.trust(9)
        with pytest.raises(InvalidInput, match="no live node"):
            cluster.reconcile(9)


def test_standstill_is_reported_when_a_task_spins() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110 (the fault that is looked for)
            await asyncio.sleep(0)

    loop = SimulatedLoop(ManualClock())
    with pytest.raises(Standstill, match="spins"):
        loop.run_until_complete(spin())
    loop.shut()


def test_standstill_is_reported_when_everything_waits_for_ever() -> None:
    loop = SimulatedLoop(ManualClock())
    with pytest.raises(Standstill, match="no deadline"):
        loop.run_until_complete(loop.create_future())
    loop.shut()
