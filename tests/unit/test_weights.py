"""Digest of weights: equal for equal weights wherever they lie, different as soon as one tensor is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvdir.errors import InvalidInput
from peer_agent.connectors.weights import weights_digest


def save(path: Path, *, tensors: int = 3, numbers: int = 50_000, seed: int = 0) -> Path:
    """A safetensors file of float32 tensors, as the format says (8-byte length, JSON header, data)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.random.default_rng(seed).standard_normal((tensors, numbers), np.float32)
    header = {
        f"layer.{number}": {
            "dtype": "F32",
            "shape": [numbers],
            "data_offsets": [number * numbers * 4, (number + 1) * numbers * 4],
        }
        for number in range(tensors)
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data.tobytes())
    return path


def test_digest_is_the_same_when_the_same_weights_lie_elsewhere(tmp_path: Path):
    first, second = save(tmp_path / "a" / "model.safetensors"), save(tmp_path / "b" / "model.safetensors")
    (tmp_path / "b" / "config.json").write_text("{}")
    assert weights_digest(first.parent) == weights_digest(second.parent)


@pytest.mark.parametrize("tensor", [0, 1, 2])
def test_digest_differs_when_any_one_tensor_does(tmp_path: Path, tensor: int):
    file = save(tmp_path / "model.safetensors")
    before = weights_digest(tmp_path)
    raw = bytearray(file.read_bytes())
    start = len(raw) - (3 - tensor) * 200_000
    changed = np.frombuffer(raw, np.uint8, 200_000, start).copy() ^ 1  # as an update changes a tensor: all over
    raw[start : start + 200_000] = changed.tobytes()
    file.write_bytes(raw)
    assert weights_digest(tmp_path) != before


def test_digest_differs_when_a_file_was_added_or_renamed(tmp_path: Path):
    file = save(tmp_path / "model-1.safetensors")
    before = weights_digest(tmp_path)
    second = save(tmp_path / "model-2.safetensors", seed=1)
    both = weights_digest(tmp_path)
    second.unlink()
    file.rename(tmp_path / "other.safetensors")
    assert len({before, both, weights_digest(tmp_path)}) == 3


def test_file_is_sampled_evenly_when_it_is_not_what_its_name_says(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * 3_000_000)
    before = weights_digest(tmp_path)
    file.write_bytes(b"\xff" * 1_500_000 + b"\x00" * 1_500_000)
    assert weights_digest(tmp_path) != before


def test_preferred_format_counts_when_there_are_two(tmp_path: Path):
    save(tmp_path / "model.safetensors")
    before = weights_digest(tmp_path)
    (tmp_path / "pytest_model.bin").write_bytes(b"x" * 100)
    assert weights_digest(tmp_path) == before
    (tmp_path / "model.safetensors").unlink()
    assert weights_digest(tmp_path) != before


def test_error_says_what_to_set_when_there_are_no_weights(tmp_path: Path):
    (tmp_path / "optimizer.pt").write_bytes(b"x")
    with pytest.raises(InvalidInput, match="setting `weights`"):
        weights_digest(tmp_path)


def test_the_whole_header_counts_when_only_its_end_differs(tmp_path: Path):
    found = []
    for remark in ("aaaa", "bbbb"):
        header = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {"remark": remark}}
        text = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        found.append(weights_digest(tmp_path))
    assert found[0] != found[1]
