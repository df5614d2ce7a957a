"""Event dialects of engines and routers: bytes in, values out. Pure: no I/O, no clock, no asyncio, no logging.

`decode` translates one message; `Residency` counts what an engine holds; `EngineCursor` follows its numbering; `rfc1527`
writes the standard envelope. Sockets are kvdir/client/engine_stream.py's. See docs/engines/events.md.
"""

from kvdir.engines.cursor import EngineCursor
from kvdir.engines.dialects import COUNTS_COPIES, DIALECTS, decode
from kvdir.engines.door import Door
from kvdir.engines.effects import AskReplay, CursorEffect, Deliver, Doubt, Lost, NewLife
from kvdir.engines.events import (
    Cleared,
    DecodedBatch,
    EngineEvent,
    Group,
    Reason,
    Removed,
    Stored,
    adapter_of,
    tenant_of,
)
from kvdir.engines.intake import Owner
from kvdir.engines.parts import EngineIdentity, told_scheme
from kvdir.engines.residency import Applied, Residency
from kvdir.engines.wire import END_SEQ, Frame, read_frame

__all__ = [
    "COUNTS_COPIES",
    "DIALECTS",
    "END_SEQ",
    "Applied",
    "AskReplay",
    "Cleared",
    "CursorEffect",
    "DecodedBatch",
    "Deliver",
    "Door",
    "Doubt",
    "EngineCursor",
    "EngineEvent",
    "EngineIdentity",
    "Frame",
    "Group",
    "Lost",
    "NewLife",
    "Owner",
    "Reason",
    "Removed",
    "Residency",
    "Stored",
    "adapter_of",
    "decode",
    "read_frame",
    "tenant_of",
    "told_scheme",
]
