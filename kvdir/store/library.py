"""The library of functions that runs inside Redis: its text, its name, and calls of it.

The name carries the schema version and a digest of the text, so that releases with other code live side by side on one server
and none runs what it does not know. An old one is a few kilobytes; FUNCTION LIST shows it, FUNCTION DELETE takes it away.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from kvdir.store.reply import Argument

SCHEMA = 1
"""Version of what lies in Redis: docs/redis.md. Another one is refused."""


class Library:
    """code: what FUNCTION LOAD takes. Functions: shard.lua and meta.lua."""

    def __init__(self) -> None:
        here = resources.files("kvdir.store")
        text = "".join(f"do\n{here.joinpath(name).read_text()}end\n" for name in ("shard.lua", "meta.lua"))
        self.name = f"kvdir_{SCHEMA}_{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
        self.code = f"#!lua name={self.name}\n{text.replace('LIBRARY', self.name)}"

    def call(self, function: str, key: bytes, *arguments: Argument) -> tuple[Argument, ...]:
        return ("FCALL", f"{self.name}_{function}", 1, key, *arguments)

    def read(self, function: str, key: bytes, *arguments: Argument) -> tuple[Argument, ...]:
        return ("FCALL_RO", f"{self.name}_{function}", 1, key, *arguments)
