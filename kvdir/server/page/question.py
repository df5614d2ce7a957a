"""What somebody pastes into the lookup explainer: fingerprints, or the name of a request. Pure.

Fingerprints are told apart from names by what they are: hexadecimal or base64 of 8, 16 or 32 bytes, all alike, between spaces,
commas, quotes or brackets, so that a Python list or a line of a log can be pasted as it is. A single word that is none is a
name.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from kvdir.errors import InvalidInput
from kvdir.fingerprint import WIDTHS, Fingerprints

MAX_FINGERPRINTS = 4_096
MAX_NAME = 128
_SPLIT = re.compile(r"""[\s,;'"\[\]()]+""")
_HEX = re.compile(r"(?:0x)?([0-9a-fA-F]+)")
_BYTES_LITERAL = re.compile(r"\bb(?=['\"])")
_BASE64 = {4 * -(-width // 3): width for width in WIDTHS}
"""Characters of the padded form of so many bytes; without padding they are told by their bytes."""


@dataclass(frozen=True, slots=True)
class Question:
    """fingerprints: None when there are none. name: of a request, if it may be one: a trace id looks like a fingerprint."""

    fingerprints: Fingerprints | None
    name: str = ""


def read_question(text: str) -> Question:
    """Raises InvalidInput with what is wrong with which word."""
    words = [word for word in _SPLIT.split(_BYTES_LITERAL.sub("", text)) if word]
    if not words:
        raise InvalidInput("paste fingerprints (hexadecimal or base64, separated by spaces or commas), or a request id")
    if len(words) > MAX_FINGERPRINTS:
        raise InvalidInput(
            f"{len(words)} fingerprints, at most {MAX_FINGERPRINTS} are explained at a time: paste the first ones"
        )
    found = [_fingerprint(word) for word in words]
    name = words[0] if len(words) == 1 and len(words[0]) <= MAX_NAME else ""
    if name and found[0] is None:
        return Question(None, name)
    for word, item in zip(words, found, strict=True):
        if item is None:
            raise InvalidInput(
                f"{word[:80]!r} is no fingerprint: 16, 32 or 64 hexadecimal digits, or base64 of 8, 16 or 32 bytes"
            )
    items = [item for item in found if item is not None]
    odd = next((item for item in items if len(item) != len(items[0])), None)
    if odd is not None:
        raise InvalidInput(
            f"fingerprints of {len(items[0])} and of {len(odd)} bytes in one list: they are of different schemes"
        )
    return Question(Fingerprints.of(items), name)


def _fingerprint(word: str) -> bytes | None:
    match = _HEX.fullmatch(word)
    if match is not None and len(match[1]) in (2 * width for width in WIDTHS):
        return bytes.fromhex(match[1])
    try:
        item = base64.b64decode(word.replace("-", "+").replace("_", "/") + "=" * (-len(word) % 4), validate=True)
    except (ValueError, binascii.Error):
        return None
    return item if len(item) in WIDTHS else None
