"""The whole demo over mTLS, control and data plane."""

from __future__ import annotations

from peer_agent.demo.command import read_requests
from peer_agent.demo.run import DemoOptions, demo


async def test_no_byte_is_wrong_and_blocks_move_when_the_demo_runs_over_tls() -> None:
    options = DemoOptions(
        nodes=2, block_bytes=4096, blocks_per_node=2000, loss=0.0, kill_at=None, deadline_s=20.0, compute_ms=0.0, seed=0,
        transports=("tcp",), tls=True,
    )  # fmt: skip
    figures = await demo(options, read_requests(None, 40), progress=lambda: None, ready=lambda cluster: None)
    assert (figures["corrupt"], figures["failed_requests"]) == (0, 0)
    assert figures["hit_peer"] > 0
    assert figures["streams_synced"] == 2
