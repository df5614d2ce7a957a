"""Parts of the clients that need no network: addresses, backoff, lazy names."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import kvdir
from kvdir.client.addresses import Addresses
from kvdir.client.publisher import Backoff
from kvdir.errors import InvalidInput
from peer_agent.client.attachment import unanswered


def test_another_users_socket_is_named_when_no_agent_can_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod whose engine and agent are different users, the first thing to go wrong."""
    path = tmp_path / "agent.sock"
    assert "does it run" in str(unanswered(f"unix:{path}"))
    path.touch(0o600)
    assert "does it run" in str(unanswered(f"unix:{path}"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may do anything
    assert f"of user {os.getuid()}: run engine and agent as one user" in str(unanswered(f"unix:{path}"))


def test_failed_address_goes_last_until_its_time_is_over() -> None:
    addresses = Addresses("a:1, b:1,a:1")
    assert addresses.order(now_s=0.0) == ["a:1", "b:1"]
    addresses.failed("a:1", now_s=0.0)
    assert addresses.order(now_s=0.1) == ["b:1", "a:1"]
    assert addresses.order(now_s=0.6) == ["a:1", "b:1"]
    addresses.failed("a:1", now_s=0.6)
    assert addresses.order(now_s=1.5) == ["b:1", "a:1"]
    addresses.answered("a:1")
    assert addresses.order(now_s=1.5) == ["a:1", "b:1"]


@pytest.mark.parametrize("text", ["", " , ", "nohost"])
def test_addresses_are_refused_when_they_are_none(text: str) -> None:
    with pytest.raises(InvalidInput, match="host:port"):
        Addresses(text)


def test_intervals_grow_to_a_limit_and_are_jittered() -> None:
    backoff, rng = Backoff(base_s=0.1, limit_s=2.0), random.Random(1)
    intervals = [backoff.interval_s(failures, rng) for failures in range(50)]
    assert all(0.05 <= interval <= 2.0 for interval in intervals)
    assert intervals[0] <= 0.1
    assert min(intervals[10:]) >= 1.0
    assert len(set(intervals[10:])) > 1


def test_import_is_light_when_nothing_is_used() -> None:
    heavy = "('grpc', 'numpy', 'torch', 'google', 'rich', 'click')"
    code = f"import sys, kvdir; print([m for m in sys.modules if m.partition('.')[0] in {heavy}])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert out.stdout == "[]\n"


def test_every_public_name_resolves() -> None:
    for name in kvdir.__all__:
        assert getattr(kvdir, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        _ = kvdir.nonsense
