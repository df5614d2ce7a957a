"""What lookup workers counted: read back whole or not at all, and summed with the main process's own."""

from __future__ import annotations

from pathlib import Path

from kvdir.obs.call_figures import CallFigures, MethodFigures, summed
from kvdir.obs.process_figures import ProcessFigures, read


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
    (tmp_path / "worker-0").write_bytes(b'{"alive_ns": "soon"')
    assert read(tmp_path / "worker-0") is None


def test_sums_are_by_method_code_and_bucket_and_leave_the_parts_alone() -> None:
    one, two = _calls("OK", "OK", running=1), _calls("OK", "NOT_FOUND")
    sums = summed([one.methods, two.methods, {"Status": MethodFigures(by_code={"OK": 5})}])
    assert sums["Lookup"].by_code == {"OK": 3, "NOT_FOUND": 1}
    assert (sums["Lookup"].running, sum(sums["Lookup"].buckets)) == (1, 4)
    assert sums["Status"].by_code == {"OK": 5}
    assert one.methods["Lookup"].by_code == {"OK": 2}
