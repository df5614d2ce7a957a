"""The fake engine passes the suite that vLLM's own publisher passes (tests/vllm/test_events.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvdir.testing.check_engine_publisher import CHECKS, Publisher
from kvdir.testing.fake_engine import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_fake_engine_is_a_publisher_as_engines_have_them(engine: FakeEngine, check: Callable[[Publisher], None]) -> None:
    check(engine)
