"""Token ids as the chains want them: unsigned 32-bit, little endian, contiguous; checked, never wrapped around."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdir.errors import InvalidInput

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
"""A list, tuple, array.array or one-dimensional numpy array of any integer type."""

MOST = 2**32 - 1


def as_tokens(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """uint32[n]; the same memory where it fits already. Raises InvalidInput with the first bad position, not the token."""
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as error:  # a ragged list
        raise InvalidInput("tokens must be one flat list of integers") from error
    if array.ndim != 1:
        raise InvalidInput(f"tokens must be one flat list of integers, this has {array.ndim} dimensions")
    if not len(array):
        return np.zeros(0, "<u4")
    if array is not tokens and array.dtype.kind in "Of":  # what numpy makes of integers beyond 64 bits, or no integers at all
        array = _from_objects(tokens)
    if array.dtype.kind not in "iu":
        raise InvalidInput(f"tokens must be integers, not {array.dtype}")
    if array.dtype.itemsize > 4 or array.dtype.kind == "i":
        bad = np.flatnonzero((array < 0) | (array > MOST))
        if len(bad):
            raise InvalidInput(f"token at position {bad[0]} is not between 0 and 2**32 - 1")
    return np.ascontiguousarray(array, "<u4")


def _from_objects(tokens: Tokens) -> npt.NDArray[np.integer[Any]]:
    for position, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise InvalidInput(f"token at position {position} is no integer but {type(token).__name__}")
        if not 0 <= int(token) <= MOST:
            raise InvalidInput(f"token at position {position} is not between 0 and 2**32 - 1")
    return np.array([int(token) for token in tokens], np.uint32)
