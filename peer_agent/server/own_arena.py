"""The agent's own arena: made as configured, and what came of it in words for the start log, the inventory and people.

Memory is bound to a NUMA node where one is configured, and the process then runs on that node's CPUs, so that no copy crosses
between nodes. On a machine with one node both change nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from kvdir.obs.logs import say
from peer_agent.core.slot_table import SlotTable
from peer_agent.memory import numa
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.memory.pages import HugePages
from peer_agent.server.config import AgentConfig

log = logging.getLogger(__name__)


def create_arena(config: AgentConfig, classes: Sequence[SizeClass], *, epoch: int) -> Arena:
    """Raises what Arena.create raises."""
    wanted = HugePages(config.huge_pages)
    arena = Arena.create(
        config.arena_file,
        classes,
        epoch=epoch,
        prefault=config.prefault,
        huge_pages=wanted,
        numa_node=config.numa_node,
        spare_bytes=config.spare.total_bytes,
    )
    say(log, logging.INFO, "arena", path=arena.path, bytes=arena.arena_bytes, memory=in_words(arena, config.numa_node))
    if config.prefault and wanted is HugePages.AUTO and not arena.pages.complete:
        say(log, logging.INFO, "not all of the arena is in huge pages", advice=arena.pages.advice())
    return arena


def slot_table(placed: SizeClass) -> SlotTable:
    """Of a size class of the arena, all slots free. Takes as long as there are many: a second for two million."""
    return SlotTable(
        placed.namespace_digest,
        block_bytes=placed.block_bytes,
        first_offset=placed.first,
        stride_bytes=placed.stride,
        slots=placed.slots,
    )


def in_words(arena: Arena, numa_node: int) -> str:
    """What the arena's memory is, such as "1.0 GiB of 1.0 GiB in huge pages, NUMA node 1"."""
    where = "" if numa_node < 0 else f", NUMA node {numa_node}"
    alone = " (the only one, so nothing was bound)" if where and len(numa.nodes()) == 1 else ""
    return arena.pages.in_words() + where + alone


def run_on_node(numa_node: int) -> None:
    """Keeps this process, and every thread that it starts from now on, on the CPUs of a node, as far as it may use them."""
    wanted = set(numa.cpus(numa_node)) & os.sched_getaffinity(0) if numa_node >= 0 else set()
    if wanted:
        os.sched_setaffinity(0, wanted)
