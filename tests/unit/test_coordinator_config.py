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


@pytest.mark.parametrize(
    ("field", "value"),
    [("expected_blocks", -1), ("expected_blocks", 10**12), ("grace_s", -1.0), ("warm_limit_s", -1.0), ("replay_idle_s", 0.0)],
)
def test_number_is_refused_when_nothing_can_be_meant_by_it(field: str, value: float) -> None:
    (fault,) = dataclasses.replace(CoordinatorConfig(), **{field: value}).faults()
    assert fault.startswith(f"{field}: must")


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


@pytest.mark.parametrize(
    "store", ["redis://h", "rediss://u:p@h:1/2", "redis+cluster://a:1,b:2", "redis+sentinel://a:1/main", "memory"]
)
def test_store_is_allowed_when_its_scheme_is_known(store: str) -> None:
    assert dataclasses.replace(CoordinatorConfig(), store=store).faults() == []


@pytest.mark.parametrize("store", ["http://u:secret@h", "redis", "redis+cluster://u:secret@", "redis://u:secret@h?what=1"])
def test_store_is_refused_without_its_password_when_it_cannot_be_one(store: str) -> None:
    (fault,) = dataclasses.replace(CoordinatorConfig(), store=store).faults()
    assert fault.startswith("store: ")
    assert "secret" not in fault


def test_what_a_shared_store_does_not_do_is_refused_at_start() -> None:
    config = dataclasses.replace(
        CoordinatorConfig(), store="redis://h", quota=("none=1GiB",), checkpoint="/tmp/c", lookup_workers=2, store_timeout_s=3.0
    )
    faults = config.faults()
    assert len(faults) == 4
    for words in ("quota: not with --store", "checkpoint: not", "lookup_workers: not", "store_timeout_s: must be at most two"):
        assert any(words in fault for fault in faults)
