"""Is the engine that got slots to write to really gone? A lock that the kernel keeps.

An engine holds an open-file-description lock (fcntl(2), F_OFD_SETLK) on one byte of the arena file from before it asks for
slots until it has written to them or given them up: byte PRESENCE_AT + session, far beyond the arena's end, so the lock
concerns no data. The kernel drops it when the last process that could write has closed the file, whatever ended it, in
whatever container; a stopped process keeps it. The agent only asks. So a slot whose writer lost its connection, or the answer
that named the slot, is reused when, and not before, nothing can write to it any more.

Does not: guard the bytes; a session's number is only known to its engine and the agent.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

PRESENCE_AT = 1 << 62
SESSION_LIMIT = 1 << 61
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: l_type, l_whence, l_start, l_len, l_pid


def _record(kind: int, session: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, PRESENCE_AT + session % SESSION_LIMIT, 1, 0)


def hold(arena_fd: int, session: int) -> None:
    """Engine: says "I may write". `arena_fd` must be open for writing and stay open. BlockingIOError if another holds it."""
    try:
        fcntl.fcntl(arena_fd, fcntl.F_OFD_SETLK, _record(fcntl.F_WRLCK, session))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise BlockingIOError(error.errno, f"session {session:x} is held by another process") from error
        raise


def release(arena_fd: int, session: int) -> None:
    """Engine: says "I have written my last byte". Closing the descriptor says the same."""
    fcntl.fcntl(arena_fd, fcntl.F_OFD_SETLK, _record(fcntl.F_UNLCK, session))


def is_held(arena_fd: int, session: int) -> bool:
    """Agent: whether a process that holds the session's lock is alive. `arena_fd` must be another open of the file."""
    answer = fcntl.fcntl(arena_fd, fcntl.F_OFD_GETLK, _record(fcntl.F_WRLCK, session))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
