"""Every generation of every dialect tells the same story (tests/golden/make.py), and is read the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvdir.core.event import EventKind
from kvdir.engines import COUNTS_COPIES, Cleared, EngineIdentity, Removed, Residency, Stored, decode
from kvdir.location import Tier

GENERATIONS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "generations.json").read_text())
FIRST, SECOND = (0x8000_0000_0000_0001).to_bytes(8, "big"), (2).to_bytes(8, "big")


@pytest.fixture(params=GENERATIONS, ids=lambda story: story["name"])
def story(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def test_the_story_is_read_when_told_in_any_generation(story: dict[str, Any]) -> None:
    batches = [decode(story["dialect"], bytes.fromhex(payload)) for _, _, payload in story["frames"]]
    assert not any(batch.rejected for batch in batches)
    assert {batch.ts_s for batch in batches} == {1700000000.5}
    stored, removed, cleared = (batch.events[0] for batch in batches)
    assert isinstance(stored, Stored)
    assert isinstance(removed, Removed)
    assert isinstance(cleared, Cleared)
    assert (stored.tier, stored.adapter, stored.parent, stored.salted) == (Tier.GPU, "none", b"", False)
    lead = bytes(stored.width - 8)
    assert stored.packed == lead + FIRST + lead + SECOND
    assert removed.packed == lead + SECOND
    assert stored.block_tokens == (0 if story["name"] == "dynamo-router-event" else 4)


def test_what_is_held_follows_when_the_story_is_told_in_any_generation(story: dict[str, Any]) -> None:
    identity = EngineIdentity(model="tiny", hash_scheme="vllm:sha256", block_tokens=4)
    residency = Residency(identity, copies=story["dialect"] in COUNTS_COPIES)
    kinds, held = [], []
    for _, _, payload in story["frames"]:
        applied = residency.apply(decode(story["dialect"], bytes.fromhex(payload)))
        assert not applied.doubt
        kinds += [event.kind for event in applied.events]
        held.append(sum(count.blocks for count in residency.counts()))
    assert kinds == [EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED]
    assert held == [2, 1, 0]
    (namespace,) = residency.namespaces.values()
    assert namespace.is_announced
    assert namespace.block_tokens == 4


def test_the_golden_file_is_what_its_script_makes(tmp_path: Path) -> None:
    import importlib.util

    path = Path(__file__).parents[1] / "golden" / "make.py"
    spec = importlib.util.spec_from_file_location("golden_make", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = {name: (dialect, [payload.hex() for payload in payloads]) for name, (dialect, payloads) in module.STORIES.items()}
    assert made == {item["name"]: (item["dialect"], [frame[2] for frame in item["frames"]]) for item in GENERATIONS}
