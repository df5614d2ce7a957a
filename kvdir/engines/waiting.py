"""Live batches that wait for what is missing before them: by number, bounded in batches and bytes.

Rules: what finds no room is not kept, and so is missing itself. Not a queue: which one is next, the cursor says.
"""

from __future__ import annotations


class Waiting:
    """See the module docstring."""

    def __init__(self, *, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: dict[int, bytes] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def first_seq(self) -> int:
        """The lowest number. ValueError if nothing waits."""
        return min(self._batches)

    def add(self, seq: int, payload: bytes) -> None:
        """Keeps it, if there is room and it is not here yet."""
        full = len(self._batches) >= self._max_batches or self._bytes + len(payload) > self._max_bytes
        if seq not in self._batches and not full:
            self._batches[seq] = payload
            self._bytes += len(payload)

    def take(self, seq: int) -> bytes | None:
        """The batch of this number, which waits no more; None if it is not here."""
        payload = self._batches.pop(seq, None)
        if payload is not None:
            self._bytes -= len(payload)
        return payload

    def drop_below(self, seq: int) -> None:
        """Those came another way."""
        for old in [number for number in self._batches if number < seq]:
            self.take(old)

    def clear(self) -> None:
        self._batches.clear()
        self._bytes = 0
