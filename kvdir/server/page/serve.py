"""Starts and ends the live page of a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvdir.server.app import AnyCoordinator
from kvdir.server.config import is_loopback, split_address
from kvdir.server.page.answers import Answers
from kvdir.server.page.copies import DirectoryPage, PageSource, StorePage
from kvdir.server.page.feed import Feed
from kvdir.server.page.routes import PageRoutes
from kvdir.server.shared.coordinator import SharedCoordinator


@contextlib.asynccontextmanager
async def paging(coordinator: AnyCoordinator) -> AsyncIterator[PageRoutes | None]:
    """Inside the block the page can be served; None when the settings give it no place."""
    config = coordinator.config
    if not config.page_listen and not page_beside_metrics(config.http_listen):
        yield None
        return
    source: PageSource = StorePage(coordinator) if isinstance(coordinator, SharedCoordinator) else DirectoryPage(coordinator)
    loop = asyncio.get_running_loop()
    feed = Feed(source, loop)
    try:
        yield PageRoutes(feed, Answers(source, loop))
    finally:
        await feed.close()


def page_beside_metrics(http_listen: str) -> bool:
    """Whether the page is at / of this address: it shows every tenant, so only where nobody else can reach it."""
    return bool(http_listen) and is_loopback(split_address(http_listen)[0])
