"""docs/scale.md says what bench/scale.py derives, and what it derives agrees with what the code says of itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvdir.core.admission import Limits
from kvdir.core.event import Event
from kvdir.location import Tier
from kvdir.rpc.event_codec import encode_event
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints

SCRIPT = Path(__file__).parents[2] / "bench" / "scale.py"


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_scale", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_scale"] = module
    spec.loader.exec_module(module)
    return module


def test_page_is_what_the_script_derives_when_it_is_written_again(scale: ModuleType) -> None:
    text = scale.PAGE.read_text()
    assert scale.page(text) == text, "run bench/scale.py --write"
    assert "| 1,000 |" in text.replace("a fleet of | 10 | 100 ", "")


def test_parts_agree_with_the_code_when_it_states_them(scale: ModuleType) -> None:
    assert scale.value("snapshots_per_s") == Limits().max_snapshots * 20
    event = encode_event(Event.stored(Tier.CPU, EXAMPLE_NAMESPACE.digest, some_fingerprints(32)))
    assert len(event.SerializeToString()) - 16 * 32 == scale.value("event_overhead")
