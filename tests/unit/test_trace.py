"""The trace reader: strict, streaming, and clear about what is wrong where."""

from __future__ import annotations

import gzip
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kvdir.testing.trace import TraceError, fingerprints_of, read_trace

LINE: dict[str, Any] = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [3, 9]}


def write(tmp_path: Path, *lines: object, name: str = "trace.jsonl") -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_requests_come_in_order_when_plain_or_compressed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, LINE, "", {**LINE, "timestamp": 1500, "hash_ids": [3, 9, 10], "tenant": "ignored"}, name=name)
    first, second = read_trace(path)
    assert (first.number, first.at_s, first.blocks) == (0, 0.0, (3, 9))
    assert (second.number, second.at_s, second.blocks) == (1, 1.5, (3, 9, 10))
    assert list(second.fingerprints)[:2] == list(first.fingerprints)


def test_reading_stops_at_the_limit_and_never_sees_what_follows(tmp_path: Path) -> None:
    path = write(tmp_path, LINE, LINE, "garbage")
    assert len(list(read_trace(path, limit=2))) == 2
    assert list(read_trace(path, limit=0)) == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("\\ud800", "not JSON"),
        ("[]", "Expected `object`"),
        ({**LINE, "hash_ids": []}, "hash_ids"),
        ({**LINE, "hash_ids": [1, "2"]}, "hash_ids"),
        ({**LINE, "hash_ids": [-1]}, "hash_ids"),
        ({**LINE, "hash_ids": [2**70]}, "hash_ids"),
        ({**LINE, "timestamp": -1}, "timestamp"),
        ({**LINE, "input_length": 1.5}, "input_length"),
        ({"timestamp": 7}, "input_length"),
    ],
)
def test_error_names_file_line_and_fault_when_a_line_is_bad(tmp_path: Path, line: object, what: str) -> None:
    path = write(tmp_path, LINE, line)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert what in str(caught.value)


def test_error_says_sort_when_time_goes_back(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r":2: .*sort the trace"):
        list(read_trace(write(tmp_path, {**LINE, "timestamp": 5}, LINE)))


def test_error_when_the_file_is_missing_empty_or_cut(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_trace(tmp_path / "none.jsonl"))
    with pytest.raises(TraceError, match="no request"):
        list(read_trace(write(tmp_path)))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress((json.dumps(LINE) + "\n").encode() * 1000)[:-20])
    with pytest.raises(TraceError, match="not a whole gzip file"):
        list(read_trace(cut))
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_text("{}")
    with pytest.raises(TraceError, match="not a whole gzip file"):
        list(read_trace(plain))


def test_shipped_excerpt_is_what_its_readme_says() -> None:
    with resources.as_file(resources.files("peer_agent.demo") / "conversation_1000.jsonl.gz") as path:
        requests = list(read_trace(path))
    blocks = [block for request in requests for block in request.blocks]
    assert (len(requests), len(blocks), len(set(blocks)), requests[-1].at_s) == (1000, 27305, 21514, 330.0)
    assert all(len(request.blocks) == -(-request.input_tokens // 512) for request in requests)


def test_fingerprints_are_pinned() -> None:
    """So that directories and benchmarks of different days can be compared."""
    packed = fingerprints_of([0, 1])
    assert packed.width == 32
    assert packed[0].hex().startswith("16c0bf068508f79d")
    assert packed[0] != packed[1]
