"""Contract suite of the block store: run it against any implementation of `kvdir.store.base.BlockStore`.

Owns what every store must do; performance, memory and faults of servers are not in here. A check gets `Open`, each call of
which opens one more store over the same, at first empty, directory: what several coordinators are.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_contract(check): await check(open_over_an_empty_directory)

Each check raises AssertionError on the first breach, closes nothing (whoever made `Open` does), and gives each call a deadline.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from kvdir.errors import KvdirError
from kvdir.index.reference import ReferenceIndex
from kvdir.store.base import (
    BlockStore,
    Change,
    ChangeKind,
    Counts,
    Fenced,
    Found,
    Position,
    StoreLost,
    StoreUnavailable,
    Writer,
)
from kvdir.testing.index_fixture import fingerprints, numbers_of

__all__ = ["CHECKS", "D", "Open", "check_directory_store", "held", "remove", "store"]

Open = Callable[[], Awaitable[BlockStore]]
D = 20.0
"""Deadline of a call that is to succeed, seconds; a busy machine must not make a contract fail."""
NAMESPACE = b"namespace".ljust(32, b".")


async def check_directory_store(fresh: Callable[[], Open]) -> None:
    """fresh: an empty directory for each check."""
    for check in CHECKS:
        await check(fresh())


def store(holder: int, numbers: Sequence[int] | range, *, width: int = 16, scope: int = 1) -> Change:
    """Made-up blocks, one per number."""
    return Change(ChangeKind.STORE, holder, scope, fingerprints(numbers, width), width)


def remove(holder: int, numbers: Sequence[int] | range, *, width: int = 16, scope: int = 1) -> Change:
    return Change(ChangeKind.REMOVE, holder, scope, fingerprints(numbers, width), width)


def runs_of(found: Found) -> list[tuple[int, int, tuple[int, ...]]]:
    """(start, count, holders) of each run."""
    return [(start, count, numbers_of(found.sets[at])) for start, count, at in struct.iter_unpack("<III", found.runs)]


async def held(over: BlockStore, numbers: Sequence[int] | range, *, prefix: bool = False, scope: int = 1) -> Any:
    """What a lookup of made-up blocks finds: (start, count, holders) of each run."""
    return runs_of(await over.lookup(fingerprints(numbers), 16, scope=scope, prefix=prefix, deadline_s=D))


async def taken(over: BlockStore, node: str = "node-a", epoch: int = 7) -> Writer:
    return (await over.take(node, epoch, deadline_s=D)).writer


async def holder_of(over: BlockStore, writer: Writer, *, tier: int = 2, visible: bool = True) -> int:
    (number,) = await over.create(writer, [(NAMESPACE, tier)], visible=visible, deadline_s=D)
    return number


async def refuses(what: Coroutine[Any, Any, Any], error: type[BaseException]) -> BaseException:
    try:
        await what
    except error as raised:
        return raised
    raise AssertionError(f"{error.__name__} was due")


# -- blocks ------------------------------------------------------------------------------------------------------------------


async def a_write_counts_what_it_changed(opened: Open) -> None:
    over = await opened()
    writer = await taken(over)
    one, two = await holder_of(over, writer), await holder_of(over, writer, tier=1)
    first = [store(one, range(10)), store(one, range(5, 15)), store(two, range(3)), remove(one, [0, 99])]
    assert await over.write(writer, first, deadline_s=D) == (10, 5, 3, 1)
    assert await over.write(writer, [store(one, range(15))], deadline_s=D) == (1,)
    assert await over.write(writer, [store(one, [20, 20, 20])], deadline_s=D) == (1,), "a block twice counts once"
    assert await over.write(writer, [], deadline_s=D) == ()
    assert (await over.counts([one, two, 12345], deadline_s=D)).blocks == {one: 16, two: 3, 12345: 0}
    assert (await over.counts([], deadline_s=D)).blocks == {}


async def nothing_is_lost_in_a_store_that_nobody_wrote_to(opened: Open) -> None:
    over = await opened()
    for _ in range(2):
        assert await over.counts([7], deadline_s=D) == Counts({7: 0}, 0)
        assert (await over.lookup(fingerprints(range(100)), 16, scope=1, deadline_s=D)).lost_buckets == 0
        await taken(over)


async def changes_of_one_batch_apply_in_order(opened: Open) -> None:
    over = await opened()
    writer = await taken(over)
    one = await holder_of(over, writer)
    batch = [store(one, range(50)), remove(one, range(25)), store(one, range(5)), remove(one, [0]), store(one, [0])]
    assert await over.write(writer, batch, deadline_s=D) == (50, 25, 5, 1, 1)
    assert await held(over, range(50)) == [(0, 5, (one,)), (25, 25, (one,))]


async def writing_the_same_again_changes_nothing(opened: Open) -> None:
    over = await opened()
    writer = await taken(over)
    one = await holder_of(over, writer)
    for _ in range(3):
        await over.write(writer, [store(one, range(100)), remove(one, range(40))], deadline_s=D)
    assert await held(over, range(100)) == [(40, 60, (one,))]
    assert (await over.counts([one], deadline_s=D)).blocks == {one: 60}


async def sparse_answers_every_position(opened: Open) -> None:
    over = await opened()
    writer = await taken(over)
    one, two = sorted([await holder_of(over, writer), await holder_of(over, writer)])
    await over.write(writer, [store(one, range(10)), store(two, [*range(4, 8), 30])], deadline_s=D)
    both = (one, two)
    assert await held(over, [0, 1, 20, 4, 5, 6, 30, 21, 22, 9, 9, 0]) == [
        (0, 2, (one,)),
        (3, 3, both),
        (6, 1, (two,)),
        (9, 3, (one,)),
    ]
    found = await over.lookup(b"", 16, scope=1, deadline_s=D)
    assert (found.runs, found.sets, found.hits, found.lost_buckets) == (b"", [], 0, 0)
    assert (await over.lookup(fingerprints(range(12)), 16, scope=1, deadline_s=D)).hits == 10


async def the_first_8_bytes_and_the_scope_make_the_block(opened: Open) -> None:
    over = await opened()
    writer = await taken(over)
    one = await holder_of(over, writer)
    await over.write(writer, [store(one, range(3), width=32, scope=5)], deadline_s=D)
    assert (await over.lookup(fingerprints(range(4), 8), 8, scope=5, deadline_s=D)).hits == 3
    assert (await over.lookup(fingerprints(range(4), 8), 8, scope=6, deadline_s=D)).hits == 0


async def a_prefix_goes_as_far_as_one_holder_has_everything(opened: Open) -> None:
    over = await opened()
    writer = await taken(over)
    one, two, three, four = sorted([await holder_of(over, writer) for _ in range(4)])
    parts = ((one, range(300)), (two, range(130)), (three, range(300, 600)), (four, range(1, 600)))
    await over.write(writer, [store(holder, blocks) for holder, blocks in parts], deadline_s=D)
    assert await held(over, range(600), prefix=True) == [
        (0, 1, (one, two)),
        (1, 129, (one, two, four)),
        (130, 170, (one, four)),
    ]
    assert (await held(over, range(1, 600), prefix=True))[-1][:2] == (299, 300), "holder four has the rest"
    assert await held(over, [999, *range(600)], prefix=True) == []


async def prefix_ends_are_exact_at_every_length(opened: Open) -> None:
    over = await opened()
    writer = await taken(over)
    for length in (1, 2, 31, 32, 33, 63, 64, 65, 66, 127, 128, 200):
        one, two = await holder_of(over, writer), await holder_of(over, writer)
        await over.write(writer, [store(one, range(length)), store(two, range(length // 2))], deadline_s=D)
        for asked in (1, 2, 32, 64, 65, 66, 97, 128, 220):
            prefix = await held(over, range(asked), prefix=True)
            assert prefix == await held(over, range(asked)), f"{length} held, {asked} asked"
        await over.swap(writer, drop=[one, two], deadline_s=D)


async def many_holders_of_one_block_are_all_kept(opened: Open) -> None:
    over = await opened()
    writer = await taken(over)
    holders = await over.create(writer, [(NAMESPACE, 1)] * 100, visible=True, deadline_s=D)
    await over.write(writer, [store(holder, range(30)) for holder in holders], deadline_s=D)
    assert await held(over, range(30)) == [(0, 30, tuple(sorted(holders)))]
    await over.write(writer, [remove(holder, range(20)) for holder in holders[5:]], deadline_s=D)
    few = tuple(sorted(holders[:5]))
    assert await held(over, range(30)) == [(0, 20, few), (20, 10, tuple(sorted(holders)))]
    await over.write(writer, [remove(holder, range(30)) for holder in holders], deadline_s=D)
    assert await held(over, range(30)) == []
    assert set((await over.counts(holders, deadline_s=D)).blocks.values()) == {0}


async def a_large_batch_is_what_many_small_ones_are(opened: Open) -> None:
    """More than any part of the store takes at once, against the oracle."""
    over, oracle = await opened(), ReferenceIndex(seed=1)
    writer = await taken(over)
    one, two = await holder_of(over, writer), await holder_of(over, writer)
    batch = [
        store(one, range(7000)),
        store(two, range(3000, 9000)),
        remove(one, range(0, 7000, 3)),
        store(one, range(0, 90, 9)),
    ]
    expected = tuple(_applied(oracle, change, {one: 1, two: 2}) for change in batch)
    assert await over.write(writer, batch, deadline_s=D) == expected
    found = await over.lookup(fingerprints(range(9500)), 16, scope=1, deadline_s=D)
    truth = oracle.lookup(fingerprints(range(9500)), 16, scope=1)
    names = {1: one, 2: two}
    assert found.hits == truth.hits
    assert runs_of(found) == [
        (start, count, tuple(sorted(names[holder] for holder in numbers_of(truth.sets[at]))))
        for start, count, at in struct.iter_unpack("<III", truth.runs)
    ]
    counts = (await over.counts([one, two], deadline_s=D)).blocks
    assert counts == {one: oracle.holder_blocks(1), two: oracle.holder_blocks(2)}


def _applied(oracle: ReferenceIndex, change: Change, numbers: dict[int, int]) -> int:
    holder = numbers[change.holder]
    if change.kind is ChangeKind.STORE:
        return oracle.store(change.packed, change.width, scope=change.scope, holder=holder, now_s=1)
    return oracle.remove(change.packed, change.width, scope=change.scope, holder=holder)


async def a_third_party_can_take_a_block_from_a_holder(opened: Open) -> None:
    over, other = await opened(), await opened()
    writer = await taken(over)
    one = await holder_of(over, writer)
    await over.write(writer, [store(one, range(10))], deadline_s=D)
    assert await other.retract(one, fingerprints([3, 4, 99]), 16, scope=1, deadline_s=D) == 2
    assert await other.retract(one, fingerprints([3]), 16, scope=1, deadline_s=D) == 0
    assert await held(over, range(10)) == [(0, 3, (one,)), (5, 5, (one,))]
    assert (await over.counts([one], deadline_s=D)).blocks == {one: 8}
    await over.write(writer, [store(one, [3])], deadline_s=D)


async def bad_input_is_refused_and_changes_nothing(opened: Open) -> None:
    over = await opened()
    writer = await taken(over)
    one = await holder_of(over, writer)
    await over.write(writer, [store(one, range(5))], deadline_s=D)
    bad = (Change(ChangeKind.STORE, one, 1, b"x" * 15, 16), Change(ChangeKind.STORE, one, 1, b"x" * 12, 12))
    for change in bad:
        await refuses(over.write(writer, [change], deadline_s=D), ValueError)
    await refuses(over.lookup(b"x" * 15, 16, scope=1, deadline_s=D), ValueError)
    await refuses(over.save(writer, position=Position(writer.epoch + 1, 3), deadline_s=D), ValueError)
    assert await held(over, range(9)) == [(0, 5, (one,))]


# -- holders and nodes -------------------------------------------------------------------------------------------------------


async def a_lookup_answers_only_visible_holders(opened: Open) -> None:
    over, other = await opened(), await opened()
    writer = await taken(over)
    one, fresh = await holder_of(over, writer), await holder_of(over, writer, visible=False)
    await over.write(writer, [store(one, range(4)), store(fresh, range(2, 8))], deadline_s=D)
    assert await held(other, range(8)) == [(0, 4, (one,))], "an invisible holder makes no run and no hit"
    assert (await over.lookup(fingerprints(range(8)), 16, scope=1, deadline_s=D)).hits == 4
    await over.swap(writer, show=[fresh], drop=[one], deadline_s=D)
    for each in (over, other):
        assert await held(each, range(8)) == [(2, 6, (fresh,))], "everybody sees a swap at once"
    found = await other.lookup(fingerprints(range(8)), 16, scope=1, deadline_s=D)
    assert found.roster.holders.keys() == {fresh}
    record = found.roster.holders[fresh]
    assert (record.node, record.epoch, record.namespace, record.tier, record.visible) == ("node-a", 7, NAMESPACE, 2, True)


async def a_swap_may_be_repeated_and_names_only_ones_own(opened: Open) -> None:
    over = await opened()
    writer, stranger = await taken(over), await taken(over, "node-b")
    one, theirs = await holder_of(over, writer), await holder_of(over, stranger)
    for _ in range(2):
        await over.swap(writer, show=[one], drop=[theirs, 12345], deadline_s=D)
    assert {one, theirs} <= (await over.roster(deadline_s=D)).holders.keys()
    await refuses(over.swap(writer, show=[theirs], drop=[one], deadline_s=D), StoreLost)
    assert one in (await over.roster(deadline_s=D)).holders, "a refused swap changes nothing"


async def a_dropped_holder_is_gone_at_once_and_freed_by_sweeping(opened: Open) -> None:
    over, other = await opened(), await opened()
    writer = await taken(over)
    one, two = await holder_of(over, writer), await holder_of(over, writer)
    await over.write(writer, [store(one, range(500)), store(two, range(400, 600))], deadline_s=D)
    assert await over.sweep(1000, deadline_s=D) == 0, "nothing is dead"
    await over.swap(writer, drop=[one], deadline_s=D)
    assert await held(over, range(600)) == [(400, 200, (two,))]
    freed = steps = 0
    while step := await other.sweep(4, deadline_s=D):
        freed, steps = freed + step, steps + 1
    assert freed == 500, f"in {steps} steps"
    assert (await over.counts([one, two], deadline_s=D)).blocks == {one: 0, two: 200}
    assert await held(over, range(600)) == [(400, 200, (two,))]


async def a_roster_is_a_value_of_its_version(opened: Open) -> None:
    over, other = await opened(), await opened()
    writer = await taken(over)
    before = await other.roster(deadline_s=D)
    one = await holder_of(over, writer)
    after = await other.roster(deadline_s=D)
    assert before.version != after.version
    assert (one in before.holders, one in after.holders) == (False, True)
    assert (await other.roster(deadline_s=D)).version == after.version
    assert (await over.roster(deadline_s=D)) == after


async def a_newer_epoch_drops_what_the_older_had(opened: Open) -> None:
    over = await opened()
    writer, stranger = await taken(over), await taken(over, "node-b")
    one, theirs = await holder_of(over, writer), await holder_of(over, stranger)
    await over.write(writer, [store(one, range(5))], deadline_s=D)
    await over.write(stranger, [store(theirs, [4, 5])], deadline_s=D)
    await over.save(writer, position=Position(7, 5), record=b"address", deadline_s=D)
    again = await over.take("node-a", 8, deadline_s=D)
    assert (again.position, again.record, again.holders) == (None, b"", ())
    assert await held(over, range(9)) == [(4, 2, (theirs,))]
    await refuses(over.take("node-a", 7, deadline_s=D), Fenced)
    await refuses(over.write(writer, [store(one, [1])], deadline_s=D), KvdirError)


async def whoever_takes_a_node_fences_the_writer_before(opened: Open) -> None:
    over, other = await opened(), await opened()
    old = await taken(over)
    one = await holder_of(over, old)
    await over.write(old, [store(one, range(10))], deadline_s=D)
    await over.save(old, position=Position(7, 10), record=b"r", deadline_s=D)
    again = await other.take("node-a", 7, deadline_s=D)
    assert again.writer.token > old.token
    assert again.position == Position(7, 10)
    assert again.record == b"r"
    assert [record.number for record in again.holders] == [one], "the same epoch keeps its holders"
    await refuses(over.write(old, [store(one, range(10, 20))], deadline_s=D), Fenced)
    await refuses(over.write(old, [remove(one, range(10))], deadline_s=D), Fenced)
    await refuses(over.save(old, position=Position(7, 99), deadline_s=D), Fenced)
    await refuses(over.create(old, [(NAMESPACE, 1)], visible=True, deadline_s=D), Fenced)
    await refuses(over.swap(old, drop=[one], deadline_s=D), Fenced)
    assert await other.write(again.writer, [store(one, range(9, 12))], deadline_s=D) == (2,)
    assert await held(over, range(30)) == [(0, 12, (one,))]
    assert (await other.take("node-a", 7, deadline_s=D)).position == Position(7, 10)


async def nodes_do_not_fence_each_other(opened: Open) -> None:
    over = await opened()
    writers = [await taken(over, f"node-{n}", epoch=n + 2**63) for n in range(5)]
    holders = [await holder_of(over, writer) for writer in writers]
    for writer, holder in zip(writers, holders, strict=True):
        await over.write(writer, [store(holder, range(3))], deadline_s=D)
    assert await held(over, range(3)) == [(0, 3, tuple(sorted(holders)))]
    assert {entry.node: entry.epoch for entry in await over.nodes(deadline_s=D)} == {f"node-{n}": n + 2**63 for n in range(5)}


async def what_is_saved_of_a_node_is_everybodys(opened: Open) -> None:
    over, other = await opened(), await opened()
    writer = await taken(over)
    await over.save(writer, record=bytes(range(256)), deadline_s=D)
    await over.save(writer, position=Position(7, 2**40), deadline_s=D)
    (entry,) = await other.nodes(deadline_s=D)
    assert (entry.node, entry.epoch, entry.token) == ("node-a", 7, writer.token)
    assert (entry.position, entry.record) == (Position(7, 2**40), bytes(range(256)))
    assert 0 <= entry.age_s < D
    await over.save(writer, record=b"", deadline_s=D)
    (entry,) = await other.nodes(deadline_s=D)
    assert (entry.position, entry.record) == (Position(7, 2**40), b"")


async def a_node_is_forgotten_only_by_its_token(opened: Open) -> None:
    over, other = await opened(), await opened()
    writer = await taken(over)
    one = await holder_of(over, writer)
    await over.write(writer, [store(one, range(5))], deadline_s=D)
    assert not await other.forget("node-a", writer.token - 1, deadline_s=D)
    assert not await other.forget("nobody", writer.token, deadline_s=D)
    assert await held(other, range(5)) == [(0, 5, (one,))]
    assert await other.forget("node-a", writer.token, deadline_s=D)
    assert (await over.nodes(deadline_s=D), await held(over, range(5))) == ((), [])
    await refuses(over.save(writer, record=b"", deadline_s=D), StoreLost)
    freed = 0
    while step := await over.sweep(1000, deadline_s=D):
        freed += step
    assert freed == 5
    back = await over.take("node-a", 7, deadline_s=D)
    assert (back.position, back.holders) == (None, ())


async def namespaces_are_kept_for_everybody(opened: Open) -> None:
    over, other = await opened(), await opened()
    assert await over.namespaces(deadline_s=D) == {}
    for _ in range(2):
        await over.put_namespace(NAMESPACE, b"\0canonical\r\n", deadline_s=D)
    await other.put_namespace(b"b" * 32, b"", deadline_s=D)
    assert await other.namespaces(deadline_s=D) == {NAMESPACE: b"\0canonical\r\n", b"b" * 32: b""}


async def everybody_sees_one_store(opened: Open) -> None:
    over, other = await opened(), await opened()
    assert over.store_id == other.store_id != 0
    await over.open(deadline_s=D)
    assert over.store_id == other.store_id, "opening again changes nothing"
    assert (await over.health(deadline_s=D)).servers


async def a_deadline_that_is_over_is_unavailable(opened: Open) -> None:
    over = await opened()
    writer = await taken(over)
    one = await holder_of(over, writer)
    calls = (
        over.lookup(fingerprints(range(3)), 16, scope=1, deadline_s=0),
        over.write(writer, [store(one, range(3))], deadline_s=-1),
        over.take("node-b", 1, deadline_s=0),
        over.roster(deadline_s=0),
        over.counts([one], deadline_s=0),
        over.nodes(deadline_s=0),
    )
    for call in calls:
        await refuses(call, StoreUnavailable)
    assert over.figures.failures >= len(calls)


async def a_closed_store_is_unavailable(opened: Open) -> None:
    over = await opened()
    await over.close()
    await over.close()
    await refuses(over.roster(deadline_s=D), StoreUnavailable)
    await over.open(deadline_s=D)
    assert (await over.roster(deadline_s=D)).holders == {}


CHECKS: tuple[Callable[[Open], Coroutine[Any, Any, None]], ...] = (
    a_write_counts_what_it_changed,
    nothing_is_lost_in_a_store_that_nobody_wrote_to,
    changes_of_one_batch_apply_in_order,
    writing_the_same_again_changes_nothing,
    sparse_answers_every_position,
    the_first_8_bytes_and_the_scope_make_the_block,
    a_prefix_goes_as_far_as_one_holder_has_everything,
    prefix_ends_are_exact_at_every_length,
    many_holders_of_one_block_are_all_kept,
    a_large_batch_is_what_many_small_ones_are,
    a_third_party_can_take_a_block_from_a_holder,
    bad_input_is_refused_and_changes_nothing,
    a_lookup_answers_only_visible_holders,
    a_swap_may_be_repeated_and_names_only_ones_own,
    a_dropped_holder_is_gone_at_once_and_freed_by_sweeping,
    a_roster_is_a_value_of_its_version,
    a_newer_epoch_drops_what_the_older_had,
    whoever_takes_a_node_fences_the_writer_before,
    nodes_do_not_fence_each_other,
    what_is_saved_of_a_node_is_everybodys,
    a_node_is_forgotten_only_by_its_token,
    namespaces_are_kept_for_everybody,
    everybody_sees_one_store,
    a_deadline_that_is_over_is_unavailable,
    a_closed_store_is_unavailable,
)
