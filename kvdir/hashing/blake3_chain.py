"""kvdir:blake3, the scheme of ours: for engines that have no block hash of their own.

    key       = BLAKE3 derive_key("kvdir block fingerprint 1", "")
    root      = BLAKE3 derive_key("kvdir block fingerprint root 1", block_tokens as u32 LE || seed as UTF-8)
    item[i]   = BLAKE3 keyed(key, item[i-1] (or root) || tokens of block i as u32 LE || extra keys as canonical CBOR, if any)

(BLAKE3 specification, 2.3 modes.) Two chains of other block sizes or seeds have nothing in common. Nothing of the namespace is
in it: that is compared apart, by its digest. It is not `Fingerprints.chain`, which is BLAKE2b over parts of any bytes, has no
seed and needs only the standard library.
"""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np
import numpy.typing as npt

from kvdir.errors import Unsupported
from kvdir.hashing.extra import ExtraKeys, cbor

_KEY = "kvdir block fingerprint 1"
_ROOT = "kvdir block fingerprint root 1"


def is_available() -> bool:
    """Whether the package blake3 is installed."""
    try:
        _blake3()
    except Unsupported:
        return False
    return True


def blake3_root(seed: str, block_tokens: int) -> bytes:
    digest: bytes = _blake3().blake3(block_tokens.to_bytes(4, "little") + seed.encode(), derive_key_context=_ROOT).digest()
    return digest


def blake3_blocks(tokens: npt.NDArray[np.uint32], block_tokens: int, root: bytes, extra: ExtraKeys | None) -> bytes:
    """tokens: whole blocks, little endian. extra: of each block. 32 bytes each; raises Unsupported without the package."""
    blake3, key = _blake3().blake3, _key()
    view, size = tokens.view(np.uint8).data, 4 * block_tokens
    parent, out = root, []
    for block in range(len(tokens) // block_tokens):
        keys = None if extra is None else extra[block]
        tail = b"" if keys is None else cbor(keys)
        parent = blake3(b"".join((parent, view[block * size : (block + 1) * size], tail)), key=key).digest()
        out.append(parent)
    return b"".join(out)


def blake3_once(data: bytes) -> bytes:
    """The bare hash, for the bench."""
    digest: bytes = _blake3().blake3(data).digest()
    return digest


@functools.cache
def _key() -> bytes:
    digest: bytes = _blake3().blake3(b"", derive_key_context=_KEY).digest()
    return digest


@functools.cache
def _blake3() -> ModuleType:
    try:
        import blake3
    except ImportError as error:
        raise Unsupported("hash scheme kvdir:blake3 needs the package blake3: pip install 'kvdir[hashes]'") from error
    return blake3
