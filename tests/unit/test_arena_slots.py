"""Capacity plans and the native slot life: reserve, write, commit, retire."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdir.errors import ConfigError
from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES, SUPERBLOCK_BYTES, SizeClass
from peer_agent.memory.slots import MAX_SPARE_SLOTS, ClassRequest, Spare, plan_classes

DIGEST = b"d" * 32
BLOCK = 1000


def request(name: str, block_bytes: int, *, share: float = 1.0, block_tokens: int = 16) -> ClassRequest:
    return ClassRequest(name.encode().ljust(32, b"."), name, block_bytes, block_tokens, share)


def test_plan_says_what_the_bytes_hold_when_two_namespaces_share() -> None:
    plan = plan_classes(1 << 20, [request("small", 1024, share=1), request("large", 65536, share=3, block_tokens=256)])
    small, large = plan.classes
    assert small.slots == ((1 << 20) - SUPERBLOCK_BYTES) // 4 // (1024 + HEADER_BYTES) == small.blocks == 226
    assert (large.slots, large.tokens) == (11, 11 * 256)
    assert small.header_bytes == 226 * HEADER_BYTES
    assert small.payload_bytes == 226 * 1024
    assert plan.arena_bytes <= plan.total_bytes
    assert plan.overhead_bytes == plan.total_bytes - small.payload_bytes - large.payload_bytes


requests = st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(1, 512), st.floats(0.01, 100)), min_size=1, max_size=8).map(
    lambda rows: [request(f"n{i}", b, share=s, block_tokens=t) for i, (b, t, s) in enumerate(rows)]
)


@given(st.integers(0, 1 << 32), requests)
def test_plan_accounts_for_every_byte_or_refuses_with_a_fix(total: int, wanted: list[ClassRequest]) -> None:
    try:
        plan = plan_classes(total, wanted)
    except ConfigError as error:
        fixes = [fault for fault in error.faults if "configure at least" in fault]
        assert len(fixes) == len(error.faults) > 0  # noqa: PT017
        return
    assert plan.arena_bytes <= total
    for part in plan.classes:
        assert part.slots >= 1
        assert part.granted_bytes == part.payload_bytes + part.header_bytes + part.padding_bytes + part.lost_bytes
        assert 0 <= part.lost_bytes < part.size_class.stride
    assert SUPERBLOCK_BYTES + sum(part.granted_bytes for part in plan.classes) <= total


def test_spare_part_bounds_how_many_blocks_an_engine_may_bring_however_small() -> None:
    spare = Spare(1 << 40, 1)
    assert spare.slots(1 << 20) == (1 << 40) // ((1 << 20) + 128)
    assert spare.slots(1) == MAX_SPARE_SLOTS
    assert Spare(255, 1).slots(1) == 0


def test_plan_fits_when_the_refusal_is_followed() -> None:
    wanted = [request("a", 70_000, share=1), request("b", 10, share=7)]
    with pytest.raises(ConfigError, match="configure at least") as caught:
        plan_classes(100_000, wanted)
    needed = int(caught.value.faults[0].split("configure at least ")[1].split()[0].replace(",", ""))
    assert plan_classes(needed, wanted).classes[0].slots == 1


def test_plan_lists_every_fault_when_several_are_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_classes(
            1 << 30,
            [request("a", 0), request("b", 10, block_tokens=0), request("c", 10, share=0), request("a", 10)],
        )
    text = str(caught.value)
    assert "a: block_bytes is 0" in text
    assert "b: block_tokens is 0" in text
    assert "c: share is 0" in text
    assert "a: same namespace as a" in text
    with pytest.raises(ConfigError, match="no namespace"):
        plan_classes(1 << 30, [])


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "arena", [SizeClass(DIGEST, BLOCK, 4)], epoch=5) as created:
        yield created


def offsets(arena: Arena, *slots: int) -> bytes:
    return b"".join(struct.pack("<Q", arena.classes[0].offset(slot)) for slot in slots)


def generations(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


def states(packed: bytes) -> list[int]:
    return [record[4] for record in struct.iter_unpack("<QQQII", packed)]


def commit(arena: Arena, *slots: int, fingerprint: bytes = b"f" * 8) -> bytes:
    return _native.commit(arena.region, offsets(arena, *slots), DIGEST, fingerprint * len(slots), 8, BLOCK, None)


def test_generation_only_grows_when_a_slot_lives_on(arena: Arena) -> None:
    slot = offsets(arena, 1)
    seen = []
    for _ in range(3):
        seen += generations(_native.begin_write(arena.region, slot))
        seen += generations(_native.begin_write(arena.region, slot))
        seen += [struct.unpack("<QQQII", commit(arena, 1))[1]]
        _native.retire(arena.region, slot)
    assert seen == sorted(set(seen))
    assert [g % 2 for g in seen] == [1, 1, 0] * 3


def test_slot_is_visible_only_between_commit_and_the_next_write(arena: Arena) -> None:
    both = offsets(arena, 0, 1)
    assert states(_native.records(arena.region, both)) == [0, 0]
    _native.begin_write(arena.region, both)
    assert states(_native.records(arena.region, both)) == [0, 0]
    committed = commit(arena, 0, 1)
    assert _native.records(arena.region, both) == committed
    _native.begin_write(arena.region, offsets(arena, 0))
    _native.retire(arena.region, offsets(arena, 1))
    assert states(_native.records(arena.region, both)) == [0, 0]
    assert _native.headers(arena.region, offsets(arena, 1))[32:] == bytes(96)


def test_commit_changes_nothing_when_one_slot_is_not_reserved(arena: Arena) -> None:
    _native.begin_write(arena.region, offsets(arena, 0))
    before = bytes(arena.region)
    with pytest.raises(ValueError, match="not reserved"):
        commit(arena, 0, 1)
    with pytest.raises(ValueError, match="named twice"):
        commit(arena, 0, 0)
    assert bytes(arena.region) == before


@pytest.mark.parametrize("offset", [0, 64, SUPERBLOCK_BYTES + 1, SUPERBLOCK_BYTES + 128, 1 << 40, (1 << 64) - 128])
def test_offset_is_refused_when_no_slot_begins_there(arena: Arena, offset: int) -> None:
    packed = struct.pack("<Q", offset)
    for call in (
        lambda: _native.begin_write(arena.region, packed),
        lambda: _native.retire(arena.region, packed),
        lambda: _native.records(arena.region, packed),
        lambda: _native.headers(arena.region, packed),
        lambda: _native.commit(arena.region, packed, DIGEST, b"f" * 8, 8, BLOCK, None),
        lambda: _native.write_blocks(arena.region, packed, bytes(8), BLOCK),
        lambda: _native.copy_scattered(arena.region, packed, BLOCK, bytearray(BLOCK)),
    ):
        with pytest.raises(ValueError, match="no slot begins at"):
            call()


def test_arguments_are_refused_with_words_when_they_do_not_fit_together(arena: Arena) -> None:
    _native.begin_write(arena.region, offsets(arena, 0))
    with pytest.raises(ValueError, match="do not fit the slot"):
        _native.commit(arena.region, offsets(arena, 0), DIGEST, b"f" * 8, 8, BLOCK + 1, None)
    with pytest.raises(ValueError, match="width is 7"):
        _native.commit(arena.region, offsets(arena, 0), DIGEST, b"f" * 7, 7, BLOCK, None)
    with pytest.raises(ValueError, match="bytes of fingerprints"):
        _native.commit(arena.region, offsets(arena, 0), DIGEST, b"f" * 9, 8, BLOCK, None)
    with pytest.raises(ValueError, match="instead of 32"):
        _native.commit(arena.region, offsets(arena, 0), b"short", b"f" * 8, 8, BLOCK, None)
    with pytest.raises(ValueError, match="2 checksums for 1 slots"):
        _native.commit(arena.region, offsets(arena, 0), DIGEST, b"f" * 8, 8, BLOCK, bytes(16))
    with pytest.raises(ValueError, match="not a multiple of 8"):
        _native.begin_write(arena.region, b"1234567")
    with pytest.raises(TypeError, match="read-write"):
        _native.begin_write(bytes(arena.region), offsets(arena, 0))
    with pytest.raises(ValueError, match="destination holds"):
        _native.copy_scattered(arena.region, offsets(arena, 0), BLOCK, bytearray(BLOCK - 1))


def test_blocks_arrive_at_addresses_when_read_back(arena: Arena) -> None:
    source = ctypes.create_string_buffer(bytes(i % 256 for i in range(2 * BLOCK)), 2 * BLOCK)
    into = ctypes.create_string_buffer(2 * BLOCK)
    base, to = ctypes.addressof(source), ctypes.addressof(into)
    both = offsets(arena, 2, 0)
    _native.begin_write(arena.region, both)
    sums = _native.write_blocks(arena.region, both, struct.pack("<QQ", base, base + BLOCK), BLOCK)
    records = _native.commit(arena.region, both, DIGEST, b"12345678abcdefgh", 8, BLOCK, sums)
    addresses = struct.pack("<QQ", to, to + BLOCK)
    statuses = _native.read_blocks(arena.region, records, DIGEST, b"12345678abcdefgh", 8, addresses, True)
    assert (statuses, into.raw) == (bytes(2), source.raw)
    assert _native.read_blocks(arena.region, records, DIGEST, b"12345678abcdefgh", 8, bytes(16), True) == b"\x04\x04"
    assert _native.ok_bytes(records, bytes(2)) == 2 * BLOCK
    assert _native.ok_bytes(records, b"\0\4") == BLOCK


def test_rot_is_corrupt_when_the_checksum_is_compared(arena: Arena) -> None:
    _native.begin_write(arena.region, offsets(arena, 0, 1))
    records = commit(arena, 0)
    arena.region[arena.classes[0].offset(0) + HEADER_BYTES + 500] ^= 1
    destination = offsets(arena, 1)

    def read(check: bool) -> bytes:
        arguments = (arena.region, records, DIGEST, b"f" * 8, 8, arena.region, destination, check, 1 << 63)
        assert _native.read_slots(*arguments, BLOCK - 1) is None, "too much for who asks"
        found = _native.read_slots(*arguments, BLOCK)
        assert found is not None
        assert found[1:] == (BLOCK * (found[0] == b"\0"), BLOCK)
        return found[0]

    assert read(check=True) == b"\x04"
    assert read(check=False) == b"\x00", "generations alone cannot see it: documented"
