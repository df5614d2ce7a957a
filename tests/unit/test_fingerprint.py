"""Packed fingerprints: refusals, access, chains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdir.errors import InvalidInput
from kvdir.fingerprint import WIDTHS, Fingerprints


@st.composite
def lists(draw: st.DrawFn) -> list[bytes]:
    width = draw(st.sampled_from(WIDTHS))
    return draw(st.lists(st.binary(min_size=width, max_size=width), min_size=1, max_size=20))


@given(lists())
def test_items_come_back_in_order(items: list[bytes]) -> None:
    packed = Fingerprints.of(items)
    assert len(packed) == len(items)
    assert list(packed) == items
    assert [packed[position] for position in range(len(items))] == items
    assert list(packed.slice(1, 2)) == items[1:3]
    assert list(packed.select([len(items) - 1, 0])) == [items[-1], items[0]]


@pytest.mark.parametrize("width", [0, 1, 7, 9, 64, -8])
def test_width_is_refused_with_the_allowed_ones(width: int) -> None:
    with pytest.raises(InvalidInput, match="must be one of 8, 16, 32"):
        Fingerprints(b"", width)


def test_buffer_is_refused_when_it_is_not_a_multiple_of_the_width() -> None:
    with pytest.raises(InvalidInput, match="33 bytes, not a multiple of the width 16"):
        Fingerprints(bytes(33), 16)


def test_mixed_widths_are_refused() -> None:
    with pytest.raises(InvalidInput, match="different widths"):
        Fingerprints.of([bytes(8), bytes(16)])


def test_position_is_refused_when_it_is_outside() -> None:
    packed = Fingerprints.of([bytes(8)])
    for position in (-1, 1):
        with pytest.raises(IndexError):
            packed[position]


@given(st.lists(st.binary(max_size=8), max_size=8), st.lists(st.binary(max_size=8), max_size=8))
def test_chains_are_equal_exactly_as_far_as_the_parts_are(a: list[bytes], b: list[bytes]) -> None:
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    left, right = list(Fingerprints.chain(a)), list(Fingerprints.chain(b))
    assert left[:common] == right[:common]
    assert not set(left[common:]) & set(right[common:])


def test_chain_depends_on_its_root() -> None:
    assert Fingerprints.chain([b"x"], root=b"a") != Fingerprints.chain([b"x"], root=b"b")


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("to", [8, 16, 32])
def test_narrowed_keeps_the_front_of_each_when_it_is_wider(width: int, to: int) -> None:
    """Each fingerprint loses its tail, none its place."""
    fingerprints = Fingerprints(bytes(range(5 * width % 256)) + bytes(5 * width - 5 * width % 256), width)
    narrow = fingerprints.narrowed(to)
    assert list(narrow) == [item[:to] for item in fingerprints]
    assert narrow.width == min(width, to)
