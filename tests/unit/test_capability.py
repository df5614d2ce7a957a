"""What a capability is bound to: every one of its parts, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from peer_agent.core.capability import CAPABILITY, CAPABILITY_VERSION, KEY_BYTES, CapabilityMint

KEY = bytes(range(KEY_BYTES))
RECORDS = bytes(range(64))


def made(
    key: bytes = KEY, *, epoch: int = 1, lock: int = 2, records: bytes = RECORDS, reader: str = "r", expires_s: float = 3.0
) -> bytes:
    return CapabilityMint(key, epoch=epoch).capability(lock, records, reader=reader, expires_s=expires_s)


def test_capability_has_the_documented_fields_when_made() -> None:
    version, lock, epoch, expires_ns, tag = CAPABILITY.unpack(made(expires_s=3.5))
    assert (version, lock, epoch, expires_ns, len(tag)) == (CAPABILITY_VERSION, 2, 1, 3_500_000_000, 32)
    assert made() == made()


def test_tag_differs_when_any_part_does() -> None:
    others = [
        made(),
        made(bytes(KEY_BYTES)),
        made(epoch=2),
        made(lock=3),
        made(expires_s=4.0),
        made(reader="s"),
        made(reader=""),
        made(records=RECORDS[:32]),
        made(records=b""),
        made(records=RECORDS[:-1] + b"x"),
        made(reader="r" + chr(0)),
    ]
    for one, other in itertools.combinations(others, 2):
        assert one[32:] != other[32:]


def test_reader_and_records_are_told_apart_when_one_ends_as_the_other_begins() -> None:
    """Length is part of what is authenticated: no bytes can move from the name to the list."""
    assert made(reader="r" + "a" * 32, records=b"")[32:] != made(reader="r", records=b"a" * 32)[32:]


@pytest.mark.parametrize("key", [b"", bytes(16), bytes(33)])
def test_key_is_refused_when_it_has_another_size(key: bytes) -> None:
    with pytest.raises(ValueError, match="use 32 random"):
        CapabilityMint(key, epoch=1)
