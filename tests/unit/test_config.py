"""Configuration: precedence, every fault at once, sources, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdir.config import load, parse_bytes, setting, settings, show_bytes
from kvdir.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Example:
    """One setting of each kind."""

    listen: str = setting("127.0.0.1:0", "Where to listen.")
    arena_bytes: int = setting(1024, "Size of the arena.")
    lease_s: float = setting(2.5, "Length of a lease.")
    insecure: bool = setting(False, "Allow plaintext.")
    peers: tuple[str, ...] = setting((), "Peers.")
    token: str | None = setting(None, "Optional text.")

    def faults(self) -> list[str]:
        return ["listen: must not be empty"] if not self.listen else []


def load_example(
    file: Path | None = None, environ: dict[str, str] | None = None, **flags: object
) -> tuple[Example, dict[str, str]]:
    return load(Example, prefix="EX_", file=file, environ=environ or {}, flags=flags)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "example.toml"
    path.write_text(text)
    return path


def test_defaults_hold_when_nothing_is_given() -> None:
    config, sources = load_example()
    assert config == Example()
    assert set(sources.values()) == {"default"}


def test_flag_wins_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    file = toml(tmp_path, 'listen = "a"\narena_bytes = 1\nlease_s = 1\ninsecure = true')
    config, sources = load_example(file, {"EX_LISTEN": "b", "EX_ARENA_BYTES": "2KiB"}, listen="c", lease_s=None)
    assert (config.listen, config.arena_bytes, config.lease_s, config.insecure) == ("c", 2048, 1.0, True)
    assert sources == {
        "listen": "flag",
        "arena_bytes": "environment",
        "lease_s": "file",
        "insecure": "file",
        "peers": "default",
        "token": "default",
    }


def test_every_fault_of_every_source_is_reported_at_once(tmp_path: Path) -> None:
    file = toml(tmp_path, 'lisen = "a"\narena_bytes = "huge"\npeers = 5')
    with pytest.raises(ConfigError) as caught:
        load_example(file, {"EX_LEASE": "1", "EX_INSECURE": "perhaps"}, lease_s="soon")
    text = str(caught.value)
    assert len(caught.value.faults) == 6
    for expected in ("'lisen'", "did you mean 'listen'", "arena_bytes", "peers", "EX_LEASE", "EX_INSECURE", "--lease-s"):
        assert expected in text


def test_variables_of_the_projects_other_parts_are_no_faults_when_they_are_set() -> None:
    environ = {"KVDIR_CACHE": "/var/cache", "KVDIR_UCP_LIBRARY": "/usr/lib/libucp.so.0"}
    assert load(Example, prefix="KVDIR_", environ=environ) == load(Example, prefix="KVDIR_", environ={})
    with pytest.raises(ConfigError, match="unknown variable KVDIR_CACHES"):
        load(Example, prefix="KVDIR_", environ={"KVDIR_CACHES": "/var/cache"})


def test_faults_of_the_whole_are_reported_when_single_values_are_fine() -> None:
    with pytest.raises(ConfigError, match="listen: must not be empty"):
        load_example(listen="")


def test_foreign_and_double_underscore_variables_are_left_alone() -> None:
    assert load_example(environ={"OTHER_LISTEN": "x", "EX__LISTEN": "y"})[0] == Example()


@pytest.mark.parametrize(
    "name",
    ["EX_PORT", "EX_SERVICE_HOST", "EX_SERVICE_PORT", "EX_SERVICE_PORT_GRPC", "EX_PORT_7400_TCP", "EX_PORT_7400_TCP_ADDR"],
)
def test_a_variable_is_left_alone_when_kubernetes_sets_it_for_a_service_of_our_name(name: str) -> None:
    assert load_example(environ={name: "tcp://10.0.0.1:7400"})[0] == Example()
    with pytest.raises(ConfigError, match="EX_PORTS"):
        load_example(environ={"EX_PORTS": "1"})


def test_unreadable_file_is_a_fault_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.toml: cannot be read"):
        load_example(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_example(toml(tmp_path, "listen = "))


def test_lists_come_from_commas_and_from_toml_lists(tmp_path: Path) -> None:
    assert load_example(environ={"EX_PEERS": "a:1, b:2,"})[0].peers == ("a:1", "b:2")
    assert load_example(toml(tmp_path, 'peers = ["a:1", "b:2"]'))[0].peers == ("a:1", "b:2")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_number_is_refused_when_it_is_not_finite(text: str) -> None:
    with pytest.raises(ConfigError, match="finite"):
        load_example(lease_s=text)


@pytest.mark.parametrize("raw", [True, 1.5, "1.5", "", [], {}])
def test_whole_number_is_refused_when_it_is_something_else(raw: object) -> None:
    with pytest.raises(ConfigError, match="--arena-bytes"):
        load(Example, prefix="EX_", environ={}, flags={"arena_bytes": raw})


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("128KiB", 131072), ("1.5 GiB", 1610612736), ("10MB", 10_000_000), ("0", 0), ("2tib", 2**41), ("7b", 7)],
)
def test_size_is_read_when_it_has_a_unit(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "1 parsec", "-1", "-5KiB", "1e999", "nan", "0x10", "1,5KiB"])
def test_size_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match="write 4096, 128KiB"):
        parse_bytes(text)


@given(st.text(max_size=12))
def test_size_is_a_count_or_a_value_error(text: str) -> None:
    try:
        assert parse_bytes(text) >= 0
    except ValueError as error:
        assert "is not a size" in str(error)  # noqa: PT017 - either outcome is right


@given(st.integers(0, 2**50))
def test_shown_size_is_close_when_read_back(count: int) -> None:
    assert abs(parse_bytes(show_bytes(count)) - count) <= max(1, count * 0.051)


def test_settings_know_kind_and_flag() -> None:
    kinds = {item.name: item.kind for item in settings(Example)}
    assert kinds == {"listen": str, "arena_bytes": int, "lease_s": float, "insecure": bool, "peers": tuple, "token": str}
    assert [item.flag for item in settings(Example)][:2] == ["--listen", "--arena-bytes"]
