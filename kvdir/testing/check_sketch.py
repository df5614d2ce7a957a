"""Contract suite of the sketch alone; `kvdir.testing.check_index` runs it together with the index's.

Owns what every `BlockSketch` must do: depend on the set alone, name a difference exactly or say that it is too large, and
refuse what is no sketch.
"""

from collections.abc import Callable
from functools import partial

from kvdir.testing.index_fixture import Implementation, fingerprints, refuses

__all__ = ["SKETCH_CHECKS"]


def a_sketch_depends_on_the_set_alone(made: Implementation) -> None:
    one, two = made.open_sketch(128), made.open_sketch(128)
    assert (one.count, one.digest) == (0, bytes(16))
    one.insert(fingerprints(range(50), 32), 32)
    two.insert(fingerprints([*range(49, 19, -1), 77, *range(20)], 16), 16)
    assert one.digest != two.digest
    two.remove(fingerprints([77]), 16)
    assert (one.count, one.digest, one.encode()) == (50, two.digest, two.encode())
    copy = one.copy()
    copy.insert(fingerprints([1000]), 16)
    assert (one.count, copy.count) == (50, 51)
    one.clear()
    assert one.encode() == made.open_sketch(128).encode()
    one.insert(fingerprints([1], 8), 8)
    two.clear()
    two.insert(fingerprints([1], 8) + bytes(8), 16)
    assert one.encode() == two.encode(), "8-byte fingerprints count as zero-padded to 16"


def a_sketch_names_the_difference(made: Implementation) -> None:
    here, there = made.open_sketch(128), made.open_sketch(128)
    here.insert(fingerprints(range(300)), 16)
    there.insert(fingerprints(range(30, 340)), 16)
    found = here.difference(there.encode())
    assert found is not None
    assert [sorted(_items(part)) for part in found] == [
        sorted(_items(fingerprints(range(30)))),
        sorted(_items(fingerprints(range(300, 340)))),
    ]
    assert here.difference(here.encode()) == (b"", b"")
    there.insert(fingerprints(range(1000, 2000)), 16)
    assert here.difference(memoryview(there.encode())) is None


def _items(packed: bytes) -> list[bytes]:
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]


def a_folded_sketch_is_the_same_set_in_fewer_cells(made: Implementation) -> None:
    whole = made.open_sketch(384)
    whole.insert(fingerprints(range(40)), 16)
    for cells in (4, 12, 128, 384):
        small = made.open_sketch(cells)
        small.insert(fingerprints(range(40)), 16)
        assert whole.folded(cells).encode() == small.encode(), cells
    for cells in (0, 6, 256, 768):
        refuses(partial(whole.folded, cells), "cells")


def a_sketch_refuses_what_is_no_sketch(made: Implementation) -> None:
    sketch = made.open_sketch(64)
    sketch.insert(fingerprints(range(20)), 16)
    good = sketch.encode()
    assert len(good) == 40 + 64 * 24
    refuses(lambda: sketch.difference(b""), "sketch")
    refuses(lambda: sketch.difference(good[:-1]), "damaged")
    refuses(lambda: sketch.difference(good + b"\0"), "damaged")
    refuses(lambda: sketch.difference(b"XXXX" + good[4:]), "sketch")
    refuses(lambda: sketch.difference(good[:4] + b"\x09\0" + good[6:]), "version")
    refuses(lambda: sketch.difference(made.open_sketch(128).encode()), "cells")
    refuses(lambda: sketch.difference(good[:100] + b"\xff" + good[101:]), "damaged")
    for cells in (0, 6, 2**18 + 4):
        refuses(partial(made.open_sketch, cells), "cells")
    refuses(lambda: sketch.insert(b"123", 16), "multiple")
    refuses(lambda: sketch.remove(b"", 5), "width")
    assert sketch.encode() == good


SKETCH_CHECKS: tuple[Callable[[Implementation], None], ...] = (
    a_sketch_depends_on_the_set_alone,
    a_sketch_names_the_difference,
    a_folded_sketch_is_the_same_set_in_fewer_cells,
    a_sketch_refuses_what_is_no_sketch,
)
