"""Values that go over a connection: arguments of commands, and errors in place of replies. Pure."""

from __future__ import annotations

Argument = bytes | int | str


class ConnectionLost(Exception):
    """The connection broke; commands that were under way may have been carried out or not."""


class ReplyError(Exception):
    """An error that the server answered with. kind: its first word, e.g. MOVED."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.kind, _, self.rest = text.partition(" ")
