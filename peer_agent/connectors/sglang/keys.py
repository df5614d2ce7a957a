"""HiCache's page keys as fingerprints. Pure.

A key is the page's SHA-256 in hexadecimal (chained over the prefix, so equal key means equal prefix), which stays what it is:
scheme `sglang:sha256`. Any other text, such as a page hash with a coordinate of SGLang's unified key scheme behind it, is
hashed as a whole: it still finds itself, but nobody can compute it from tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvdir.fingerprint import Fingerprints

SCHEME = "sglang:sha256"
SEED = "builtin"
WIDTH = 32
_HEX = 2 * WIDTH


def fingerprints_of(keys: Sequence[str]) -> Fingerprints:
    """32 bytes each, in order."""
    if all(len(key) == _HEX for key in keys) and (packed := _plain("".join(keys))) is not None:
        return Fingerprints(packed, WIDTH)
    return Fingerprints(b"".join(map(_fingerprint, keys)), WIDTH)


def _fingerprint(key: str) -> bytes:
    if len(key) == _HEX and (packed := _plain(key)) is not None:
        return packed
    return hashlib.blake2b(key.encode(), digest_size=WIDTH, person=b"kvdir-sglang-key").digest()


def _plain(text: str) -> bytes | None:
    """What hexadecimal stands for; None for any other text, and for hexadecimal that is not written as SGLang writes it."""
    try:
        packed = bytes.fromhex(text)
    except ValueError:
        return None
    return packed if packed.hex() == text else None
