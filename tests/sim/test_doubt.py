"""An owner whose engine has lost events for good: never trusted while that lasts, whatever happens on the way.

Every step is checked against the owners' truth by the cluster itself, which is not what the owner says here.
"""

from __future__ import annotations

import random

import pytest

from kvdir.location import StreamState
from kvdir.testing import LocalCluster
from kvdir.testing.sim.network import Faults


def doubted(cluster: LocalCluster) -> bool:
    trust = cluster.directory.trust(0)
    return trust.state is StreamState.GAP and "the engine lost events" in trust.reason


@pytest.mark.parametrize("cells", [0, 64])
def test_figures_stay_untrusted_through_snapshots_and_restarts_of_the_coordinator(cells: int) -> None:
    with LocalCluster(nodes=2, sketch_cells=cells) as cluster:
        cluster.node(0).store(range(40))
        cluster.settle()
        cluster.node(0).lose_engine_events(stored=[90], removed=[3])
        cluster.advance(3)
        assert doubted(cluster)
        assert cluster.directory.trust(1).state is StreamState.SYNCED
        cluster.directory.core.want_snapshot("node-0")
        cluster.advance(3)
        assert doubted(cluster)
        cluster.restart_coordinator()
        cluster.advance(6)
        assert doubted(cluster)
        assert not cluster.directory.core.warming
        cluster.node(0).engine_empties()
        cluster.node(0).store([1, 2])
        cluster.settle()
        assert cluster.directory.blocks(0).require_trusted() == 2


@pytest.mark.parametrize("seed", range(12))
def test_nothing_wrong_is_trusted_after_any_history_with_lost_engine_events(seed: int) -> None:
    rng = random.Random(seed)
    faults = Faults(loss=rng.choice([0.0, 0.1]), duplicates=rng.choice([0.0, 0.2]), jitter_s=0.05)
    with LocalCluster(nodes=2, seed=seed, ring_events=rng.choice([3, 100]), faults=faults) as cluster:
        for _ in range(60):
            node, blocks = cluster.node(rng.randrange(2)), rng.sample(range(8), 2)
            match rng.randrange(12):
                case 0:
                    node.lose_engine_events(stored=blocks[:1], removed=blocks[1:])
                case 1:
                    node.engine_empties()
                case 2:
                    node.lose(stored=blocks)
                case 3:
                    cluster.network.cut(node.name, late_s=rng.choice([0.0, 0.2]))
                case 4 if rng.random() < 0.3:
                    cluster.restart_coordinator()
                case 5 | 6 | 7:
                    node.remove(blocks)
                case _:
                    node.store(blocks)
            cluster.advance(rng.choice([0.0, 0.01, 0.1, 0.6]))
        for number in range(2):
            cluster.node(number).engine_empties()
            cluster.node(number).store([number])
        cluster.network.faults = Faults()
        cluster.settle()
