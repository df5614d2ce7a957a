"""What lookup workers counted: read back whole or not at all, and summed with the main process's own."""

from __future__ import annotations

from pathlib import Path

from kvdir.obs.call_figures import CallFigures, MethodFigures, summed
from kvdir.obs.process_figures import SLOT_BYTES, ProcessFigures, read


def _calls(*codes: str, running: int = 0) -> CallFigures:
    calls = CallFigures()
    for code in codes:
        calls.began("Lookup")
        calls.ended("Lookup", code, 0.002)
    for _ in range(running):
        calls.began("Lookup")
    return calls


def test_figures_are_the_same_when_read_back(tmp_path: Path) -> None:
    written = ProcessFigures(7, {"lookups": 3}, _calls("OK", "NOT_FOUND", running=1).methods)
    written.write(tmp_path / "worker-0")
    assert read(tmp_path / "worker-0") == written
    assert list(tmp_path.iterdir()) == [tmp_path / "worker-0"]


def test_figures_are_none_when_the_file_is_missing_or_garbage(tmp_path: Path) -> None:
    assert read(tmp_path / "worker-0") is None
    for garbage in (b"", b'{"alive_ns": "soon"', bytes(2 * SLOT_BYTES), b"\xff" * 2 * SLOT_BYTES):
        (tmp_path / "worker-0").write_bytes(garbage)
        assert read(tmp_path / "worker-0") is None


def test_figures_are_those_before_when_the_last_were_half_written(tmp_path: Path) -> None:
    path = tmp_path / "worker-0"
    for alive_ns in (1, 2, 3):
        ProcessFigures(alive_ns, {"lookups": alive_ns}).write(path)
        before = path.read_bytes()
    ProcessFigures(4, {"lookups": 4}).write(path)
    after = path.read_bytes()
    changed = [at for at in range(len(after)) if after[at] != before[at]]
    path.write_bytes(before[: changed[-1]] + after[changed[-1] :])  # a part of the record that followed
    assert read(path) == ProcessFigures(3, {"lookups": 3})
    ProcessFigures(5).write(path)
    assert read(path) == ProcessFigures(5)


def test_no_memory_is_needed_when_the_file_is_there(tmp_path: Path) -> None:
    path = tmp_path / "worker-0"
    ProcessFigures(1).write(path)
    had = path.stat()
    for alive_ns in range(2, 10):
        ProcessFigures(alive_ns, {"lookups": 10**alive_ns}, _calls("OK").methods).write(path)
    now = path.stat()
    assert (now.st_ino, now.st_size, now.st_blocks) == (had.st_ino, had.st_size, had.st_blocks)
    assert had.st_blocks * 512 >= 2 * SLOT_BYTES


def test_sums_are_by_method_code_and_bucket_and_leave_the_parts_alone() -> None:
    one, two = _calls("OK", "OK", running=1), _calls("OK", "NOT_FOUND")
    sums = summed([one.methods, two.methods, {"Status": MethodFigures(by_code={"OK": 5})}])
    assert sums["Lookup"].by_code == {"OK": 3, "NOT_FOUND": 1}
    assert (sums["Lookup"].running, sum(sums["Lookup"].buckets)) == (1, 4)
    assert sums["Status"].by_code == {"OK": 5}
    assert one.methods["Lookup"].by_code == {"OK": 2}
