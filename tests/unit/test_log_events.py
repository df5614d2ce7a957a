"""What daemons log as warnings and errors is in docs/observability.md, and every event is words without values."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
DOCS = (HOME / "docs/observability.md").read_text()
ENGINE_SIDE = "connectors"


def calls() -> Iterator[tuple[str, str, ast.expr]]:
    """(file, level as written, event) of everything that is said."""
    for package in ("kvdir", "peer_agent"):
        for file in (HOME / package).rglob("*.py"):
            if {"testing", "v1", ENGINE_SIDE} & set(file.parts):
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                    continue
                match node.func.id, node.args:
                    case "say", [_, level, event, *_]:
                        yield str(file.relative_to(HOME)), ast.unparse(level), event
                    case "say_bug", [_, event, *_]:
                        yield str(file.relative_to(HOME)), "ERROR", event


CALLS = tuple(calls())


def test_calls_are_found() -> None:
    assert len(CALLS) > 60


@pytest.mark.parametrize(("file", "level", "event"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_event_is_constant_words_and_documented_when_somebody_may_have_to_act(file: str, level: str, event: ast.expr) -> None:
    assert isinstance(event, ast.Constant), f"{file}: an event is words, its values are fields"
    assert isinstance(event.value, str)
    if "WARNING" in level or "ERROR" in level:
        assert f"`{event.value}`" in DOCS or f"`{event.value}," in DOCS, f"docs/observability.md does not name {event.value!r}"
