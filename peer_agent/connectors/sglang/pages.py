"""Pages of one host pool of SGLang as memory that the engine library copies from and to.

A page is what HiCache stores under one key: page_size consecutive token slots of a pool, in host memory as one or more runs
(K and V apart; or one a layer). Two forms, chosen once per pool, because they order bytes differently:

    runs   the pool names address and length of each run (`get_page_buffer_meta`). A page of one run is copied straight between
           host pool and arena; of several, by way of a scratch page
    flat   the pool flattens a page itself (`get_data_page`, `set_from_flat_data_page`)

Rules: nothing is written to the host pool but pages that arrived whole and verified, except that a page of one run is loaded in
place: SGLang owns those slots for the transfer and drops the ones that failed. Works on attributes, without SGLang or torch.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]

SCRATCH_BYTES = 32 << 20
"""Most that pages of several runs take at a time while they are copied. Kept for the next copy, since new memory costs more
than the copy: the system zeroes it page by page.
"""

KEPT = 2
"""Scratch memories that are kept: HiCache stores from one thread and loads from another."""

MAX_PAGES = 4096
"""Of one store or load; more go one after the other."""


class Pages(Protocol):
    """How one pool's pages are read and written. starts: first token slot of each page."""

    page_bytes: int
    form: str
    at_once: int

    def outgoing(self, starts: Sequence[int]) -> AbstractContextManager[Any]:
        """Around `Engine.store`, which takes what this gives: the bytes of these pages, at most at_once of them."""

    def incoming(self, starts: Sequence[int]) -> AbstractContextManager[Any]:
        """Around `Engine.load`, which writes into what this gives, and `arrived`."""

    def arrived(self, starts: Sequence[int], into: Any, hits: Sequence[int]) -> None:
        """After the load, within `incoming`: puts the pages at these positions where they belong."""


class _Slots(list[int]):
    """Token slots, with as much of a tensor's face as a host pool looks at."""

    def tolist(self) -> list[int]:
        return list(self)


class RunPages:
    """See the module docstring."""

    form = "runs"

    def __init__(self, pool: Any) -> None:
        """Raises ValueError where the pool does not name its runs in this layout."""
        self._pool = pool
        self._page_size = int(pool.page_size or 1)
        ((self._lengths, _),) = self._runs([0])
        self.page_bytes = sum(self._lengths)
        self._scratch: list[Array] = []
        self.at_once = MAX_PAGES if self._whole else min(MAX_PAGES, max(1, SCRATCH_BYTES // self.page_bytes))

    @property
    def _whole(self) -> bool:
        return len(self._lengths) == 1

    @contextlib.contextmanager
    def outgoing(self, starts: Sequence[int]) -> Iterator[Any]:
        with self.incoming(starts) as memory:
            if not self._whole:
                for page, (lengths, addresses) in zip(memory, self._checked(starts), strict=True):
                    at = page.ctypes.data
                    for length, address in zip(lengths, addresses, strict=True):
                        ctypes.memmove(at, address, length)
                        at += length
            yield memory

    @contextlib.contextmanager
    def incoming(self, starts: Sequence[int]) -> Iterator[Any]:
        if self._whole:
            yield self._in_place(starts)
            return
        try:
            scratch = self._scratch.pop()
        except IndexError:  # both are in use, or this is the first
            scratch = np.empty((self.at_once, self.page_bytes), np.uint8)
        try:
            yield scratch[: len(starts)]
        finally:
            if len(self._scratch) < KEPT:
                self._scratch.append(scratch)

    def arrived(self, starts: Sequence[int], into: Any, hits: Sequence[int]) -> None:
        if self._whole:
            return
        for position, (lengths, addresses) in zip(hits, self._checked([starts[hit] for hit in hits]), strict=True):
            at = into[position].ctypes.data
            for length, address in zip(lengths, addresses, strict=True):
                ctypes.memmove(address, at, length)
                at += length

    def _in_place(self, starts: Sequence[int]) -> list[Any]:
        return [(ctypes.c_ubyte * self.page_bytes).from_address(addresses[0]) for _, addresses in self._checked(starts)]

    def _checked(self, starts: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Runs of each page; ValueError if one is cut otherwise than the first was."""
        runs = self._runs(starts)
        if any(lengths != self._lengths for lengths, _ in runs):
            raise ValueError("the host pool cuts its pages differently from one to the next")
        return runs

    def _runs(self, starts: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """(lengths, addresses) of each page, in the pool's order."""
        if not starts:
            return []
        slots = _Slots(slot for start in starts for slot in range(start, start + self._page_size))
        try:
            addresses, lengths = self._pool.get_page_buffer_meta(slots)
        except (AttributeError, NotImplementedError, TypeError, AssertionError) as error:
            raise ValueError(f"the host pool names no runs: {error!r}") from error
        each, rest = divmod(len(addresses), len(starts))
        if rest or not each or len(lengths) != len(addresses) or min(lengths) <= 0:
            raise ValueError(f"the host pool names {len(addresses)} runs for {len(starts)} pages")
        return [
            (list(map(int, lengths[at : at + each])), list(map(int, addresses[at : at + each])))
            for at in range(0, len(addresses), each)
        ]


class FlatPages:
    """See the module docstring."""

    form = "flat"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_bytes = size_of(pool.get_dummy_flat_data_page())
        self.at_once = min(MAX_PAGES, max(1, SCRATCH_BYTES // self.page_bytes))

    @contextlib.contextmanager
    def outgoing(self, starts: Sequence[int]) -> Iterator[Any]:
        yield [self._pool.get_data_page(start, flat=True) for start in starts]

    @contextlib.contextmanager
    def incoming(self, starts: Sequence[int]) -> Iterator[Any]:
        yield [self._pool.get_dummy_flat_data_page() for _ in starts]

    def arrived(self, starts: Sequence[int], into: Any, hits: Sequence[int]) -> None:
        for hit in hits:
            self._pool.set_from_flat_data_page(starts[hit], into[hit])


def pages_of(pool: Any, *, runs: bool) -> Pages:
    """runs: whether to try them first. Raises ValueError for a pool that offers neither form."""
    if runs:
        try:
            return RunPages(pool)
        except ValueError:
            pass
    try:
        return FlatPages(pool)
    except (AttributeError, NotImplementedError, TypeError) as error:
        layout = getattr(pool, "layout", "?")
        raise ValueError(
            f"host pool {type(pool).__name__} with layout {layout} can neither be read in runs nor flattened ({error!r}): "
            "try another --hicache-mem-layout, such as page_first"
        ) from error


def size_of(page: Any) -> int:
    """Bytes of a tensor or an array."""
    nbytes = page.nbytes
    return int(nbytes() if callable(nbytes) else nbytes)
