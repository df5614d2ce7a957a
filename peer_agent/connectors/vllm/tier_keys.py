"""vLLM's offload keys as fingerprints: one key is a block hash and the number of its KV cache group (4 bytes, big-endian).

Rules: keys of one list have one width (32-byte hashes of SHA-256, 16 of XXH3-128); positions are those of the caller's list.
The hash chain of a LoRA request names its adapter by name and path only, so a digest of the adapter's weights is mixed into
each fingerprint: another adapter behind the same path has other fingerprints. Source: vllm/v1/kv_offload/base.py (0.32).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdir.fingerprint import Fingerprints

GROUP_BYTES = 4

Positions = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """Those keys of a list that belong to one group, and where they are in the list, ascending."""

    group: int
    positions: Positions
    fingerprints: Fingerprints


def by_group(keys: Collection[bytes], *, adapter: bytes = b"") -> list[GroupKeys]:
    """In order of the groups' first keys. adapter: digest of the weights of a LoRA. ValueError: keys of different widths."""
    if not keys:
        return []
    width = len(next(iter(keys)))
    table = np.frombuffer(b"".join(keys), np.uint8)
    if len(table) != width * len(keys):
        raise ValueError("offload keys of different widths in one list")
    table = table.reshape(-1, width)
    numbers = table.view(">u4")[:, -1]  # a hash is a multiple of four bytes long
    if (numbers == numbers[0]).all():
        hashes = _mixed(table[:, :-GROUP_BYTES].tobytes(), width - GROUP_BYTES, adapter)
        return [GroupKeys(int(numbers[0]), np.arange(len(keys)), hashes)]
    found = []
    for number in dict.fromkeys(numbers.tolist()):
        positions = np.flatnonzero(numbers == number)
        hashes = _mixed(table[positions, :-GROUP_BYTES].tobytes(), width - GROUP_BYTES, adapter)
        found.append(GroupKeys(number, positions, hashes))
    return found


def _mixed(packed: bytes, width: int, adapter: bytes) -> Fingerprints:
    plain = Fingerprints(packed, width)
    if not adapter:
        return plain
    mixed = (hashlib.blake2b(item, digest_size=width, key=adapter, person=b"kvdir-lora").digest() for item in plain)
    return Fingerprints(b"".join(mixed), width)
