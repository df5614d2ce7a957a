"""Daemons take as many sockets as the system lets them have (`peer-agent doctor` looks at it), and a port a part of them."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from kvdir.rpc.open_files import LEAST, OPEN_FILES, part_of_open_files, raise_open_files

FILES = resource.RLIMIT_NOFILE


@pytest.fixture
def hard() -> Iterator[int]:
    """What this process may have; its own limit is put back."""
    before = resource.getrlimit(FILES)
    yield before[1]
    resource.setrlimit(FILES, before)


def test_the_limit_is_raised_to_what_is_allowed_when_it_is_lower(hard: int) -> None:
    resource.setrlimit(FILES, (512, hard))
    raise_open_files()
    allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    assert resource.getrlimit(FILES) == (allowed, hard)


def test_the_limit_stays_when_it_is_high_enough(hard: int) -> None:
    raise_open_files()
    before = resource.getrlimit(FILES)
    raise_open_files()
    assert resource.getrlimit(FILES) == before


def test_a_port_has_its_part_of_the_limit_and_some_connections_always(hard: int) -> None:
    resource.setrlimit(FILES, (400, hard))
    assert part_of_open_files(0.25) == 100
    assert part_of_open_files(0.25, most=64) == 64
    assert part_of_open_files(0.01) == LEAST
