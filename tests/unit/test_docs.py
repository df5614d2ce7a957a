"""Documentation that comes from code, or names things in it, is up to date."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from kvdir.cli.bench_faults import FAULTS
from kvdir.cli.options import configuration_page
from kvdir.cli.replay import replay
from kvdir.core.repair import RepairPolicy
from kvdir.location import StreamState
from kvdir.namespace import Namespace, StateGroup
from kvdir.server.config import CoordinatorConfig
from peer_agent.demo.command import demo

ROOT = Path(__file__).parents[2]


def test_configuration_page_is_what_the_declarations_give() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == configuration_page(), "run `make docs` and commit"


def test_namespace_example_is_complete_with_and_without_its_options() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/configuration.md").read_text(), flags=re.DOTALL)
    fields = tomllib.loads(example)
    assert Namespace.create(**fields).block_bytes == 2 * 32 * 8 * 128 * 16 * 2
    named = set(re.findall(r"^#? ?(\w+) = ", example, flags=re.MULTILINE)) | set(fields)
    assert {field.name for field in dataclasses.fields(Namespace)} - {"tenant"} <= named
    assert {field.name for field in dataclasses.fields(StateGroup)} <= named


@pytest.mark.parametrize(("page", "command"), [("demo.md", demo), ("replay.md", replay)])
def test_page_names_only_options_that_exist(page: str, command: object) -> None:
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}  # type: ignore[attr-defined]
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / "docs" / page).read_text()))
    assert used <= options | {"--shm-size"}, sorted(used - options)


def test_consistency_page_names_only_settings_states_and_faults_that_exist() -> None:
    page = (ROOT / "docs/consistency.md").read_text()
    settings = {field.name for part in (CoordinatorConfig, RepairPolicy) for field in dataclasses.fields(part)}
    named = set(re.findall(r"`((?:max|idle|replay|forget|stale|expire|heartbeat)_\w+)`", page))
    assert named
    assert named <= settings, sorted(named - settings)
    assert all(f"`{state.name.lower()}`" in page for state in StreamState)
    (faults,) = re.findall(r"## Faults\n(.*?)\n## ", page, flags=re.DOTALL)
    assert len(re.findall(r"^\| (?!fault |---)", faults, flags=re.MULTILINE)) == len(FAULTS), "rows of `kvdir bench faults`"


def test_faults_page_names_only_tests_that_exist() -> None:
    """`fault/test_x.py::test_y`, and `::test_z` for another one of the file named before."""
    page, named = (ROOT / "docs/faults.md").read_text(), 0
    for line in page.splitlines():
        source = ""
        for file, name in re.findall(r"`((?:\w+/)?test_\w+\.py)?(?:::(\w+))?`", line):
            if file:
                source = (ROOT / "tests" / file).read_text()
            if name:
                assert re.search(rf"(?:def|class) {name}\b", source), f"{file or line}: no {name}"
                named += 1
    assert named > 50
