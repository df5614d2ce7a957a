"""Scores against a brute-force oracle: token by token and rank by rank, without vectors, runs or levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdir.core.best_tiers import Answered
from kvdir.core.instance import parse
from kvdir.core.score import WEIGHTS, score
from kvdir.core.serving import Engines, Serving
from kvdir.location import Tier
from kvdir.namespace import Namespace
from kvdir.testing.made_answer import made_answer

Held = Mapping[str, Mapping[Tier, frozenset[int]]]

BLOCKS, TOKENS, MODEL = 6, 4, "m"
STREAMS = ("a", "b", "a/x", "a/y@0", "a/y@1", "b/x", "/z")


def name(scheme: str, **fields: int | str) -> Namespace:
    return Namespace.announced(model=MODEL, block_tokens=TOKENS, hash_scheme=scheme, hash_seed="0", **fields)  # type: ignore[arg-type]


FULL = tuple(map(name, ("one", "two")))
WINDOW = (
    name("one", kind="sliding_window", window_tokens=2 * TOKENS),
    name("two", kind="sliding_window", window_tokens=2 * TOKENS),
)
POINT = tuple(name(scheme, kind="recurrent") for scheme in ("one", "two"))

positions = st.frozensets(st.integers(0, BLOCKS - 1)) | st.integers(0, BLOCKS).map(lambda count: frozenset(range(count)))
held = st.dictionaries(st.sampled_from(STREAMS), st.dictionaries(st.sampled_from(Tier), positions, max_size=3), max_size=5)
names = st.lists(held, min_size=1, max_size=2)
serving = st.frozensets(st.sampled_from([stream for stream in STREAMS if "/" in stream]))


def best_tier(holders: Sequence[Held], streams: Sequence[str], position: int) -> int:
    """9: nobody has it."""
    return min((tier for who in holders for s in streams for tier, at in who.get(s, {}).items() if position in at), default=9)


def needs(kind: str, blocks: int) -> range:
    """Positions that a restore after `blocks` blocks reads."""
    match kind:
        case "sliding_window":  # 8 tokens, of which the next one is its own: the 7 before it lie in 2 blocks
            return range(max(0, blocks - 2), blocks)
        case "recurrent":
            return range(blocks - 1, blocks)
    return range(blocks)


def longest(part: Sequence[tuple[str, Sequence[Held]]], streams: Sequence[str], level: int) -> int:
    return max(
        count
        for count in range(BLOCKS + 1)
        if count == 0 or all(best_tier(holders, streams, at) <= level for kind, holders in part for at in needs(kind, count))
    )


def ranks(part: Sequence[tuple[str, Sequence[Held]]], served: frozenset[str]) -> dict[tuple[str, int], tuple[str, ...]]:
    """By (instance, rank) the streams that it may restore from."""
    named = {stream for _, holders in part for who in holders for stream in who}
    out = {}
    for stream in named | served:
        node, engine, rank = parse(stream)
        if engine:
            out[f"{node}/{engine}", rank or 0] = (stream, node)
    carried = {instance.partition("/")[0] for instance, _ in out}
    return out | {(node, 0): (node,) for node in named if "/" not in node and node not in carried}


def check(kinds: Sequence[tuple[str, Sequence[Namespace]]], holders: Sequence[Sequence[Held]], served: frozenset[str]) -> None:
    part = [(kind, who) for (kind, _), who in zip(kinds, holders, strict=True)]
    answered = [
        [Answered(namespace, made_answer(who, BLOCKS)) for namespace, who in zip(namespaces, group, strict=False)]
        for (_, namespaces), group in zip(kinds, holders, strict=True)
    ]
    found = score([answered], Engines(Serving(stream, frozenset({MODEL})) for stream in served))
    allowed = ranks(part, served)
    reached = {key: tuple(longest(part, streams, level) * TOKENS for level in Tier) for key, streams in allowed.items()}
    expected = {key: through for key, through in reached.items() if any(through)}
    assert {(item.instance, rank.dp_rank): rank.through for item in found.instances for rank in item.ranks} == expected
    for item in found.instances:
        assert sum(tokens for _, tokens in item.tiers) == item.matched_tokens
        assert item.score == round(sum(WEIGHTS[tier] * tokens for tier, tokens in item.tiers), 6)
        if kinds[0][0] == "full":
            best = max((worth(part, allowed[key]), through[-1]) for key, through in expected.items() if key[0] == item.instance)
            assert (item.score, item.matched_tokens) == best


def worth(part: Sequence[tuple[str, Sequence[Held]]], streams: Sequence[str]) -> float:
    """Of the first group, which keeps the whole prefix."""
    tiers = [best_tier(part[0][1], streams, position) for position in range(longest(part, streams, Tier.REMOTE))]
    return round(sum(WEIGHTS[tier] * tiers.count(tier) * TOKENS for tier in Tier), 6)


@settings(max_examples=100, deadline=None)
@given(names, serving)
def test_scores_are_those_of_the_oracle_when_one_group_keeps_the_prefix(full: list[Held], served: frozenset[str]) -> None:
    check([("full", FULL)], [full], served)


@settings(max_examples=100, deadline=None)
@given(names, names, serving)
def test_scores_are_those_of_the_oracle_when_a_window_has_to_agree(
    full: list[Held], window: list[Held], served: frozenset[str]
) -> None:
    check([("full", FULL), ("sliding_window", WINDOW)], [full, window], served)


@settings(max_examples=60, deadline=None)
@given(names, names, serving)
def test_scores_are_those_of_the_oracle_when_state_is_recurrent(
    window: list[Held], point: list[Held], served: frozenset[str]
) -> None:
    check([("sliding_window", WINDOW), ("recurrent", POINT)], [window, point], served)
