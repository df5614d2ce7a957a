"""What the type checker must refuse: a cumulative figure in the hands of a destructive action without its guard."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvdir.core.trust import Convergent, Cumulative, Trusted, total

PREAMBLE = """
from kvdir.core.trust import Convergent, Cumulative, Trusted

def evict(surplus_bytes: Trusted) -> None: ...

figure = Cumulative(1, True, 0.0)
"""
ACCEPTED = "evict(figure.require_trusted())\nevict((figure + figure).require_trusted())\n"
REFUSED = (
    "evict(figure.value)",
    "evict(figure)",
    "evict(7)",
    "evict(Trusted(7))",
    "evict(Trusted(7, object()))",
    "evict(figure.require_trusted() + 1)",
    "evict(Convergent(7, 0.0).require_trusted())",
    "class Mine(Trusted): ...",
)


def mypy(code: str, where: Path) -> subprocess.CompletedProcess[str]:
    file = where / "example.py"
    file.write_text(PREAMBLE + textwrap.dedent(code) + "\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--follow-imports=silent",
        str(file),
    ]
    return subprocess.run(command, cwd=Path(__file__).parents[2], text=True, capture_output=True, timeout=50, check=False)


@pytest.mark.slow
def test_type_checker_finds_every_way_around_the_guard(tmp_path: Path) -> None:
    assert mypy(ACCEPTED, tmp_path).stdout == ""
    answer = mypy("\n".join(REFUSED), tmp_path)
    first = len(PREAMBLE.splitlines()) + 1
    found = {int(line.split(":")[1]) for line in answer.stdout.splitlines() if ": error:" in line}
    assert found == set(range(first, first + len(REFUSED))), answer.stdout + answer.stderr


def test_trusted_number_cannot_be_made_when_the_guard_is_not_passed() -> None:
    with pytest.raises(TypeError, match="require_trusted"):
        Trusted(7, object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Trusted(7)  # type: ignore[call-arg]
    assert isinstance(Cumulative(7, True, 0.0).require_trusted(), Trusted)
    assert not isinstance(Convergent(7, 0.0).require_trusted(), Trusted)


def test_total_is_untrusted_when_one_part_is() -> None:
    parts = [Cumulative(2, True, 5.0), Cumulative(3, False, 4.0, 1.0, "a hole"), Cumulative(4, True, 9.0)]
    assert total(parts, now_s=10.0) == Cumulative(9, False, 4.0, 1.0, "a hole")
    assert total([], now_s=10.0) == Cumulative(0, True, 10.0)
