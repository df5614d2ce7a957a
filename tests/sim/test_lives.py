"""Restarts, fences and the past that turns up late: what others get wrong (issue list), on the simulated cluster.

Every step is also checked against the owners' truth by the cluster itself.
"""

from __future__ import annotations

import pytest

from kvdir.location import StreamState
from kvdir.testing import LocalCluster
from kvdir.testing.sim.steps import echo, garbage, ghost


def test_new_life_counts_and_old_one_is_gone_when_an_agent_is_reborn_at_the_same_address() -> None:
    with LocalCluster(nodes=2, seed=1) as cluster:
        for block in range(20):
            cluster.node(0).store([block])
        cluster.settle()
        old = cluster.directory.trust(0)
        life = cluster.node(0).restart()  # numbers start at 1 again, below the 20 of the old life
        cluster.node(0).store([5, 100])
        cluster.settle()
        new = cluster.directory.trust(0)
        assert (new.peer_address, new.epoch) == (old.peer_address, life.epoch)
        assert new.epoch != old.epoch
        assert cluster.directory.holders([4, 5, 100]) == [set(), {"node-0"}, {"node-0"}]
        assert cluster.directory.blocks(0).require_trusted() == 2


def test_blocks_stay_when_the_arena_survives_a_restart() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.node(0).store(range(10))
        cluster.settle()
        cluster.node(0).restart(keep=True)
        cluster.settle()
        assert cluster.directory.holders(range(10)) == [{"node-0"}] * 10


@pytest.mark.parametrize("offset_s", [-86_400.0, 86_400.0])
def test_newest_registration_wins_when_the_wall_clock_steps(offset_s: float) -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.node(0).store([1])
        cluster.settle()
        cluster.node(0).clock_offset_s = offset_s
        life = cluster.node(0).restart()
        cluster.node(0).store([2])
        cluster.settle()
        assert cluster.directory.trust(0).epoch == life.epoch
        assert cluster.directory.holders([1, 2]) == [set(), {"node-0"}]


def test_one_process_publishes_when_two_start_in_one_second() -> None:
    with LocalCluster(nodes=1, seed=5) as cluster:
        first = cluster.node(0).life
        second = cluster.node(0).start_twice()
        cluster.node(0).store([7])
        cluster.settle()
        winner = cluster.directory.trust(0).epoch
        (loser,) = {first, second} - {cluster.node(0).life_of(winner)}
        assert "two agents have this name" in loser.fenced
        cluster.advance(30)  # and they do not take turns
        assert cluster.directory.trust(0).epoch == winner
        assert cluster.network.sent["node-0", "hello"] <= 3


def test_successor_keeps_the_name_when_its_predecessor_leaves_late() -> None:
    """The predecessor is told to leave while it still tries to connect: it must not fence the one that has taken over."""
    for pause_s in (0.01, 0.05, 0.1, 0.13, 0.2):
        with LocalCluster(nodes=1, seed=2) as cluster:
            cluster.network.partition(0)
            cluster.advance(0.03)
            cluster.node(0).leave()
            successor = cluster.node(0).start_twice()
            cluster.advance(pause_s)
            cluster.network.rejoin(0)
            cluster.settle()
            assert cluster.directory.trust(0).epoch == successor.epoch


def test_nothing_changes_when_a_former_life_speaks_again() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.node(0).store([1, 2, 3])
        cluster.settle()
        cluster.node(0).restart()
        cluster.node(0).store([3, 4])
        cluster.settle()
        before = cluster.directory.claims(0)
        ghost(cluster, "0")  # a whole call of the old life, from hello to goodbye
        echo(cluster, "0")  # and the same messages inside the call of the new one
        cluster.advance(0.1)
        assert cluster.directory.claims(0) == before
        assert cluster.directory.core.ingest.rejected["wrong-epoch"] > 0
        cluster.settle(heartbeats=0)


def test_nothing_changes_when_feedback_is_about_a_former_life() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.node(0).store([1, 2])
        cluster.settle()
        cluster.report_absent(0, [1, 2], delay_s=0.5)  # under the old epoch, on its way for half a second
        cluster.node(0).restart(keep=True)
        cluster.advance(1)
        assert cluster.directory.core.counters.stale_reports_ignored == 1
        assert cluster.directory.holders([1, 2]) == [{"node-0"}] * 2
        cluster.settle(heartbeats=2)


def test_later_store_stands_when_feedback_is_older() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.settle()
        cluster.report_absent(0, [1], delay_s=0.5)  # true when the owner said it
        cluster.node(0).store([1])
        cluster.advance(1)
        assert cluster.directory.holders([1]) == [{"node-0"}]
        assert cluster.directory.blocks(0).require_trusted() == 1


def test_hint_goes_at_once_and_the_figure_is_doubted_when_feedback_is_accepted() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.node(0).store([1, 2])
        cluster.settle()
        cluster.report_absent(0, [1])  # a lie: the owner holds it
        cluster.advance(0.01)
        assert cluster.directory.holders([1, 2]) == [set(), {"node-0"}]
        assert not cluster.directory.blocks(0).trusted
        cluster.settle()
        assert cluster.directory.holders([1, 2]) == [{"node-0"}] * 2


def test_blocks_vanish_at_once_when_an_agent_leaves() -> None:
    with LocalCluster(nodes=2) as cluster:
        cluster.node(0).store([1])
        cluster.node(1).store([1])
        cluster.settle()
        cluster.node(0).leave()
        cluster.advance(0.1)
        assert cluster.directory.holders([1]) == [{"node-1"}]
        assert cluster.directory.trust(0).state is StreamState.FENCED


def test_node_is_flagged_then_left_out_when_it_dies_without_a_word() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.node(0).store([1])
        cluster.settle()
        cluster.node(0).kill()
        cluster.advance(cluster.limits.stale_after_s + 0.2)
        assert cluster.directory.trust(0).state is StreamState.STALE
        assert cluster.directory.holders([1]) == [{"node-0"}]
        assert not cluster.directory.blocks(0).trusted
        cluster.advance(cluster.limits.expire_after_s)
        assert cluster.directory.holders([1]) == [set()]


def test_store_from_a_sketch_stands_when_feedback_is_older() -> None:
    """The event of the store was not understood; a sketch brought the block in at a number that no event stands for."""
    with LocalCluster(nodes=1) as cluster:
        cluster.node(0).store([2])
        cluster.settle()
        cluster.report_absent(0, [1], delay_s=2.5)
        garbage(cluster, "0", "width")  # stores block 1
        cluster.settle()
        assert cluster.directory.holders([1]) == [{"node-0"}]
        cluster.advance(3)
        assert cluster.directory.holders([1]) == [{"node-0"}]
        assert cluster.directory.core.counters.stale_reports_ignored == 1
