"""Comparing coordinators by digest, and naming what two sketches differ in."""

from __future__ import annotations

import pytest

from kvdir.core.diff import Row, Verdict, compare, worst
from kvdir.core.digests import DigestsView, StreamDigest
from kvdir.core.sketches import SketchPart
from kvdir.index import Sketch
from kvdir.index.encoded import difference
from kvdir.location import NodeTrust, StreamState

NAMESPACE = b"n" * 32


def stream(
    seq: int,
    blocks: int = 1,
    digest: bytes = b"a" * 16,
    *,
    exact: bool = True,
    synced: bool = True,
    epoch: int = 1,
    age_s: float = 0.0,
) -> StreamDigest:
    state = StreamState.SYNCED if synced else StreamState.REPAIRING
    part = SketchPart(NAMESPACE, 2, blocks, digest)
    return StreamDigest(NodeTrust("n1", epoch, state, "", age_s, 0, "h:1"), seq, seq, (part,) if blocks else (), exact)


def rows(**streams: StreamDigest | None) -> list[Row]:
    return compare({name: DigestsView(name, (item,) if item else ()) for name, item in streams.items()})


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        (stream(5), stream(5), Verdict.EQUAL),
        (stream(5, age_s=0.0), stream(5, age_s=86_400.0), Verdict.EQUAL),
        (stream(5), stream(7), Verdict.EQUAL),  # what came between touched another part
        (stream(5), stream(7, 2, b"b" * 16), Verdict.BEHIND),
        (stream(5), None, Verdict.ABSENT),
        (stream(5, 0), stream(5, 0), Verdict.EQUAL),
        (stream(5), stream(5, 0), Verdict.DIFFERENT),
        (stream(5), stream(5, 1, b"b" * 16), Verdict.DIFFERENT),
        (stream(5), stream(5, 2, b"b" * 16, exact=False), Verdict.SETTLING),
    ],
)
def test_verdict_follows_from_sequence_numbers_and_digests(
    one: StreamDigest, other: StreamDigest | None, verdict: Verdict
) -> None:
    for pair in ({"a": one, "b": other}, {"b": other, "a": one}):
        found = rows(**pair)
        assert [row.verdict for row in found] == [verdict]
        assert worst(found) is verdict
        assert bool(found[0].words) is (verdict is not Verdict.EQUAL)


def test_words_name_who_is_behind_and_who_repairs() -> None:
    (behind,) = rows(a=stream(5), b=stream(9, 2, b"b" * 16), c=stream(9, 2, b"b" * 16))
    assert behind.behind == 4
    assert behind.words.startswith("a missed something: what is missing is asked for again")
    (different,) = rows(a=stream(5), b=stream(5, 3, b"b" * 16, synced=False))
    assert "a holds 1, b holds 3: b knows, and is repairing it" in different.words
    (unsure,) = rows(a=stream(5), b=stream(5, 3, b"b" * 16))
    assert "next heartbeat" in unsure.words


def test_two_that_differ_are_found_when_a_third_is_ahead() -> None:
    (row,) = rows(a=stream(5), b=stream(5, 3, b"b" * 16), c=stream(9, 4, b"c" * 16))
    assert row.verdict is Verdict.DIFFERENT
    assert "at event 5 a holds 1, b holds 3:" in row.words


def test_old_and_new_epoch_are_explained_when_only_one_has_met_the_new_one() -> None:
    found = rows(a=stream(5, epoch=1), b=stream(1, epoch=2))
    assert [row.verdict for row in found] == [Verdict.ABSENT] * 2
    assert all("restarted" in row.words for row in found)


def test_agent_that_is_gone_is_not_promised_to_come() -> None:
    stale = StreamDigest(NodeTrust("n1", 1, StreamState.STALE, "not heard", 9.0, 0, "h:1"), 5, 5, (), True)
    (row,) = rows(a=stale, b=None)
    assert row.verdict is Verdict.ABSENT
    assert "silent" in row.words
    assert "it will" not in row.words


def test_nothing_is_equal_to_nothing() -> None:
    assert worst(rows(a=None, b=None)) is Verdict.EQUAL


def sketch_of(numbers: range, *, cells: int = 64) -> bytes:
    sketch = Sketch(cells)
    sketch.insert(b"".join(number.to_bytes(16, "little") for number in numbers), 16)
    return sketch.encode()


def test_blocks_are_named_when_two_sketches_differ() -> None:
    found = difference(sketch_of(range(1, 1000)), sketch_of(range(3, 1004)))
    assert found is not None
    here, there = ({packed[at] + 256 * packed[at + 1] for at in range(0, len(packed), 16)} for packed in found)
    assert here == {1, 2}
    assert there == {1000, 1001, 1002, 1003}
    assert difference(sketch_of(range(1, 9)), sketch_of(range(1, 9))) == (b"", b"")
    assert difference(sketch_of(range(1, 1000)), sketch_of(range(2000, 3000))) is None


@pytest.mark.parametrize("bad", [b"", b"x" * 40, sketch_of(range(3), cells=32), sketch_of(range(3))[:-1], b"\0" * 1576])
def test_what_is_no_sketch_of_that_size_is_refused(bad: bytes) -> None:
    for pair in ((bad, sketch_of(range(3))), (sketch_of(range(3)), bad)):
        with pytest.raises(ValueError, match="sketch"):
            difference(*pair)
