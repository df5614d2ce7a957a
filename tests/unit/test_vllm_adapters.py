"""Which weights a LoRA has, as far as anybody can tell. No vLLM is needed here."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from peer_agent.connectors.vllm.adapters import CONFIGURATION, Adapters


def adapter(directory: Path, *, weights: bytes = b"weights", alpha: int = 16) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.bin").write_bytes(weights)
    (directory / CONFIGURATION).write_text(f'{{"lora_alpha": {alpha}}}')
    return str(directory)


def digest(path: str, *, name: str = "lora", number: int = 1, known: Adapters | None = None) -> bytes:
    return (known or Adapters()).digest(name=name, number=number, path=path)


def test_digest_is_that_of_weights_and_of_how_much_they_count(tmp_path: Path):
    made = digest(adapter(tmp_path / "a"))
    assert made
    assert digest(adapter(tmp_path / "same"), name="other", number=2) == made
    assert digest(adapter(tmp_path / "weights", weights=b"others!")) != made
    assert digest(adapter(tmp_path / "alpha", alpha=32)) != made


def test_nobody_can_tell_when_files_changed_since_the_first_request(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """As by vLLM's load_inplace, which keeps number and path."""
    known, path = Adapters(), adapter(tmp_path / "a")
    before = digest(path, known=known)
    assert digest(path, known=known) == before
    adapter(tmp_path / "a", weights=b"others!")
    with caplog.at_level(logging.WARNING):
        assert digest(path, known=known) == b""
        assert digest(path, known=known) == b""
    assert [record.getMessage() for record in caplog.records if "have changed" in record.getMessage()] == [caplog.messages[0]]
    assert digest(path, known=known, number=2) not in (b"", before)


@pytest.mark.parametrize(
    ("name", "there", "message"), [("", True, "give it a lora_name"), ("lora", False, "so nobody can tell which weights")]
)
def test_nobody_can_tell_and_the_log_says_why_when_there_is_no_name_or_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, there: bool, message: str
):
    path = adapter(tmp_path / "a")
    if not there:
        shutil.rmtree(path)
    with caplog.at_level(logging.WARNING):
        assert digest(path, name=name) == b""
    assert message in caplog.text
