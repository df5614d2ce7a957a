"""Structured logs: one event a line on stderr, `key=value` (logfmt), for both daemons.

Rules: never tokens, salts or fingerprints. Writing never stops the event loop: lines go through a bounded queue to a thread,
and when that is full they are dropped and counted (a reader of stderr that hangs must not hang us).
"""

from __future__ import annotations

import atexit
import logging
import logging.handlers
import queue
import sys
import time
from typing import TextIO

_QUEUED_LINES = 4096


def say(log: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Logs an event with its fields. Cheap when the level is off."""
    if log.isEnabledFor(level):
        log.log(level, event, extra={"fields": fields})


class LogfmtFormatter(logging.Formatter):
    """ts=2026-01-31T12:00:00.123Z level=info logger=kvdir.events event="namespace refused" node=n1"""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "ts": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _quoted(value: object) -> str:
    text = str(value)
    if text and not any(sign in text for sign in ' "=\n\t'):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t") + '"'


class _DroppingQueueHandler(logging.handlers.QueueHandler):
    """Drops what does not fit; the next line that fits says how many."""

    dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            return
        if self.dropped:
            lost, self.dropped = self.dropped, 0
            self.enqueue(logging.LogRecord("kvdir.logs", logging.WARNING, "", 0, f"{lost} log lines dropped", None, None))


def configure(level: str, *, stream: TextIO | None = None) -> None:
    """Once per process, by the command that starts a daemon."""
    target = logging.StreamHandler(stream or sys.stderr)
    target.setFormatter(LogfmtFormatter())
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_QUEUED_LINES)
    listener = logging.handlers.QueueListener(lines, target)
    root = logging.getLogger()
    root.handlers = [_DroppingQueueHandler(lines)]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("grpc").setLevel(logging.WARNING)
    listener.start()
    atexit.register(listener.stop)
