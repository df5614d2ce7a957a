"""The runbook has a part for each alert, and its commands exist with the options it gives them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from deploy.monitoring.alerts import GROUPS
from deploy.monitoring.rules import Alert
from kvdir.cli.main import main as kvdir_main
from kvdir.obs.labels import CAPABILITY
from peer_agent.cli.main import main as agent_main

TEXT = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text()
COMMAND = re.compile(r"(?:^|`)((?:kvdir|peer-agent) [a-z][^`\n#]*)", re.MULTILINE)
PARTS = ("Meaning", "Impact", "Check", "Action")


def sections() -> dict[str, str]:
    parts = re.split(r"^### (\w+)$", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands() -> list[str]:
    return sorted({match.strip() for match in COMMAND.findall(TEXT)})


def test_every_alert_has_its_part_and_every_part_its_alert() -> None:
    alerts = {rule.name: rule for group in GROUPS for rule in group.rules if isinstance(rule, Alert)}
    assert set(sections()) == set(alerts)
    assert all(alert.runbook_url == f"docs/runbook.md#{name.lower()}" for name, alert in alerts.items())


@pytest.mark.parametrize("part", PARTS)
def test_every_part_says_what_to_know_and_do(part: str) -> None:
    assert not [name for name, text in sections().items() if text.count(f"**{part}**: ") != 1]


def test_links_within_the_runbook_lead_somewhere() -> None:
    anchors = {name.lower() for name in sections()}
    assert not [link for link in re.findall(r"\]\(#(\w+)\)", TEXT) if link not in anchors]


def test_every_reason_of_a_refused_capability_is_explained() -> None:
    check = sections()["KvdirCapabilitiesRefused"].partition("**Check**")[2]
    assert set(re.findall(r"`(\w+)`", check.partition("**Action**")[0])) == set(CAPABILITY.values)


@pytest.mark.parametrize("command", commands())
def test_commands_exist_with_their_options(command: str) -> None:
    program, name, *words = shlex.split(command)
    group: click.Group = kvdir_main if program == "kvdir" else agent_main
    found = group.get_command(click.Context(group), name)
    if isinstance(found, click.Group):
        found = found.get_command(click.Context(found), words.pop(0))
    assert found is not None, f"there is no such command: {command}"
    _, left_over, _ = found.make_parser(click.Context(found)).parse_args(words)  # UsageError names an option that is none
    assert not left_over
