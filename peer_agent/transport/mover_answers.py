"""Between a ReadList and the messages of a mover: what is asked in which message, and what the answers, or silence, mean."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import numpy as np

from peer_agent.mover.child import Asked
from peer_agent.mover.messages import MAX_READ_BLOCKS, PENDING, Done, Failure, Late, Question, Read, Reply
from peer_agent.transport.base import ReadList, ReadStatus
from peer_agent.transport.outcomes import uniform_statuses


def questions(blocks: ReadList, peer: int, until_s: float) -> list[Callable[[int], Question]]:
    """A Read for each part of the list that fits a message, waiting for its ticket."""
    whole = Read(
        0,
        peer,
        int(until_s * 1e9),
        blocks.namespace_digest,
        blocks.fingerprints,
        blocks.width,
        blocks.records,
        blocks.destinations,
    )
    return [whole.part(part).under for part in _parts(len(blocks))]


def statuses_of(blocks: ReadList, asked: list[Asked]) -> bytes:
    """Of the whole list, from the answers to its `questions`. ValueError: the mover says that the list is none."""
    return b"".join(_statuses(blocks, one, part) for one, part in zip(asked, _parts(len(blocks)), strict=True))


def _statuses(blocks: ReadList, asked: Asked, part: slice) -> bytes:
    if not asked.answer.done():
        return uniform_statuses(blocks, ReadStatus.LATE)[part]
    if asked.answer.exception() is not None:
        return uniform_statuses(blocks, ReadStatus.PEER_LOST)[part]
    match asked.answer.result():
        case Done(statuses=statuses) if len(statuses) == part.stop - part.start:
            return statuses
        case Late(statuses=statuses) if len(statuses) == part.stop - part.start:
            late = np.frombuffer(uniform_statuses(blocks, ReadStatus.LATE)[part], np.uint8)
            found = np.frombuffer(statuses, np.uint8)
            return np.where(found == PENDING, late, found).astype(np.uint8).tobytes()
        case Reply(failure=Failure.VALUE, reason=reason):
            raise ValueError(reason)
        case _:
            return uniform_statuses(blocks, ReadStatus.PEER_LOST)[part]


def _parts(count: int) -> list[slice]:
    return [slice(first, min(first + MAX_READ_BLOCKS, count)) for first in range(0, count, MAX_READ_BLOCKS)]


def settled_of(asked: list[Asked]) -> asyncio.Future[None]:
    """Done when all of them are."""
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = [one.settled for one in asked if not one.settled.done()]
    if not left:
        settled.set_result(None)
        return settled
    waiting = len(left)

    def one_more(_: asyncio.Future[None]) -> None:
        nonlocal waiting
        waiting -= 1
        if not waiting and not settled.done():
            settled.set_result(None)

    for future in left:
        future.add_done_callback(one_more)
    return settled


async def all_settled(asked: list[Asked]) -> None:
    """Also when cancelled again meanwhile: who asked must not go on before nothing writes any more."""
    futures = {one.settled for one in asked}
    while not all(future.done() for future in futures):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(futures)
