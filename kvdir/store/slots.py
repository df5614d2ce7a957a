"""Hash tags of shards and of the record about the whole store, and where they lie in a cluster. Pure."""

from __future__ import annotations

import string
from collections.abc import Iterator

from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

__all__ = ["SLOTS", "key_slot", "meta_tag", "shard_tags"]


def shard_tags(prefix: str, shards: int) -> tuple[bytes, ...]:
    """One hash tag per shard, in braces; shard i lies in the i-th part of the slots, so that masters get equal shares."""
    return tuple(_tag(prefix, shard, shards) for shard in range(shards))


def _tag(prefix: str, shard: int, shards: int) -> bytes:
    low, high = shard * SLOTS // shards, (shard + 1) * SLOTS // shards
    for ending in _endings():
        tag = f"{{{prefix}-{shard}{ending}}}".encode()
        if low <= key_slot(tag) < high:
            return tag
    raise AssertionError("unreachable: endings are without end")


def _endings() -> Iterator[str]:
    level = [""]
    while True:
        yield from level
        level = [ending + letter for ending in level for letter in string.ascii_lowercase]


def meta_tag(prefix: str) -> bytes:
    """Hash tag of the record about the whole store."""
    return f"{{{prefix}-meta}}".encode()
