"""Telling two cancellations apart. gRPC raises CancelledError in whoever awaits a call whose channel is closed meanwhile."""

from __future__ import annotations

import asyncio


def call_alone_cancelled() -> bool:
    """In `except asyncio.CancelledError`: True if only the awaited call was cancelled, not the task that awaits it.

    Then the error is that of a lost connection; swallowing the other kind would keep a task from ending.
    """
    task = asyncio.current_task()
    return task is None or not task.cancelling()
