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
_PAGE_HASH = re.compile(r"[0-9a-f]{64}")


def fingerprints_of(keys: Sequence[str]) -> Fingerprints:
    """32 bytes each, in order."""
    return Fingerprints(b"".join(map(_fingerprint, keys)), WIDTH)


def _fingerprint(key: str) -> bytes:
    if _PAGE_HASH.fullmatch(key):
        return bytes.fromhex(key)
    return hashlib.blake2b(key.encode(), digest_size=WIDTH, person=b"kvdir-sglang-key").digest()
