"""The door: does the engine compute its hashes as we were told it does? If not, no lookup would ever hit, silently.

Rules: looks once, at the first full block of the first unsalted sequence without adapter; then token ids are not looked at
again. The tokens live in `check` only. An engine restarted with another seed needs a new door. Does not: compute hashes
(kvdir/hashing does; it is handed in as `fits`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvdir.engines.wire import Undecodable

Fits = Callable[[Sequence[int], int, bytes], str]
"""(tokens of one block, block_tokens, the engine's hash) -> "" if the scheme fits, else what is wrong, in words."""

_FIRST_TOKENS = msgspec.msgpack.Decoder(list[Any])


class Door:
    """settled: the question is answered, one way or the other. mismatch: what is wrong, in words; empty if nothing is."""

    def __init__(self, fits: Fits) -> None:
        self._fits = fits
        self.settled = False
        self.mismatch = ""

    def check(self, token_ids: msgspec.Raw | bytes, block_tokens: int, first_hash: bytes) -> None:
        """token_ids: an encoded array of whole blocks from the start of a sequence. Bigrams (Eagle) settle nothing, and nor do
        items that cannot be decoded: until here nobody looked at them.
        """
        try:
            tokens = _FIRST_TOKENS.decode(token_ids)[:block_tokens]
        except Undecodable:
            return
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            return
        self.settled = True
        self.mismatch = self._fits(tokens, block_tokens, first_hash)
