"""Settings of the coordinator: what is refused, all at once, with the fix."""

from __future__ import annotations

import dataclasses

import pytest

from kvdir.config import load, settings
from kvdir.errors import ConfigError
from kvdir.server.config import CoordinatorConfig, is_loopback, split_address


def test_defaults_are_valid() -> None:
    assert CoordinatorConfig().faults() == []
    assert all(item.help.endswith(".") for item in settings(CoordinatorConfig))


def test_every_fault_is_named_at_once_when_several() -> None:
    flags = {"listen": "nonsense", "http_listen": "0.0.0.0:1", "stale_after_s": "90", "log_level": "loud", "max_streams": "0"}
    with pytest.raises(ConfigError) as caught:
        load(CoordinatorConfig, prefix="KVDIR_", environ={}, flags=flags)
    text = "\n".join(caught.value.faults)
    for words in ("HOST:PORT", "--insecure", "stale_after_s", "loud", "max_streams"):
        assert words in text
    assert len(caught.value.faults) == 5


def test_public_address_is_allowed_when_insecure_is_said() -> None:
    config = dataclasses.replace(CoordinatorConfig(), listen="0.0.0.0:7400", insecure=True)
    assert config.faults() == []


def test_http_side_is_off_when_its_address_is_empty() -> None:
    assert dataclasses.replace(CoordinatorConfig(), http_listen="").faults() == []


@pytest.mark.parametrize(("text", "parts"), [("h:1", ("h", 1)), ("[::1]:74", ("::1", 74)), ("127.0.0.1:0", ("127.0.0.1", 0))])
def test_address_is_split_when_well_formed(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts


@pytest.mark.parametrize("text", ["", "h", ":1", "h:", "h:x", "h:70000", "h:-1"])
def test_address_is_refused_when_it_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_address(text)


def test_loopback_is_recognised() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("no.such.host.invalid")
