"""What the configured memory really holds: the plan that start-up and --dry-run print, and its refusals."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kvdir.errors import NoSpace
from peer_agent.memory.arena import free_bytes, no_room
from peer_agent.memory.slots import ArenaPlan, ClassRequest, Spare, plan_classes
from peer_agent.server.namespaces import Served


def plan_arena(served: Sequence[Served], arena_bytes: int, spare: Spare) -> ArenaPlan:
    """arena_bytes: for `served`; spare: on top. Raises ConfigError when a namespace's share does not hold one block."""
    return plan_classes(
        arena_bytes,
        [
            ClassRequest(
                namespace_digest=item.namespace.digest,
                name=item.namespace.short,
                block_bytes=item.namespace.block_bytes,
                block_tokens=item.namespace.block_tokens,
                share=item.share,
            )
            for item in served
        ],
        spare,
    )


def refuse_without_room(path: str, arena_bytes: int) -> int:
    """Bytes free where the arena would be. Raises NoSpace when it does not fit."""
    directory = os.path.dirname(path) or "."
    free = free_bytes(directory)
    if arena_bytes > free:
        raise NoSpace(no_room(directory, arena_bytes, free))
    return free


def capacity_document(plan: ArenaPlan) -> dict[str, Any]:
    """For --output json and the log: bytes and counts, nothing formatted."""
    return {
        "configured_bytes": plan.total_bytes,
        "arena_bytes": plan.arena_bytes,
        "payload_bytes": plan.payload_bytes,
        "overhead_bytes": plan.overhead_bytes,
        "accepts": {"namespaces": plan.spare.namespaces, "each_bytes": plan.spare.each_bytes},
        "classes": [
            {
                "namespace": item.request.name,
                "digest": item.request.namespace_digest.hex(),
                "block_bytes": item.request.block_bytes,
                "block_tokens": item.request.block_tokens,
                "slots": item.slots,
                "blocks": item.blocks,
                "tokens": item.tokens,
                "payload_bytes": item.payload_bytes,
                "header_bytes": item.header_bytes,
                "padding_bytes": item.padding_bytes,
                "lost_bytes": item.lost_bytes,
            }
            for item in plan.classes
        ],
    }
