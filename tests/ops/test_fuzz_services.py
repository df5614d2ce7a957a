"""Every method of every service is sent what no client would send: refused in words or answered; no bug, no hang, no change."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import grpc
import grpc.aio
import pytest

from kvdir.core.inspect import node_views
from kvdir.fingerprint import Fingerprints
from kvdir.testing.fuzz import BUGS, Attack, attacks
from kvdir.testing.served import FAST_CONFIG, Served, batch, publishing, said, serving, stored
from kvdir.v1 import admin_pb2, directory_pb2, events_pb2
from peer_agent.testing.cluster import local_cluster, sample_namespace
from peer_agent.v1 import engine_pb2, peer_pb2

EACH = 60
KNOWN = Fingerprints(b"".join(number.to_bytes(16, "little") for number in range(1, 33)), 16)


def judge(attack: Attack) -> None:
    sent = [part.hex()[:400] for part in attack.sent]
    assert attack.code not in BUGS, f"{attack.method} answers {attack.code.name} ({attack.details}) to {sent}"
    hangs = attack.code is grpc.StatusCode.DEADLINE_EXCEEDED and not attack.streams
    assert not hangs, f"{attack.method} does not answer {sent}"
    assert attack.code is not grpc.StatusCode.UNAVAILABLE, f"gone after {attack.method} and {sent}: {attack.details}"


@pytest.mark.parametrize("module", [directory_pb2, events_pb2, admin_pb2], ids=lambda module: module.__name__.split(".")[-1])
async def test_coordinator_refuses_and_keeps_what_it_knows_when_requests_are_nonsense(
    module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    patient = replace(FAST_CONFIG, stale_after_s=300.0, expire_after_s=600.0)  # who published the blocks says nothing more
    async with serving(patient) as served, publishing(served) as call:
        await said(call, "welcome")
        await call.write(batch(1, stored(KNOWN)))
        await said(call, "ack")
        before = _known(served)
        assert before == len(KNOWN)
        async with grpc.aio.insecure_channel(served.address) as channel:
            async for attack in attacks(channel, module, seed=7, each=EACH):
                judge(attack)
                if attack.code is not grpc.StatusCode.OK and not attack.streams:
                    assert _known(served) == before, f"{attack.method} was refused and changed something"
    assert not [record for record in caplog.records if "call failed" in record.getMessage()]


def _known(served: Served) -> int:
    """Entries of the directory."""
    views = node_views(served.coordinator.directory, now_s=served.coordinator.now_s())
    return sum(holding.blocks.value for view in views for holding in view.holdings)


@pytest.mark.parametrize("module", [peer_pb2, engine_pb2], ids=["peer", "engine"])
async def test_agent_refuses_when_requests_are_nonsense(
    tmp_path: Path, module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with local_cluster(tmp_path, "a", namespace=sample_namespace()) as cluster:
        agent = cluster.agents["a"]
        address = agent.ready.peer if module is peer_pb2 else agent.ready.engine
        async with grpc.aio.insecure_channel(address) as channel:
            async for attack in attacks(channel, module, seed=11, each=EACH):
                judge(attack)
        assert agent.store.locks == 0
    assert not [record for record in caplog.records if "call failed" in record.getMessage()]
