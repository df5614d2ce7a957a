"""Which weights the LoRAs of an engine have: a digest that goes into the fingerprints of their blocks (tier_keys.py).

vLLM's hash chain names an adapter by name and path. Rules:
- the digest is of the files as they are when a request first names the adapter, weights and adapter_config.json, which says by
  how much they count (lora_alpha).
- vLLM loads an adapter anew, in place, without a word to a connector, and a file may change without being loaded. So once the
  files of a known adapter have changed, nobody can tell which of the two the engine has, and its requests are not shared until
  it is loaded under another number or path.
Not thread-safe: for the scheduler's thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from kvdir.errors import InvalidInput
from peer_agent.connectors.weights import weights_digest

log = logging.getLogger("vllm.kvdir")

CONFIGURATION = "adapter_config.json"

_Marks = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """digest: b"": nobody can tell. marks: of the files it was made of."""

    digest: bytes
    marks: _Marks


class Adapters:
    """By vLLM's number and path of a LoRA."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Known] = {}

    def digest(self, *, name: str, number: int, path: str) -> bytes:
        """b"": nobody can tell which weights these are, so the request is not to be shared; why is said once, in the log."""
        known = self._known.get((number, path))
        if known is None:
            known = _Known(*_looked_at(name, path))
        elif known.digest and _marks(path) != known.marks:
            _warn(name, f"files in {path} have changed since it was first used; load it under another name or path")
            known = _Known(b"", ())
        self._known[number, path] = known
        return known.digest


def _looked_at(name: str, path: str) -> tuple[bytes, _Marks]:
    if not name:
        _warn(f"at {path}", "it has no name, so block hashes and events do not say whose they are: give it a lora_name")
        return b"", ()
    try:
        marks = _marks(path)
        return _digest(path), marks
    except (InvalidInput, OSError) as error:
        _warn(name, str(error))
        return b"", ()


def _digest(path: str) -> bytes:
    made = hashlib.blake2b(bytes.fromhex(weights_digest(path)), digest_size=16, person=b"kvdir-adapter")
    configuration = Path(path) / CONFIGURATION
    if configuration.is_file():
        made.update(configuration.read_bytes())
    return made.digest()


def _marks(path: str) -> _Marks:
    """What changes when a file does; (): it is gone."""
    try:
        with os.scandir(path) as found:
            stats = [(entry.name, entry.stat()) for entry in found if entry.is_file()]
    except OSError:
        return ()
    return tuple(sorted((name, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in stats))


def _warn(name: str, why: str) -> None:
    log.warning("kvdir: requests with LoRA %s are not shared: %s", name, why)
