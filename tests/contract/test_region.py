"""The index in a file passes the suite of the index, and the native reader that of readers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvdir.index import BlockIndex, Sketch, create_region
from kvdir.testing.check_index import CHECKS, Implementation


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_region_keeps_the_contract_of_the_index(check: object, tmp_path: Path) -> None:
    numbers = itertools.count()

    def open_region(*, expected_blocks: int = 0, seed: int = 0, max_bytes: int = 0) -> BlockIndex:
        path = tmp_path / str(next(numbers))
        return create_region(path, expected_blocks=expected_blocks, seed=seed, max_bytes=max_bytes)

    assert callable(check)
    check(Implementation(open_region, Sketch))
