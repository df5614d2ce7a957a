"""The invariants of an inventory, checked in full: for tests, O(everything). Pure; the rules are those of inventory.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from peer_agent.core.leases import AGENT, Lock, Reservation, Session
from peer_agent.core.slot_table import SlotTable
from peer_agent.core.writers import Writers


def check_inventory(
    tables: Iterable[SlotTable],
    open_: Mapping[int, Reservation],
    quarantined: Mapping[int, Reservation],
    writers: Writers,
    locks: Mapping[int, Lock],
    sessions: Mapping[int, Session],
) -> None:
    """AssertionError if one does not hold."""
    for table in tables:
        table.check()
        _check_locks(table, locks)
        occupancy = table.occupancy()
        for held, reservations in ((occupancy.reserved, open_), (occupancy.quarantined, quarantined)):
            slots = [slot for item in reservations.values() if item.table is table for slot in item.slots.values()]
            assert len(slots) == len(set(slots)) == held, "a slot belongs to no reservation or to two"
    _check_writers(open_, writers)
    listed = {number for state in sessions.values() for number in state.reservations}
    assert listed == open_.keys() | quarantined.keys(), "a reservation without a session"
    assert {number for state in sessions.values() for number in state.locks} == locks.keys(), "a lock without a session"


def _check_locks(table: SlotTable, locks: Mapping[int, Lock]) -> None:
    counts: dict[int, int] = {}
    for lock in locks.values():
        for slot in lock.slots if lock.table is table else ():
            counts[slot] = counts.get(slot, 0) + 1
    assert counts == {slot: n for slot, n in enumerate(table._locks) if n}, "locks and lock counts differ"


def _check_writers(open_: Mapping[int, Reservation], writers: Writers) -> None:
    """Every open slot is somebody's to commit, unless a twin has committed the block first."""
    writing = {
        (key, number)
        for number, item in open_.items()
        for key in item.keys(item.slots if not item.contested else writers.not_lost(number, item))
    }
    assert writing == writers.first.items() | writers.twins.items(), "writers and open reservations differ"
    for key, twin in writers.twins.items():
        first = writers.first.get(key)
        assert first is not None, "a twin of nobody"
        assert first != twin, "a twin of itself"
        assert open_[first].contested, "a first writer that does not know of its twin"
        assert open_[twin].contested, "a twin that does not know it"
        assert open_[first].session == open_[twin].session == AGENT, "an engine's block has two writers"
