"""The whole demo over mTLS, control and data plane."""

from __future__ import annotations

from pathlib import Path

from peer_agent.demo.command import read_requests
from peer_agent.demo.run import DemoOptions, demo
from peer_agent.testing.chats import write_chats


async def test_no_byte_is_wrong_and_blocks_move_when_the_demo_runs_over_tls(tmp_path: Path) -> None:
    options = DemoOptions(
        nodes=2, block_bytes=4096, blocks_per_node=2000, loss=0.0, kill_at=None, deadline_s=20.0, compute_ms=0.0, seed=0,
        transports=("tcp",), tls=True,
    )  # fmt: skip
    requests = read_requests(write_chats(tmp_path / "trace.jsonl"), 60)
    figures = await demo(options, requests, progress=lambda: None, ready=lambda cluster: None)
    assert (figures["corrupt"], figures["failed_requests"]) == (0, 0)
    assert figures["hit_peer"] > 0, figures
    assert figures["streams_synced"] == 2
