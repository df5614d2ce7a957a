"""Which log lines are held back: the rules on examples, and against a model on drawn histories."""

from __future__ import annotations

from collections import Counter
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from kvdir.core.repeats import Repeats

INTERVAL_S = 10.0


def made(**options: int) -> Repeats[str]:
    return Repeats(interval_s=INTERVAL_S, **({"first": 2, "max_keys": 3} | options))  # type: ignore[arg-type]


def test_first_few_are_written_when_a_line_repeats() -> None:
    repeats = made()
    assert [repeats.offer("k", str(n), float(n)) for n in range(4)] == [[("0", 0)], [("1", 0)], [], []]


def test_newest_is_written_with_the_number_of_the_others_when_the_interval_ends() -> None:
    repeats = made()
    for n in range(6):
        repeats.offer("k", str(n), 0.0)
    assert repeats.due(9.9) == []
    assert repeats.due(10.0) == [("5", 3)]
    assert repeats.suppressed == 3
    assert [repeats.offer("k", "6", 11.0), repeats.due(20.0)] == [[], [("6", 0)]]


def test_one_is_written_an_interval_when_a_line_goes_on() -> None:
    repeats = made()
    written = [pair for n in range(100) for pair in repeats.offer("k", str(n), n / 2) + repeats.due(n / 2)]
    assert written == [("0", 0), ("1", 0), ("20", 18), ("40", 19), ("60", 19), ("80", 19)]


def test_line_may_speak_up_again_when_it_was_quiet() -> None:
    repeats = made()
    for n in range(5):
        repeats.offer("k", str(n), 0.0)
    assert repeats.due(10.0) == [("4", 2)]
    assert repeats.due(20.0) == []
    assert len(repeats) == 0
    assert [repeats.offer("k", str(n), 21.0) for n in range(3)] == [[("0", 0)], [("1", 0)], []]


def test_what_was_held_back_is_written_when_another_key_takes_its_place() -> None:
    repeats = made(max_keys=1)
    for n in range(4):
        repeats.offer("k", f"k{n}", 0.0)
    assert repeats.offer("other", "o", 1.0) == [("k3", 1), ("o", 0)]


Steps = st.lists(
    st.tuples(st.sampled_from("abcde"), st.floats(0, 15, allow_nan=False), st.booleans()), min_size=1, max_size=200
)


@given(Steps)
def test_every_line_is_written_or_counted_when_histories_are_drawn(steps: list[tuple[str, float, bool]]) -> None:
    repeats, now_s, numbers = made(), 0.0, count()
    offered: Counter[str] = Counter()
    accounted: Counter[str] = Counter()
    last_offer_s: dict[str, float] = {}
    newest: dict[str, str] = {}

    def take(pairs: list[tuple[str, int]]) -> None:
        for item, before in pairs:
            accounted[item[0]] += 1 + before

    for key, pause_s, look in steps:
        now_s += pause_s
        if look:
            late = repeats.due(now_s)
            last_offer_s.update((item[0], now_s) for item, _ in late)  # it was seen: it is written just now
            take(late)
        item = newest[key] = f"{key}{next(numbers)}"
        pairs = repeats.offer(key, item, now_s)
        offered[key] += 1
        if now_s - last_offer_s.get(key, -1e9) >= 2 * INTERVAL_S:
            assert (item in dict(pairs)) is True, "what was not seen lately is written"
        last_offer_s[key] = now_s
        take(pairs)
        assert len(repeats) <= 3
        assert all(accounted[name] <= offered[name] for name in offered)
    rest = repeats.rest()
    take(rest)
    assert accounted == offered
    assert all(item == newest[item[0]] for item, _ in rest), "the newest of what was held back is the one that is written"
    assert repeats.suppressed <= sum(offered.values())
