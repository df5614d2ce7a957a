"""Which weights a model directory holds: a digest that differs when the weights do, without reading them all.

A name says nothing about weights: the same name with other weights gives other KV, and sharing it gives wrong answers with no
sign of it. So the digest covers every weight file's size and, of a safetensors file, the header and three pages of *every
tensor* (first, middle, last); of other formats, pages at even distances. Training or merging changes a tensor all over, so that
is seen; a handful of numbers changed by hand may not be, and then the operator has to state which weights these are (`weights`
in the connector's settings). Reads some 12 KiB a tensor: 10 MB for a model of 70B parameters.
Does not: look anything up on a network. numpy, torch and engines are not needed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvdir.errors import InvalidInput

PAGE_BYTES = 4096
EVEN_PAGES = 256
"""Of a file whose tensors we cannot find."""
MAX_HEADER_BYTES = 100 << 20
"""As safetensors itself allows."""
PATTERNS = (("*.safetensors",), ("*.bin", "*.pt", "*.pth"), ("*.gguf",))
"""Formats in the order engines prefer them; the first of which there is a file counts."""
NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt")


def weights_digest(path: str | os.PathLike[str]) -> str:
    """32 hex digits for a model directory or one weight file. InvalidInput: no weights there, and what to do.

    Files count by name and content, not by where the directory is.
    """
    root = Path(path)
    files = [root] if root.is_file() else weight_files(root)
    if not files:
        raise InvalidInput(
            f"{root} has no weight files ({', '.join(kind for kinds in PATTERNS for kind in kinds)}), so nobody can tell which "
            "weights this engine has: say it with the setting `weights`, the same text exactly where the weights are the same"
        )
    total = hashlib.blake2b(digest_size=16, person=b"kvdir-weights")
    for file in files:
        total.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            for start, length in _samples(stream.fileno(), file):
                total.update(os.pread(stream.fileno(), length, start))
    return total.hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """Weight files of the preferred format, by name."""
    for patterns in PATTERNS:
        found = {file for pattern in patterns for file in directory.glob(pattern) if file.name not in NOT_WEIGHTS}
        if found:
            return sorted(found)
    return []


def _samples(descriptor: int, file: Path) -> Iterator[tuple[int, int]]:
    """(start, length) of what counts, in file order."""
    size = os.fstat(descriptor).st_size
    spans = _tensor_spans(descriptor, size) if file.suffix == ".safetensors" else None
    if spans is None:
        step = max(PAGE_BYTES, size // EVEN_PAGES)
        yield from _pages((start, start + PAGE_BYTES) for start in range(0, size, step))
        yield max(0, size - PAGE_BYTES), PAGE_BYTES
        return
    first, tensors = spans
    yield 0, first
    for start, end in tensors:
        middle = (start + end) // 2
        yield from _pages(((start, end), (middle, end), (max(start, end - PAGE_BYTES), end)))


def _pages(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, end in spans:
        yield start, min(PAGE_BYTES, end - start)


def _tensor_spans(descriptor: int, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """(where the tensors begin, where each lies); None: not what safetensors writes."""
    header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        return None
    first = 8 + header_bytes
    try:
        header = json.loads(os.pread(descriptor, header_bytes, 8))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        spans = sorted((first + int(start), first + int(end)) for start, end in offsets)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return (first, spans) if all(first <= start <= end <= size for start, end in spans) else None
