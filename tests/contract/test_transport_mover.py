"""The planes that run in a mover process keep the contract of peer_agent/transport/base.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from peer_agent.transport.check import CHECKS, Check
from peer_agent.transport.check_movers import mover_rig

BACKENDS: dict[str, Mapping[str, str]] = {"fake": {}, "ucx": {"emulated": "tcp"}, "nixl": {"emulated": "tcp"}}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_mover_plane_keeps_the_contract(backend: str, check: Check, tmp_path: Path) -> None:
    async with mover_rig(tmp_path, backend, BACKENDS[backend], stopped_is_readable=backend == "fake") as rig:
        await check(rig)
