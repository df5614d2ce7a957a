"""The contract of the block store, run against the one in memory; tests/redis runs it against servers."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvdir.store.base import BlockStore, StoreUnavailable
from kvdir.store.memory import Blocks, MemoryBlockStore
from kvdir.testing.check_directory_store import CHECKS, D, Open


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Callable[[Open], Coroutine[Any, Any, None]]) -> None:
    blocks = Blocks()

    async def opened() -> BlockStore:
        store = MemoryBlockStore(blocks)
        await store.open(deadline_s=D)
        return store

    await check(opened)


async def test_every_call_fails_when_a_fault_is_set() -> None:
    store = MemoryBlockStore()
    await store.open(deadline_s=D)
    store.blocks.fault = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable, match="away"):
        await store.roster(deadline_s=D)
    store.blocks.fault = None
    assert (await store.roster(deadline_s=D)).holders == {}
