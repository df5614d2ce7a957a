"""Losses, duplicates, partitions and a coordinator that restarts (issue list), on the simulated cluster.

Every step is also checked against the owners' truth by the cluster itself.
"""

from __future__ import annotations

import pytest

from kvdir.location import StreamState
from kvdir.server.config import CoordinatorConfig
from kvdir.testing import LocalCluster
from kvdir.testing.sim.network import Faults

REPAIRS = ("replay_request", "sketch_request", "snapshot_request")


def settled(cluster: LocalCluster) -> None:
    """As `settle`; what is counted of messages begins here."""
    cluster.settle()
    cluster.network.sent.clear()
    cluster.network.sent_bytes.clear()


def repairs(cluster: LocalCluster, node: int = 0) -> dict[str, int]:
    """What the coordinator has asked the node for since `settled`."""
    return {kind: cluster.network.sent[f"node-{node}", kind] for kind in REPAIRS if cluster.network.sent[f"node-{node}", kind]}


def test_nothing_is_repaired_when_nothing_is_lost() -> None:
    config = CoordinatorConfig(credit_events=8)
    with LocalCluster(nodes=2, config=config, faults=Faults(delay_s=0.02, jitter_s=0.05)) as cluster:
        settled(cluster)
        for block in range(400):
            cluster.node(block % 2).store([block])
            cluster.node(block % 2).remove([block // 2])
            cluster.advance(0.01)
        cluster.settle()
        assert repairs(cluster, 0) == {}
        assert repairs(cluster, 1) == {}


def test_lost_batch_hides_only_its_own_blocks_when_it_is_inside_a_chain() -> None:
    with LocalCluster(nodes=1) as cluster:
        settled(cluster)
        cluster.node(0).store(range(10))
        cluster.advance(0.01)
        cluster.network.drop_events(0, count=1)
        cluster.node(0).store(range(10, 20))  # lost
        cluster.advance(0.01)
        cluster.node(0).store(range(20, 30))
        cluster.advance(0.005)
        assert cluster.directory.holders(range(30)) == [{"node-0"}] * 10 + [set()] * 10 + [{"node-0"}] * 10
        assert cluster.directory.trust(0).state is StreamState.GAP
        assert cluster.settle() < 0.2
        assert repairs(cluster) == {"replay_request": 1}


def test_last_event_is_missed_within_a_heartbeat_when_it_is_lost() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.node(0).store([1, 2])
        cluster.settle()
        cluster.network.drop_events(0, count=1)
        cluster.node(0).remove([1])  # nothing follows it
        assert cluster.settle(heartbeats=1.2) > 0
        assert cluster.directory.holders([1, 2]) == [set(), {"node-0"}]


def test_first_event_is_asked_for_at_once_when_the_call_broke_before_it_came() -> None:
    """Nothing was applied yet, so the coordinator's number to resume after is 0, which makes no agent go back by itself."""
    with LocalCluster(nodes=1) as cluster:
        settled(cluster)
        cluster.network.drop_events(0, count=1)
        cluster.node(0).store([1])
        cluster.advance(0.01)
        cluster.network.cut(0)
        assert cluster.settle() < 0.5
        assert repairs(cluster) == {"replay_request": 1}


def test_removal_is_found_when_its_owner_forgot_to_say_it() -> None:
    """No number stands for it, so nothing is missing: only the owner's own figures tell."""
    with LocalCluster(nodes=1, watch=False) as cluster:
        cluster.node(0).store(range(50))
        cluster.settle()
        cluster.node(0).change_silently(removed=[7])
        assert cluster.settle(heartbeats=2.2) > 0
        assert cluster.directory.holders([6, 7]) == [{"node-0"}, set()]


def test_swap_is_found_when_its_owner_forgot_to_say_it() -> None:
    """The counts agree: the sets do not."""
    with LocalCluster(nodes=1, watch=False) as cluster:
        cluster.node(0).store(range(50))
        settled(cluster)
        cluster.node(0).change_silently(removed=[7], stored=[77])
        assert cluster.settle(heartbeats=2.2) > 0
        assert cluster.directory.holders([7, 77]) == [set(), {"node-0"}]
        assert repairs(cluster) == {"sketch_request": 1}


def test_next_method_is_used_when_replays_are_never_answered() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.node(0).store(range(100))
        settled(cluster)
        cluster.network.drop_events(0, share=1.0)  # batches get lost, whatever is asked for; the rest of the call works
        cluster.node(0).store([500])
        cluster.settle(heartbeats=8)
        assert repairs(cluster) == {"replay_request": 3, "sketch_request": 1}


def test_hole_is_noticed_when_a_replay_is_answered_in_part() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.settle()
        cluster.network.drop_events(0, count=3)
        for block in range(4):
            cluster.node(0).store([block])
            cluster.advance(0.01)
        cluster.network.drop_events(0, count=1)  # of the replay: its first event
        cluster.advance(0.06)
        assert not cluster.directory.blocks(0).trusted
        cluster.settle()
        assert cluster.directory.holders(range(4)) == [{"node-0"}] * 4


def test_other_streams_go_on_when_an_agent_accepts_and_never_answers() -> None:
    with LocalCluster(nodes=3) as cluster:
        cluster.settle()
        cluster.network.drop_events(0, count=1)
        cluster.node(0).store([1])
        cluster.advance(1.1)
        cluster.network.partition(0)
        for block in range(20):
            cluster.node(1).store([block])
            cluster.node(2).store([block])
            cluster.advance(0.2)
            assert cluster.directory.trust(1).state is StreamState.SYNCED
            assert cluster.directory.trust(2).state is StreamState.SYNCED
        cluster.network.heal()
        cluster.settle()


def test_chain_stays_when_its_root_is_evicted_and_stored_again() -> None:
    with LocalCluster(nodes=1) as cluster:
        chain = range(16)
        cluster.node(0).store(chain)
        cluster.settle()
        cluster.node(0).remove([0])
        cluster.advance(0.05)
        assert cluster.directory.holders(chain) == [set()] + [{"node-0"}] * 15
        cluster.node(0).store([0])
        cluster.advance(0.05)
        assert cluster.directory.lookup(chain, prefix=True).hits == 16
        cluster.settle(heartbeats=0)


def test_the_rest_is_removed_when_some_blocks_are_absent() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.node(0).store([1, 3])
        cluster.node(0).remove([0, 1, 2, 3])
        cluster.settle()
        assert cluster.directory.holders([1, 3]) == [set(), set()]
        assert cluster.directory.blocks(0).require_trusted() == 0


def test_nothing_changes_when_everything_comes_twice() -> None:
    with LocalCluster(nodes=2, faults=Faults(duplicates=1.0)) as cluster:
        for block in range(20):
            cluster.node(0).store([block, block])
            cluster.node(0).store([block])
            cluster.node(0).remove([block // 2])
            cluster.node(0).remove([block // 2])
            cluster.advance(0.02)
        cluster.settle()
        assert repairs(cluster) == {}
        assert cluster.directory.blocks(0).require_trusted() == 10


@pytest.mark.parametrize("known", [True, False])
def test_overflow_shows_at_once_and_is_repaired_when_40_of_55_events_are_lost(known: bool) -> None:
    """known: the agent's own queue was full. Otherwise the engine's bus was, and the agent has to ask it what there is."""
    with LocalCluster(nodes=1) as cluster:
        cluster.settle()
        for block in range(15):
            cluster.node(0).store([block])
        for block in range(15, 55):
            cluster.node(0).lose(stored=[block], known=known)
        cluster.advance(1.05)  # one heartbeat, at most
        view = cluster.directory.view(0)
        if view.trust.state is not StreamState.SYNCED:  # else it is repaired already
            assert view.trust.missing_events == 40
            assert "40 events missing from 16 to 55" in view.trust.reason
        assert view.dropped_events == 40
        cluster.settle(heartbeats=3)
        assert cluster.directory.blocks(0).require_trusted() == 55


def test_stream_is_exact_within_two_heartbeats_when_a_partition_of_30_s_heals() -> None:
    with LocalCluster(nodes=3) as cluster:
        cluster.node(0).store(range(1000))
        settled(cluster)
        cluster.network.partition(0)
        for block in range(1000, 1030):
            cluster.node(0).store([block])
            cluster.node(0).remove([block - 1000])
            cluster.advance(1)
        assert cluster.directory.trust(0).state is StreamState.STALE
        cluster.network.rejoin(0)
        assert cluster.settle() <= 2
        assert cluster.network.sent["node-0", "snapshot"] == 0
        assert cluster.directory.blocks(0).require_trusted() == 1000


def test_load_is_bounded_and_lookups_flagged_when_the_coordinator_restarts_with_50_agents() -> None:
    agents = 50
    with LocalCluster(nodes=agents, seed=3, ring_events=4, watch=False) as cluster:
        for number in range(agents):
            for part in range(10):
                cluster.node(number).store(range(part * 10, part * 10 + 10))
        settled(cluster)
        cluster.restart_coordinator()
        most = 0
        while cluster.directory.core.warming:
            cluster.advance(cluster.tick_s)
            streams = [node.stream for node in cluster.directory.core.nodes.values() if node.stream]
            most = max(most, sum(stream.cursor.repairing_snapshot for stream in streams))
            if cluster.directory.core.warming and cluster.directory.core.namespaces.get(cluster.digests[0]):
                assert cluster.directory.lookup([1]).warming
        assert most <= cluster.limits.max_snapshots
        cluster.settle()
        for number in range(agents):
            assert cluster.network.sent[f"node-{number}", "snapshot_request"] == 1
            assert cluster.network.sent[f"node-{number}", "hello"] <= 3
        assert not cluster.directory.lookup([1]).warming


def test_agents_come_back_when_the_coordinators_machine_vanishes() -> None:
    with LocalCluster(nodes=2) as cluster:
        cluster.node(0).store([1])
        cluster.settle()
        cluster.kill_coordinator(silently=True)
        cluster.advance(1)
        cluster.restart_coordinator()
        cluster.settle()
        assert cluster.directory.holders([1]) == [{"node-0"}]
