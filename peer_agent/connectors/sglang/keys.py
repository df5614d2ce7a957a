"""HiCache's page keys as fingerprints. Pure.

A key is the page's SHA-256 in hexadecimal (chained over the prefix, so equal key means equal prefix), which stays what it is:
scheme `sglang:sha256`. Any other text, such as a page hash with a coordinate of SGLang's unified key scheme behind it, is
hashed as a whole: it still finds itself, but nobody can compute it from tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from kvdir.fingerprint import Fingerprints

SCHEME = "sglang:sha256"
SEED = "builtin"
WIDTH = 32
_HEX = 2 * WIDTH
_PAGE_HASHES = re.compile(r"[0-9a-f]*")


def fingerprints_of(keys: Sequence[str]) -> Fingerprints:
    """32 bytes each, in order."""
    text = "".join(keys)
    if len(text) == _HEX * len(keys) and _PAGE_HASHES.fullmatch(text) and all(len(key) == _HEX for key in keys):
        return Fingerprints(bytes.fromhex(text), WIDTH)  # all are page hashes: a tenth of the time
    return Fingerprints(b"".join(map(_fingerprint, keys)), WIDTH)


def _fingerprint(key: str) -> bytes:
    if len(key) == _HEX and _PAGE_HASHES.fullmatch(key):
        return bytes.fromhex(key)
    return hashlib.blake2b(key.encode(), digest_size=WIDTH, person=b"kvdir-sglang-key").digest()
