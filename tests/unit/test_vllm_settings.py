"""What an operator can get wrong about kvdir in vLLM: each time a message with the fix in it. No vLLM is needed here."""

from __future__ import annotations

from typing import Any

import pytest

from kvdir.errors import InvalidInput
from peer_agent.connectors.vllm import SHIMS, UnsupportedVllm, shim_name
from peer_agent.connectors.vllm.settings import Settings


@pytest.mark.parametrize("version", ["0.32.0", "0.32.3", "0.32.0+cpu", "0.32.1rc2"])
def test_known_minor_is_accepted_whatever_comes_after_it(version: str):
    assert shim_name(version) == "v0_32"


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "dev", "0"])
def test_unknown_version_is_refused_with_those_that_are_known(version: str):
    with pytest.raises(UnsupportedVllm, match=r"does not know vLLM .*; it knows 0\.32\..*install a known vLLM"):
        shim_name(version)
    assert version not in SHIMS


def test_settings_are_those_given_and_defaults_for_the_rest():
    settings = Settings.parse({"cpu_bytes_to_use": 1, "kvdir": {"agent": "unix:/x.sock", "load_s": 2, "require_salt": True}})
    assert settings == Settings(agent="unix:/x.sock", load_s=2, require_salt=True)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, 'no table "kvdir".*add "kvdir"'),
        ({"kvdir": "unix:/x"}, 'no table "kvdir"'),
        ({"kvdir": {}}, "agent: required"),
        ({"kvdir": {"agent": "x", "loads_s": 1}}, "loads_s: unknown; known are .*load_s"),
        ({"kvdir": {"agent": "x", "load_s": -1}}, "load_s: must be a number, not negative, is -1"),
        ({"kvdir": {"agent": "x", "check": 1}}, "check: must be true or false"),
        ({"kvdir": {"agent": 7, "max_flight_bytes": 1.5}}, "agent: must be text.*max_flight_bytes: must be a whole number"),
    ],
)
def test_wrong_settings_are_refused_with_the_fix(extra: dict[str, Any], message: str):
    with pytest.raises(InvalidInput, match=message):
        Settings.parse(extra)
