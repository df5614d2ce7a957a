"""Residency's rules one by one; the model test has the histories."""

from __future__ import annotations

from typing import Any

from kvdir.core.event import EventKind
from kvdir.engines import (
    Applied,
    Cleared,
    DecodedBatch,
    EngineIdentity,
    Group,
    Reason,
    Removed,
    Residency,
    Stored,
    told_scheme,
)
from kvdir.hashing import LOW64, SCHEMES, parse
from kvdir.location import Tier
from kvdir.namespace import StateKind


def packed(*hashes: int, width: int = 8) -> bytes:
    return b"".join(item.to_bytes(width, "big") for item in hashes)


def stored(*hashes: int, tier: Tier = Tier.GPU, group: Group | None = None, block_tokens: int = 16, **more: Any) -> Stored:
    return Stored(packed(*hashes), 8, tier, group or Group(), block_tokens, **more)


def removed(*hashes: int, tier: Tier = Tier.GPU, group: Group | None = None) -> Removed:
    return Removed(packed(*hashes), 8, tier, group or Group())


def residency(**more: Any) -> Residency:
    return Residency(EngineIdentity(model="m", hash_scheme="vllm:sha256_cbor"), **more)


def tell(it: Residency, *events: Any) -> Applied:
    return it.apply(DecodedBatch(0.0, 0, events, {}))


def held(it: Residency) -> dict[Tier, int]:
    return {Tier(count.tier): count.blocks for count in it.counts()}


def test_a_second_copy_needs_a_second_removal_when_the_last_block_was_computed_again() -> None:
    it = residency()
    tell(it, stored(1, 2))
    assert tell(it, stored(2, parent=packed(1))).events == ()
    assert tell(it, removed(2)).events == ()
    assert [event.kind for event in tell(it, removed(2)).events] == [EventKind.REMOVED]


def test_copies_are_forgotten_when_the_engine_clears() -> None:
    it = residency()
    tell(it, stored(1), stored(1, parent=b"p"), Cleared(), stored(1), removed(1))
    assert held(it) == {}


def test_a_report_adds_no_copy_when_all_of_it_is_held() -> None:
    it = residency()
    tell(it, stored(1, 2), stored(1, 2))
    assert it.reannounced_blocks == 2
    tell(it, removed(1, 2))
    assert held(it) == {}


def test_one_block_reported_again_is_a_copy_unless_the_engine_reports() -> None:
    copies, reports = residency(), residency(full_reports=True)
    for it in (copies, reports):
        tell(it, stored(1), stored(1), removed(1))
    assert held(copies) == {Tier.GPU: 1}
    assert held(reports) == {}


def test_a_repeated_store_adds_nothing_when_the_dialect_tells_of_a_set() -> None:
    it = residency(copies=False)
    tell(it, stored(1, parent=b"p"), stored(1, parent=b"p"), removed(1))
    assert held(it) == {}


def test_tiers_are_kept_apart_when_a_block_is_in_two() -> None:
    it = residency()
    tell(it, stored(1), stored(1, tier=Tier.CPU), removed(1))
    assert held(it) == {Tier.CPU: 1}


def test_a_block_of_unknown_size_is_that_of_its_other_tier_when_an_offload_does_not_say() -> None:
    it = residency()
    tell(it, stored(1, adapter="sql"), stored(1, tier=Tier.CPU, block_tokens=0))
    (namespace,) = it.namespaces.values()
    assert namespace.adapter == "sql"
    assert held(it) == {Tier.GPU: 1, Tier.CPU: 1}


def test_a_group_is_remembered_when_later_events_do_not_describe_it() -> None:
    it = residency()
    tell(it, stored(1, group=Group(3, StateKind.SLIDING_WINDOW, 64)))
    tell(it, stored(9, tier=Tier.CPU, group=Group(3), block_tokens=0))
    (namespace,) = it.namespaces.values()
    assert namespace.groups[0].window_tokens == 64


def test_a_block_is_refused_when_nothing_says_its_size_or_kind() -> None:
    it = residency()
    assert tell(it, stored(1, block_tokens=0)).rejected == {Reason.NO_BLOCK_SIZE: 1}
    assert tell(it, stored(1, group=Group(2))).rejected == {Reason.UNKNOWN_KIND: 1}
    assert held(it) == {}


def test_groups_of_one_kind_count_together_when_a_second_one_appears() -> None:
    it = residency()
    first, second = (Group(index, StateKind.SLIDING_WINDOW, 64) for index in (0, 1))
    assert tell(it, stored(1, 2, group=first)).events
    assert held(it) == {Tier.GPU: 2}
    tell(it, stored(2, 3, group=second))
    assert held(it) == {Tier.GPU: 1}
    tell(it, removed(2, group=Group(0)))
    assert held(it) == {}


def test_nothing_is_counted_below_zero_when_groups_say_different_adapters_of_one_block() -> None:
    it = residency()
    first, second = (Group(index, StateKind.SLIDING_WINDOW, 64) for index in (0, 1))
    tell(it, stored(9, group=first), stored(9, group=second))
    assert tell(it, stored(1, group=first, adapter="a"), stored(1, group=second, adapter="b")).events == ()
    tell(it, removed(1, group=Group(0)))
    assert held(it) == {Tier.GPU: 1}


def test_every_tier_is_emptied_when_the_engine_clears() -> None:
    it = residency()
    tell(it, stored(1))
    assert tell(it, Cleared()).doubt == ""
    tell(it, stored(1), stored(1, tier=Tier.CPU))
    applied = tell(it, Cleared())
    assert {event.tier for event in applied.events} == {Tier.GPU, Tier.CPU}
    assert applied.cleared
    assert "without saying which tiers" in applied.doubt
    assert held(it) == {}
    assert tell(it, Cleared()).doubt  # of what the other tier may hold still, nobody told us


def test_only_its_tier_is_emptied_when_a_clearing_names_one() -> None:
    it = residency(copies=False)
    tell(it, stored(1), stored(1, tier=Tier.CPU))
    assert not tell(it, Cleared(Tier.CPU)).cleared
    assert held(it) == {Tier.GPU: 1}


def test_nothing_more_is_taken_when_it_is_full() -> None:
    it = residency(max_blocks=3)
    tell(it, stored(1, 2))
    applied = tell(it, stored(3, 4))
    assert applied.rejected == {Reason.TOO_MANY_BLOCKS: 1}
    assert "max_blocks" in applied.doubt
    assert it.blocks == 2


def test_namespaces_are_bounded_when_adapters_never_end() -> None:
    it = residency()
    for number in range(300):
        applied = tell(it, stored(number, adapter=f"a{number}"))
    assert applied.rejected == {Reason.TOO_MANY_NAMESPACES: 1}
    assert len(it.namespaces) == 256


def test_the_scheme_says_how_much_of_a_hash_is_known_when_widths_differ() -> None:
    it = residency()
    tell(it, stored(1), Stored(packed(1, width=32), 32, Tier.GPU, Group(), 16))
    assert {namespace.hash_scheme for namespace in it.namespaces.values()} == {"vllm:sha256_cbor:low64", "vllm:sha256_cbor"}


def test_what_the_decoder_refused_is_a_doubt_when_it_may_have_changed_something() -> None:
    it = residency()
    assert it.apply(DecodedBatch(0.0, 0, (), {Reason.UNKNOWN_MEDIUM: 1})).doubt == ""
    assert it.apply(DecodedBatch(0.0, 0, (), {Reason.UNDECODABLE_EVENT: 1})).doubt


def test_changes_of_other_blocks_are_joined_when_a_batch_mixes_them() -> None:
    it = residency()
    tell(it, stored(1, 2, 3, 4))
    events = tell(it, removed(1), stored(5, parent=b"p"), removed(2), stored(6, parent=b"p")).events
    assert [(event.kind, event.blocks) for event in events] == [(EventKind.REMOVED, 2), (EventKind.STORED, 2)]


def test_a_block_is_what_its_last_change_says_when_it_comes_and_goes_in_one_batch() -> None:
    it = residency()
    events = tell(it, stored(1), removed(1), stored(1), stored(2, parent=b"p"), removed(2)).events
    assert [(event.kind, event.blocks) for event in events] == [
        (EventKind.STORED, 1),
        (EventKind.REMOVED, 1),
        (EventKind.STORED, 2),
        (EventKind.REMOVED, 1),
    ]
    assert held(it) == {Tier.GPU: 1}


def test_only_what_comes_later_is_held_when_a_batch_clears_in_its_middle() -> None:
    it = residency()
    events = tell(it, stored(1), Cleared(), stored(2)).events
    assert [event.kind for event in events] == [EventKind.STORED, EventKind.CLEARED, EventKind.STORED]
    assert events[2].packed == packed(2)


def test_events_of_one_place_are_joined_when_a_batch_removes_one_by_one() -> None:
    it = residency()
    tell(it, stored(*range(1, 9)))
    (event,) = tell(it, *[removed(number) for number in range(1, 9)]).events
    assert event.blocks == 8


def test_every_scheme_that_is_told_can_be_computed_when_it_is_known() -> None:
    for name, scheme in SCHEMES.items():
        for every in ("", "@16"):
            parse(told_scheme(name + every, 8))
            assert told_scheme(name + every, 32) == name + every
            assert told_scheme(name, 8).endswith(LOW64) == (scheme.width > 8)
    assert told_scheme("opaque", 8) == "opaque"
