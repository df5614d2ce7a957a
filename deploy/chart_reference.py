"""What of the chart is made: settings of the daemons into values.schema.json, values and their comments into README.md.

    python -m deploy.chart_reference          write both
    python -m deploy.chart_reference --check  exit 1 if one of them is out of date

Rules: values.yaml is read line by line, in the one style it is written in (a comment above each key, two spaces a level), so
that nothing but kvdir itself has to be installed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvdir.config import Setting, settings
from kvdir.server.config import CoordinatorConfig
from peer_agent.server.config import AgentConfig

CHART = Path(__file__).resolve().parents[1] / "helm/kvdir"
BEGIN, END = "<!-- values -->", "<!-- end of values -->"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]+):(?: (?P<default>.+))?$")

_KINDS: dict[type, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[0-9]+([.][0-9]+)? ?([KMGT]iB|[KMG]B)?$"}]},
    float: {"type": "number"},
    str: {"type": "string"},
    tuple: {
        "anyOf": [
            {"type": "array", "items": {"type": "string"}},
            {"type": "object", "additionalProperties": {"type": "string"}},
        ]
    },
}


def schema_of(declared: list[Setting]) -> dict[str, Any]:
    """Of the map of settings that goes into a daemon's file."""
    properties = {item.name: {**_KINDS[item.kind], "description": item.help} for item in declared}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def schema() -> str:
    document = json.loads((CHART / "values.schema.json").read_text())
    document["$defs"]["coordinatorSettings"] = schema_of(settings(CoordinatorConfig))
    document["$defs"]["agentSettings"] = schema_of(settings(AgentConfig))
    return json.dumps(document, indent=1) + "\n"


def values() -> Iterator[tuple[str, str, str]]:
    """(path, default, description) of every value, in order. ValueError for a line in another style, or without a comment."""
    path: list[str] = []
    comment = ""
    for number, line in enumerate((CHART / "values.yaml").read_text().splitlines(), 1):
        if line.strip().startswith("#"):
            comment = line.strip().removeprefix("#").strip()
            continue
        if not line.strip():
            comment = ""
            continue
        found = _KEY.match(line)
        if found is None:
            if comment or not path:
                raise ValueError(f"values.yaml:{number}: write a comment above a key, and the key's value in its line")
            continue
        depth = len(found["indent"]) // 2
        if depth > len(path):
            continue  # of a value that is shown whole
        path = [*path[:depth], found["key"]]
        if found["default"] is not None:
            if not comment:
                raise ValueError(f"values.yaml:{number}: {'.'.join(path)} has no comment above it")
            yield ".".join(path), found["default"], comment
        elif comment:
            yield ".".join(path), "see values.yaml", comment
            path = path[:-1]
        comment = ""


def readme() -> str:
    text = (CHART / "README.md").read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    lines = ["", "| value | default | what it does |", "|---|---|---|"]
    lines += [f"| `{path}` | `{default}` | {words} |" for path, default, words in values()]
    return head + BEGIN + "\n".join(lines) + "\n" + END + tail


def main() -> int:
    texts = {CHART / "values.schema.json": schema(), CHART / "README.md": readme()}
    stale = [path for path, text in texts.items() if path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(CHART.parent.parent)} is out of date: run make docs and commit")
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
