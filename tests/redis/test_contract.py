"""The contract of the block store, run against a real Redis server, a six-process cluster, Sentinels, and Valkey."""

import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import pytest
import uvloop

from kvdir.store import BlockStore, make_store
from kvdir.testing.check_directory_store import CHECKS, D, Open
from kvdir.testing.redis_servers import NotInstalled, Server, redis_cluster, redis_sentinel, redis_server, valkey_program

pytestmark = pytest.mark.redis


def valkey() -> AbstractContextManager[Server]:
    try:
        return redis_server(program=valkey_program())
    except NotInstalled as error:
        pytest.skip(str(error))


KINDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "single": redis_server,
    "cluster": redis_cluster,
    "sentinel": redis_sentinel,
    "valkey": valkey,
}
_prefixes = itertools.count()


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with KINDS[request.param]() as servers:
        yield servers.url


@asynccontextmanager
async def opening(url: str) -> AsyncIterator[Open]:
    """Opens stores over one prefix, which is empty, and closes them."""
    address, stores = f"{url}?prefix=test{next(_prefixes)}", list[BlockStore]()

    async def open_one() -> BlockStore:
        stores.append(make_store(address))
        await stores[-1].open(deadline_s=D)
        return stores[-1]

    try:
        yield open_one
    finally:
        for store in stores:
            await store.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Callable[[Open], Coroutine[Any, Any, None]], url: str) -> None:
    async with opening(url) as opened:
        await check(opened)


def test_contract_holds_on_the_loop_that_coordinators_run(url: str) -> None:
    async def every_check() -> None:
        for check in CHECKS:
            async with opening(url) as opened:
                await check(opened)

    uvloop.run(every_check())
