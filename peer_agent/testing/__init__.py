"""Public helpers for tests of anything that uses agents: a cluster inside this process, with real sockets and real memory."""

from peer_agent.testing.cluster import Blocks, LocalCluster, local_cluster, sample_namespace

__all__ = ["Blocks", "LocalCluster", "local_cluster", "sample_namespace"]
