"""Answers to sparse lookups, made from who holds what, without an index."""

from __future__ import annotations

import struct
from collections.abc import Container, Mapping
from typing import Any

from kvdir.core.answer import Lookup
from kvdir.location import NodeTrust, StreamState, Tier


def made_answer(held: Mapping[str, Mapping[Tier, Container[int]]], asked: int, **fields: Any) -> Lookup:
    """held: by node and tier, the positions. Neighbours with the same holders are one run. fields: others of the answer."""
    nodes = list(held)
    runs: list[list[int]] = []
    sets: list[bytes] = []
    for position in range(asked):
        members = sorted(nodes.index(node) << 8 | tier for node in nodes for tier, at in held[node].items() if position in at)
        if not members:
            continue
        packed = struct.pack(f"<{len(members)}I", *members)
        if packed not in sets:
            sets.append(packed)
        number = sets.index(packed)
        if runs and runs[-1][2] == number and sum(runs[-1][:2]) == position:
            runs[-1][1] += 1
        else:
            runs.append([position, 1, number])
    trusts = tuple(NodeTrust(node, 1, StreamState.SYNCED, "", 0.0, 0, "") for node in nodes)
    packed_runs = b"".join(struct.pack("<III", *run) for run in runs)
    return Lookup(packed_runs, tuple(sets), trusts, sum(run[1] for run in runs), asked, **fields)
