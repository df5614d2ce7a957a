"""Request traces in the format of the Mooncake FAST'25 release, read as a stream.

One JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one number per 512-token block
of the prompt; an equal number means an equal prefix up to and including that block). Plain or gzip (by name, `.gz`).

Rules: unknown keys are ignored, everything else is strict; an error names file and line, and nothing is skipped silently.
Source: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, cast

import msgspec

from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints

BLOCK_TOKENS = 512
FINGERPRINT_BYTES = 32
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TraceError(InvalidInput):
    """A trace cannot be read; the message begins with file:line."""

    code = "trace"


class _Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: Annotated[list[Count], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. at_s: seconds since the start of the trace. blocks: trace numbers of the prompt's blocks, in order."""

    number: int
    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    @property
    def fingerprints(self) -> Fingerprints:
        """32 bytes a block; a trace number already stands for the whole prefix, so no chain is needed."""
        return fingerprints_of(self.blocks)


def fingerprints_of(blocks: Iterable[int]) -> Fingerprints:
    """Fingerprints of trace blocks: BLAKE2b-256 of the number (RFC 7693)."""
    digests = (
        hashlib.blake2b(block.to_bytes(8, "little"), digest_size=FINGERPRINT_BYTES, person=b"kvdir-trace").digest()
        for block in blocks
    )
    return Fingerprints(b"".join(digests), FINGERPRINT_BYTES)


def read_trace(path: Path, *, limit: int | None = None) -> Iterator[Request]:
    """Yields up to `limit` requests, never holding more than one line. Raises TraceError."""
    decoder = msgspec.json.Decoder(_Line)
    count, previous_ms, line_number = 0, 0.0, 0
    try:
        with _open(path) as lines:
            for line_number, line in enumerate(lines, start=1):
                if limit is not None and count >= limit:
                    return
                if not line.strip():
                    continue
                item = _decode(decoder, line, f"{path}:{line_number}")
                if item.timestamp < previous_ms:
                    raise TraceError(
                        f"{path}:{line_number}: timestamp {item.timestamp:g} is before the previous one ({previous_ms:g}): "
                        "sort the trace by timestamp"
                    )
                previous_ms = item.timestamp
                yield Request(count, item.timestamp / 1000, item.input_length, item.output_length, tuple(item.hash_ids))
                count += 1
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}:{line_number + 1}: not a whole gzip file ({error}): fetch it again") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not count and limit != 0:
        raise TraceError(f"{path}:1: holds no request")


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _decode(decoder: msgspec.json.Decoder[_Line], line: bytes, where: str) -> _Line:
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        raise TraceError(f"{where}: {error}; a line needs timestamp, input_length, output_length and hash_ids") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: not JSON: {error}") from error
