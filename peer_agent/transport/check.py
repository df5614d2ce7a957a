"""The contract suite of data planes: `check_transport(factory)` passes for every plane, ours or a third party's.

    async def test_my_plane() -> None:
        await check_transport(my_rig)      # my_rig(): async context manager that gives a fresh Rig

Each check gets a rig of its own and raises AssertionError with what was broken. The rules are those of base.py; the first is
part of every check: a block that is OK has exactly the owner's bytes (`Rig.expect`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from peer_agent import _native
from peer_agent.memory.layout import HEADER_BYTES
from peer_agent.transport.base import ReadStatus
from peer_agent.transport.check_rig import DEADLINE_S, LOCK, Rig, with_record
from peer_agent.transport.fake import Fault

OK, ABSENT, STALE = ReadStatus.OK, ReadStatus.ABSENT, ReadStatus.STALE
TORN, CORRUPT, LATE, PEER_LOST = ReadStatus.TORN, ReadStatus.CORRUPT, ReadStatus.LATE, ReadStatus.PEER_LOST

SHORT_S = 0.2
SCHEDULING_S = 2.0
"""How much later than its deadline a read may return on a machine that is busy with other tests."""

Check = Callable[[Rig], Awaitable[None]]
Factory = Callable[[], AbstractAsyncContextManager[Rig]]


async def check_transport(factory: Factory) -> None:
    """Runs every check. A plane's test suite may as well run CHECKS one by one."""
    for check in CHECKS:
        async with factory() as rig:
            await check(rig)


async def reads_exact_bytes(rig: Rig) -> None:
    connection = await rig.connect()
    stored = rig.store(range(8))
    blocks = rig.request(stored)
    outcome = await connection.read(blocks, deadline_s=DEADLINE_S)
    assert rig.expect(outcome, blocks, stored) == [OK] * 8
    await asyncio.wait_for(outcome.settled, DEADLINE_S)


async def reads_nothing_when_nothing_is_asked(rig: Rig) -> None:
    connection = await rig.connect()
    blocks = rig.request(rig.store([]), first=0)
    outcome = await connection.read(blocks, deadline_s=DEADLINE_S)
    assert (outcome.statuses, outcome.bytes_read) == (b"", 0)


async def keeps_absent_blocks_absent(rig: Rig) -> None:
    connection = await rig.connect()
    stored = rig.store(range(4))
    blocks = with_record(rig.request(stored), 1, offset=0, generation=0, checksum=0, length=0, state=0)
    outcome = await connection.read(blocks, deadline_s=DEADLINE_S)
    assert rig.expect(outcome, blocks, stored) == [OK, ABSENT, OK, OK]


async def refuses_other_identities(rig: Rig) -> None:
    """Another fingerprint or namespace than the slot holds is STALE, and only there."""
    connection = await rig.connect()
    stored = rig.store(range(3))
    blocks = rig.request(stored)
    wrong = bytearray(blocks.fingerprints)
    wrong[16] ^= 1
    outcome = await connection.read(replace(blocks, fingerprints=bytes(wrong)), deadline_s=DEADLINE_S)
    assert rig.expect(outcome, blocks, stored) == [OK, STALE, OK]
    foreign = replace(blocks, namespace_digest=bytes(32))
    assert rig.expect(await connection.read(foreign, deadline_s=DEADLINE_S), blocks, stored) == [STALE] * 3


async def refuses_wrong_records(rig: Rig) -> None:
    """Generation, checksum or length that the slot does not have: never OK."""
    connection = await rig.connect()
    stored = rig.store(range(4))
    blocks = rig.request(stored)
    changed = with_record(blocks, 0, generation=4)
    changed = with_record(changed, 1, checksum=1)
    changed = with_record(changed, 2, length=rig.block_bytes - 1)
    statuses = rig.expect(await connection.read(changed, deadline_s=DEADLINE_S), blocks, stored)
    assert statuses[0] is STALE
    assert statuses[1] is CORRUPT
    assert statuses[2] in (ABSENT, CORRUPT)
    assert statuses[3] is OK


async def refuses_odd_generations(rig: Rig) -> None:
    """A slot that is being written is not readable, even by who names its odd generation."""
    connection = await rig.connect()
    stored = rig.store(range(2))
    blocks = rig.request(stored)
    _native.begin_write(rig.owner_arena.region, rig.owner_offsets([0]))
    odd = with_record(blocks, 0, generation=3)
    assert rig.expect(await connection.read(odd, deadline_s=DEADLINE_S), blocks, stored) == [STALE, OK]


async def refuses_reused_slots(rig: Rig) -> None:
    """Retired, and committed again with another block: STALE under the old record, OK under the new one."""
    connection = await rig.connect()
    old = rig.store(range(2))
    blocks = rig.request(old)
    _native.retire(rig.owner_arena.region, rig.owner_offsets([0]))
    assert rig.expect(await connection.read(blocks, deadline_s=DEADLINE_S), blocks, old) == [STALE, OK]
    new = rig.store([0], lock=LOCK + 1)
    assert rig.expect(await connection.read(blocks, deadline_s=DEADLINE_S), blocks, old) == [STALE, OK]
    fresh = rig.request(new, lock=LOCK + 1)
    assert rig.expect(await connection.read(fresh, deadline_s=DEADLINE_S), fresh, new) == [OK]


async def refuses_offsets_that_are_no_slots(rig: Rig) -> None:
    connection = await rig.connect()
    stored = rig.store(range(6))
    blocks = rig.request(stored)
    first = rig.owner_arena.classes[0].first
    end = rig.owner_arena.arena_bytes
    for index, offset in enumerate((0, first + 128, first + 1, end - 128, end, (1 << 64) - 128)):
        changed = with_record(blocks, index, offset=offset)
        statuses = rig.expect(await connection.read(changed, deadline_s=DEADLINE_S), blocks, stored)
        assert statuses[index] in (ABSENT, STALE, CORRUPT), f"offset {offset} gave {statuses[index].name}"
        assert statuses.count(OK) == 5


async def keeps_to_the_destination(rig: Rig) -> None:
    """A record that promises more bytes than our slot holds writes nothing beyond it."""
    connection = await rig.connect()
    stored = rig.store(range(2))
    blocks = rig.request(stored)
    before = bytes(rig.reader_arena.region[: HEADER_BYTES + rig.reader_arena.classes[0].first])
    after_slots = rig.reader_arena.classes[0].offset(2)
    behind = bytes(rig.reader_arena.region[after_slots:])
    changed = with_record(blocks, 1, length=rig.block_bytes + rig.reader_arena.classes[0].stride)
    statuses = rig.expect(await connection.read(changed, deadline_s=DEADLINE_S), blocks, stored)
    assert statuses[0] is OK
    assert statuses[1] in (ABSENT, CORRUPT)
    assert rig.reader_arena.region[: len(before)] == before
    assert rig.reader_arena.region[after_slots:] == behind


async def refuses_destinations_that_are_not_reserved(rig: Rig) -> None:
    connection = await rig.connect()
    stored = rig.store(range(1))
    blocks = rig.request(stored)
    for destination in (0, rig.reader_arena.classes[0].first + 128, rig.reader_arena.arena_bytes, (1 << 64) - 128):
        await _expect_value_error(
            connection.read(replace(blocks, destinations=destination.to_bytes(8, "little")), deadline_s=1)
        )
    _native.commit(rig.reader_arena.region, blocks.destinations, rig.digest, stored.fingerprints, 16, rig.block_bytes, None)
    await _expect_value_error(connection.read(blocks, deadline_s=1))


async def refuses_contradictory_lists(rig: Rig) -> None:
    connection = await rig.connect()
    blocks = rig.request(rig.store(range(2)))
    await _expect_value_error(connection.read(replace(blocks, records=blocks.records[:-1]), deadline_s=1))
    await _expect_value_error(connection.read(replace(blocks, fingerprints=blocks.fingerprints[:-1]), deadline_s=1))
    await _expect_value_error(connection.read(replace(blocks, destinations=blocks.destinations[:8]), deadline_s=1))
    await _expect_value_error(connection.read(replace(blocks, destinations=blocks.destinations[:8] * 2), deadline_s=1))


async def refuses_other_epochs(rig: Rig) -> None:
    connection = await rig.connect()
    stored = rig.store(range(2))
    blocks = replace(rig.request(stored), epoch=rig.owner_arena.epoch + 1)
    statuses = rig.expect(await connection.read(blocks, deadline_s=DEADLINE_S), blocks, stored)
    assert set(statuses) <= {STALE, PEER_LOST}


async def serves_only_under_a_live_lock(rig: Rig) -> None:
    """Unknown, ended and expired locks, slots that the lock does not cover, and the capability of an earlier lease of the same
    lock: ABSENT where the owner is asked."""
    if not rig.owner.capabilities().owner_checks_lock:
        return
    connection = await rig.connect()
    stored = rig.store(range(2))
    blocks = rig.request(stored)
    uncovered = with_record(blocks, 1, offset=rig.owner_arena.classes[0].offset(2))
    assert rig.expect(await connection.read(uncovered, deadline_s=DEADLINE_S), blocks, stored) == [OK, ABSENT]
    rig.grant(LOCK + 99, stored.records)
    unknown = replace(blocks, lock=LOCK + 99, capability=rig.capabilities[LOCK + 99])
    rig.owner.revoke(LOCK + 99)
    assert rig.expect(await connection.read(unknown, deadline_s=DEADLINE_S), blocks, stored) == [ABSENT] * 2
    rig.owner.revoke(LOCK)
    rig.owner.revoke(LOCK)
    assert rig.expect(await connection.read(blocks, deadline_s=DEADLINE_S), blocks, stored) == [ABSENT] * 2
    expired = replace(blocks, capability=rig.grant(LOCK, stored.records, lease_s=-0.001))
    assert rig.expect(await connection.read(expired, deadline_s=DEADLINE_S), blocks, stored) == [ABSENT] * 2
    again = replace(blocks, capability=rig.grant(LOCK, stored.records))
    assert rig.expect(await connection.read(again, deadline_s=DEADLINE_S), blocks, stored) == [OK] * 2
    assert rig.expect(await connection.read(blocks, deadline_s=DEADLINE_S), blocks, stored) == [ABSENT] * 2


async def serves_only_who_shows_its_capability(rig: Rig) -> None:
    """None, a cut one, one with any byte changed, and that of another lock: ABSENT or STALE, never a byte and never a hang."""
    if not rig.owner.capabilities().owner_checks_lock:
        return
    connection = await rig.connect()
    stored, other = rig.store(range(2)), rig.store([2], lock=LOCK + 1)
    blocks, theirs = rig.request(stored), rig.request(other, lock=LOCK + 1, first=2)
    right = blocks.capability
    flipped = [right[:at] + bytes([right[at] ^ 1 << at % 8]) + right[at + 1 :] for at in range(len(right))]
    for wrong in (b"", right[:-1], right + b"\0", bytes(len(right)), *flipped):
        outcome = await connection.read(replace(blocks, capability=wrong), deadline_s=DEADLINE_S)
        assert set(rig.expect(outcome, blocks, stored)) <= {ABSENT, STALE}, f"served for {wrong.hex()}"
    crossed = replace(theirs, lock=LOCK, capability=right)
    assert rig.expect(await connection.read(crossed, deadline_s=DEADLINE_S), theirs, other) == [ABSENT]
    assert rig.expect(await connection.read(blocks, deadline_s=DEADLINE_S), blocks, stored) == [OK] * 2
    assert rig.expect(await connection.read(theirs, deadline_s=DEADLINE_S), theirs, other) == [OK]


async def reads_concurrently(rig: Rig) -> None:
    connection = await rig.connect()
    stored = [rig.store([slot], lock=slot + 1) for slot in range(12)]
    requests = [rig.request(one, first=slot, lock=slot + 1) for slot, one in enumerate(stored)]
    outcomes = await asyncio.gather(*(connection.read(blocks, deadline_s=DEADLINE_S) for blocks in requests))
    for outcome, blocks, one in zip(outcomes, requests, stored, strict=True):
        assert rig.expect(outcome, blocks, one) == [OK]


async def is_late_when_the_deadline_has_passed(rig: Rig) -> None:
    connection = await rig.connect()
    stored = rig.store(range(2))
    blocks = rig.request(stored)
    for deadline_s in (0.0, -1.0):
        outcome = await connection.read(blocks, deadline_s=deadline_s)
        assert rig.expect(outcome, blocks, stored) == [LATE] * 2
    again = await connection.read(blocks, deadline_s=DEADLINE_S)
    assert rig.expect(again, blocks, stored) == [OK] * 2


async def is_lost_when_closed(rig: Rig) -> None:
    connection = await rig.connect()
    stored = rig.store(range(2))
    blocks = rig.request(stored)
    await connection.close()
    await connection.close()
    outcome = await connection.read(blocks, deadline_s=DEADLINE_S)
    assert rig.expect(outcome, blocks, stored) == [PEER_LOST] * 2
    assert outcome.settled.done()


async def is_lost_when_the_owner_went_away(rig: Rig) -> None:
    connection = await rig.connect()
    stored = rig.store(range(2))
    blocks = rig.request(stored)
    assert rig.expect(await connection.read(blocks, deadline_s=DEADLINE_S), blocks, stored) == [OK] * 2
    await rig.owner.close()
    rig.owner_arena.close()
    outcome = await connection.read(blocks, deadline_s=DEADLINE_S)
    assert rig.expect(outcome, blocks, stored) == [PEER_LOST] * 2


async def connects_only_to_what_is_there(rig: Rig) -> None:
    descriptor = await rig.owner.export()
    for garbage in (b"", b"\x00", b"\xff" * 64, b"\x01", b"\x63" + descriptor[1:]):
        await _expect_value_error(rig.reader.connect(garbage, deadline_s=1))
    await rig.owner.close()
    rig.owner_arena.close()
    await _expect(ConnectionError, rig.reader.connect(descriptor, deadline_s=DEADLINE_S))


async def survives_faulty_peers(rig: Rig) -> None:
    """Whatever a peer does: a status per block, by the deadline, and never wrong bytes as OK."""
    expected = {
        Fault.CLOSING: {OK, PEER_LOST},
        Fault.WRONG_BYTES: {CORRUPT},
        Fault.WRONG_HEADER: {STALE, CORRUPT},
        Fault.TORN: {TORN},
        Fault.GARBAGE: {PEER_LOST},
    }
    stored = rig.store(range(8))
    for fault, possible in expected.items():
        descriptor = await rig.faulty(fault)
        if descriptor is None:
            continue
        connection = await rig.reader.connect(descriptor, deadline_s=DEADLINE_S)
        blocks = rig.request(stored)
        statuses = rig.expect(await connection.read(blocks, deadline_s=DEADLINE_S), blocks, stored)
        assert set(statuses) <= possible, f"{fault.name} gave {statuses}"
        assert set(statuses) != {OK}


async def is_late_when_the_peer_is_slow(rig: Rig) -> None:
    descriptor = await rig.faulty(Fault.SLOW)
    if descriptor is None:
        return
    connection = await rig.reader.connect(descriptor, deadline_s=DEADLINE_S)
    stored = rig.store(range(2))
    blocks = rig.request(stored)
    begun = time.monotonic()
    outcome = await connection.read(blocks, deadline_s=SHORT_S)
    assert time.monotonic() - begun < SHORT_S + SCHEDULING_S
    assert rig.expect(outcome, blocks, stored) == [LATE] * 2
    await asyncio.wait_for(outcome.settled, DEADLINE_S)


async def ends_reads_when_closed_or_cancelled(rig: Rig) -> None:
    """Neither waits for the slow peer's deadline, and one slow read does not hold up its neighbours for ever."""
    descriptor = await rig.faulty(Fault.SLOW)
    if descriptor is None:
        return
    connection = await rig.reader.connect(descriptor, deadline_s=DEADLINE_S)
    stored = rig.store(range(2))
    blocks = rig.request(stored)
    begun = time.monotonic()
    cancelled = asyncio.create_task(connection.read(blocks, deadline_s=60))
    closed = asyncio.create_task(connection.read(rig.request(stored, first=4), deadline_s=60))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled], timeout=SCHEDULING_S)
    assert cancelled.cancelled()
    await connection.close()
    outcome = await asyncio.wait_for(closed, SCHEDULING_S)
    assert rig.expect(outcome, blocks, stored) == [PEER_LOST] * 2
    assert time.monotonic() - begun < 2 * SCHEDULING_S


async def says_when_late_writes_are_over(rig: Rig) -> None:
    """Where a plane cannot stop a transfer, `settled` is pending for as long as it may write."""
    descriptor = await rig.faulty(Fault.LATE_WRITE)
    if descriptor is None:
        return
    connection = await rig.reader.connect(descriptor, deadline_s=DEADLINE_S)
    stored = rig.store(range(2))
    blocks = rig.request(stored)
    outcome = await connection.read(blocks, deadline_s=SHORT_S)
    assert rig.expect(outcome, blocks, stored) == [LATE] * 2
    assert not outcome.settled.done()


async def _expect_value_error(call: Awaitable[object]) -> None:
    await _expect(ValueError, call)


async def _expect(kind: type[Exception], call: Awaitable[object]) -> None:
    reason = None
    try:
        await call
    except kind as error:
        reason = str(error)
    assert reason is not None, f"no {kind.__name__} for what must be refused"
    assert reason, f"a {kind.__name__} says what is wrong"


CHECKS: tuple[Check, ...] = (
    reads_exact_bytes,
    reads_nothing_when_nothing_is_asked,
    keeps_absent_blocks_absent,
    refuses_other_identities,
    refuses_wrong_records,
    refuses_odd_generations,
    refuses_reused_slots,
    refuses_offsets_that_are_no_slots,
    keeps_to_the_destination,
    refuses_destinations_that_are_not_reserved,
    refuses_contradictory_lists,
    refuses_other_epochs,
    serves_only_under_a_live_lock,
    serves_only_who_shows_its_capability,
    reads_concurrently,
    is_late_when_the_deadline_has_passed,
    is_lost_when_closed,
    is_lost_when_the_owner_went_away,
    connects_only_to_what_is_there,
    survives_faulty_peers,
    is_late_when_the_peer_is_slow,
    ends_reads_when_closed_or_cancelled,
    says_when_late_writes_are_over,
)
