"""What an engine's cursor (cursor.py) wants done. Values; the shell executes them in order."""

from __future__ import annotations

from typing import NamedTuple


class Deliver(NamedTuple):
    """Apply this batch now; then say `cleared` or `uncertain` of its number if it was so."""

    seq: int
    payload: bytes


class AskReplay(NamedTuple):
    """Ask for everything from first_seq on, and hand the answers to `replayed` with this id. An older one is void."""

    request_id: int
    first_seq: int


class Lost(NamedTuple):
    """These batches will not be delivered."""

    first_seq: int
    last_seq: int


class NewLife(NamedTuple):
    """The engine began anew: nothing that was delivered before counts. What follows is of the new life."""

    reason: str


class Doubt(NamedTuple):
    """The doubt is this from now on; empty: none."""

    reason: str


CursorEffect = Deliver | AskReplay | Lost | NewLife | Doubt
