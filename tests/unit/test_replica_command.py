"""`kvdir replica` and `kvdir lookup --region`: what is in a region, in words and as one document."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvdir.cli.main import main
from kvdir.client import replica_reader
from kvdir.core.region_roster import RegionRoster
from kvdir.core.roster import Beat, NamespaceRecord
from kvdir.location import NodeTrust, StreamState, Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints
from kvdir.testing.fake_region import FakeReader, FakeRegion

DIGEST = EXAMPLE_NAMESPACE.digest
BLOCKS = some_fingerprints(4)


@pytest.fixture
def roster(monkeypatch: pytest.MonkeyPatch) -> RegionRoster:
    region = FakeRegion()
    roster = RegionRoster(region)
    record = NamespaceRecord(DIGEST, "example", 1, 1)
    roster.put_namespace(record)
    for slot, name, state in ((0, "n1", StreamState.SYNCED), (5, "n2", StreamState.GAP)):
        trust = NodeTrust(name, 7, state, "", 0.0, 0, f"{name}:1", 0.5)
        roster.put_node(slot, trust, heard_s=time.monotonic(), hidden=name == "n2")
        roster.put_holder(slot, slot, Tier.CPU, visible=True)
        region.index.store(BLOCKS.packed, BLOCKS.width, scope=record.scope, holder=slot, now_s=1)
    monkeypatch.setattr(replica_reader, "_open_region", lambda path: FakeReader(region))
    return roster


def beat(roster: RegionRoster, *, behind_s: float = 0.25) -> None:
    now_ns = time.monotonic_ns()
    roster.beat(Beat(beat_ns=now_ns, as_of_ns=now_ns - round(behind_s * 1e9), source="c:7400", pid=9))


def test_region_is_shown_with_its_lag_and_the_trust_of_its_nodes(roster: RegionRoster) -> None:
    beat(roster)
    result = CliRunner().invoke(main, ["replica", "/r", "--output", "json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["usable"], document["coordinator"], document["blocks"], document["writer_pid"]) == (True, "c:7400", 4, 9)
    assert 0.25 <= document["lag_s"] < 5
    assert [(node["node"], node["state"], node["left_out"]) for node in document["nodes"]] == [
        ("n1", "synced", False),
        ("n2", "gap", True),
    ]
    words = CliRunner().invoke(main, ["replica", "/r"]).stdout
    assert all(text in words for text in ("c:7400", "n1", "gap (left out)", "50%", "example"))


def test_command_fails_with_the_reason_when_lookups_are_not_answered_from_it(roster: RegionRoster) -> None:
    result = CliRunner().invoke(main, ["replica", "/r", "--output", "json"])
    assert result.exit_code == 4
    assert "has not said yet" in result.stderr
    assert json.loads(result.stdout)["usable"] is False


def test_lookup_is_answered_from_the_region(roster: RegionRoster) -> None:
    beat(roster)
    asked = [*(item.hex() for item in BLOCKS), "00" * 32]
    command = ["lookup", DIGEST.hex()[:6], *asked, "--region", "/r"]
    document = json.loads(CliRunner().invoke(main, [*command, "--output", "json"]).stdout)
    assert (document["hits"], document["asked"], document["source"]) == (4, 5, "replica")
    assert document["runs"] == [{"start": 0, "count": 4, "holders": ["n1/cpu"]}]
    assert "4 of 5 blocks" in CliRunner().invoke(main, command).stdout
    assert "at most 0." in CliRunner().invoke(main, command).stdout
    wrong = CliRunner().invoke(main, ["lookup", "ffff", *asked, "--region", "/r"])
    assert "kvdir replica /r" in wrong.stderr


def test_commands_say_what_to_do_when_there_is_no_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_reader, "DEFAULT_PLACE", str(tmp_path / "kvdir-*.replica"))
    result = CliRunner().invoke(main, ["replica"])
    assert result.exit_code == 4
    assert "an agent that keeps a replica" in result.stderr
