"""Extra keys of blocks (LoRA, media, cache salt, prompt embeddings) as a scheme's messages carry them.

A block's extra keys are what its engine puts beside the tokens: None, or for vLLM a tuple of tagged tuples such as
("lora", name, path). They may be secret: they get into a hash and nowhere else.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdir.errors import InvalidInput
from kvdir.hashing.schemes import Extra, Scheme

ExtraKeys = Sequence[Any]
"""One entry for each whole block: None, or its keys (tuples, lists, text, bytes, integers, and maps of those)."""


def vllm_extra(
    blocks: int, *, lora_name: str = "", lora_path: str = "", cache_salt: str = "", first: bool = True
) -> list[tuple[tuple[str, ...], ...] | None]:
    """Extra keys of a text request, as vLLM 0.32 makes them (generate_block_hash_extra_keys): the LoRA in every block, the
    cache salt in the prompt's first one.

    first: whether block 0 of these is the first of the prompt. Older versions of vLLM have the same values without tags.
    """
    lora = (("lora", lora_name, lora_path),) if lora_name else ()
    salt = (("cache_salt", cache_salt),) if cache_salt and first else ()
    rest = lora or None
    return [(*lora, *salt) or None, *[rest] * (blocks - 1)] if blocks else []


def check_extra(scheme: Scheme, extra: ExtraKeys, blocks: int) -> None:
    """Raises InvalidInput if the scheme has none, or there is not one entry for each block."""
    if scheme.extra is Extra.NONE:
        raise InvalidInput(
            f"{scheme.name} has no extra keys that we know: adapter and salt are in its seed or in the namespace"
        )
    if len(extra) != blocks:
        raise InvalidInput(
            f"{len(extra)} entries of extra keys for {blocks} whole blocks: give one for each, None where there are none"
        )


def encode(scheme: Scheme, extra: ExtraKeys) -> tuple[bytes, npt.NDArray[np.uint64]]:
    """What follows the tokens in the message of each block, end to end, and where that of each block ends. Raises
    InvalidInput.
    """
    of_one = pickle_tail if scheme.extra is Extra.PICKLE else cbor
    nothing = of_one(None)
    parts = [nothing if keys is None else of_one(keys) for keys in extra]
    ends = np.cumsum([len(part) for part in parts], dtype=np.uint64)
    return b"".join(parts), ends


def pickle_tail(keys: Any) -> bytes:
    """What pickle writes for the third item of (parent, tokens, keys), and to close the tuple.

    Pickle writes an object that it has met again as a reference, and equal objects as often as they come: tags are one object
    each, as they are in vLLM's code; other values are as the caller made them. That is why CBOR schemes are the better ones.
    The parent is an object of its own here, as it is there.
    """
    try:
        whole = pickle.dumps((bytes(_WIDE), (0, 0, 0), _interned(keys)), protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidInput(f"extra keys cannot be pickled: {type(error).__name__}") from error
    return whole[len(_PICKLE_HEAD) :]


_WIDE = 32  # bytes of one byte or none are one object in all of Python

_PICKLE_HEAD = pickle.dumps((bytes(_WIDE), (0, 0, 0), None), protocol=5)[: -len(b"N\x87\x94.")]


def _interned(keys: Any) -> Any:
    if not isinstance(keys, tuple):
        return keys
    return tuple(
        (sys.intern(key[0]), *key[1:]) if isinstance(key, tuple) and key and isinstance(key[0], str) else key for key in keys
    )


def cbor(value: Any) -> bytes:
    """Canonical CBOR (RFC 8949 with the key order of RFC 7049, 3.9). Raises InvalidInput for what has no one form: floats and
    others.
    """
    match value:
        case None:
            return b"\xf6"
        case bool():
            return b"\xf5" if value else b"\xf4"
        case int():
            return _head(0, value) if value >= 0 else _head(1, -1 - value)
        case bytes():
            return _head(2, len(value)) + value
        case str():
            raw = value.encode()
            return _head(3, len(raw)) + raw
        case tuple() | list():
            return _head(4, len(value)) + b"".join(map(cbor, value))
        case Mapping():
            pairs = sorted(((cbor(key), cbor(item)) for key, item in value.items()), key=lambda pair: (len(pair[0]), pair[0]))
            return _head(5, len(value)) + b"".join(key + item for key, item in pairs)
    raise InvalidInput(f"extra keys hold a {type(value).__name__}: use text, bytes, integers, tuples and maps of those")


def _head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes([major << 5 | value])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << 8 * size:
            return bytes([major << 5 | code]) + value.to_bytes(size, "big")
    raise InvalidInput("extra keys hold an integer of more than 64 bits")
