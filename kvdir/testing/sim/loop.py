"""An event loop whose time is simulated: it never waits, it jumps to the moment at which something is due.

Owns simulated time. Code under it sees ordinary asyncio (tasks, timeouts, sleeps), so the real publisher and the real services
run unchanged; callbacks run in the order in which they became due, so equal inputs give equal runs.
Rules: nothing may do I/O on it; what goes round and round without time passing is reported, not endured.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

from kvdir.testing.clock import ManualClock

_STANDSTILL_ROUNDS = 50_000


class Standstill(AssertionError):
    """Simulated time cannot go on: something spins, or everything waits for ever."""


class _Jump(selectors.BaseSelector):
    """Waits for nothing: moves the clock on by the time that the loop was ready to wait."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Standstill("everything waits, and nothing will ever happen: some wait has no deadline")
        if timeout > 0:
            self._rounds = 0
            self._clock.advance(timeout)
            return []
        self._rounds += 1
        if self._rounds > _STANDSTILL_ROUNDS:
            self._rounds = 0
            raise Standstill(f"{_STANDSTILL_ROUNDS} rounds of the loop at {self._clock.now_s:.6f} s: some task spins")
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


class SimulatedLoop(asyncio.SelectorEventLoop):
    """See the module docstring. faults: what went wrong in tasks and callbacks that nobody waited for."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(_Jump(clock))
        self.clock = clock
        self.faults: list[str] = []
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self.clock.now_s

    def run_for(self, seconds: float) -> None:
        """Everything that is due until `seconds` from now happens."""
        self.run_until_complete(asyncio.sleep(seconds))

    def shut(self) -> None:
        """Cancels what still runs, waits for it, and closes the loop."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.close()

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.faults.append(f"{context.get('message', 'fault')}: {context.get('exception')!r}")
