"""Packed answers as numpy record types; little endian, the layouts of proto/peer_agent/v1."""

from __future__ import annotations

from typing import Any

import numpy as np

BLOCK_RECORD: np.dtype[Any] = np.dtype(
    [("offset", "<u8"), ("generation", "<u8"), ("checksum", "<u8"), ("length", "<u4"), ("state", "<u4")]
)
"""LockResponse.blocks (state: 0 absent, 1 present) and LoadResponse.blocks (state: LoadStatus)."""

RESERVE_RECORD: np.dtype[Any] = np.dtype([("offset", "<u8"), ("generation", "<u4"), ("state", "<u4")])
"""ReserveResponse.blocks (state: BlockState)."""
