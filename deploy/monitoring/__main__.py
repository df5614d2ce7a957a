"""`python -m deploy.monitoring` (make monitoring): writes dashboards and rules to where chart and compose file read them.

With --check: writes nothing, and fails if a file is not what would be written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from deploy.monitoring.alerts import GROUPS
from deploy.monitoring.boards import BOARDS
from deploy.monitoring.grafana import to_json
from deploy.monitoring.rules import to_yaml

ROOT = Path(__file__).parents[2]
FILES = ROOT / "helm" / "kvdir" / "files"


def files() -> Iterator[tuple[Path, str]]:
    """Every file that is made, and its text."""
    for board in BOARDS:
        yield FILES / "dashboards" / f"{board.name}.json", json.dumps(to_json(board), indent=1) + "\n"
    yield FILES / "rules.yaml", to_yaml(GROUPS)


def main(arguments: list[str]) -> int:
    check = arguments == ["--check"]
    wrong = [path for path, text in files() if not path.exists() or path.read_text() != text]
    for path, text in files():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif path in wrong:
            sys.stderr.write(f"{path.relative_to(ROOT)} is out of date: run make monitoring and commit\n")
    return 1 if check and wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
