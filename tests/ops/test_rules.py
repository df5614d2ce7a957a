"""Recording rules and alerts under promtool: they are well formed, and each alert fires when it must and only then."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deploy.monitoring.__main__ import FILES
from deploy.monitoring.alerts import GROUPS
from deploy.monitoring.rules import Alert
from kvdir.testing.prometheus_servers import program
from tests.ops.rules_cases import AFTER_MIN, CASES, WELL_MIN, Case

RULES = FILES / "rules.yaml"
ALERTS = {rule.name: rule for group in GROUPS for rule in group.rules if isinstance(rule, Alert)}


def promtool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *arguments], cwd=cwd, capture_output=True, text=True, timeout=100)


def test_the_rules_of_the_chart_are_well_formed(tmp_path: Path) -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_and_every_name_is_used_once() -> None:
    assert set(ALERTS) == {case.alert for case in CASES}
    names = [rule.name for group in GROUPS for rule in group.rules]
    assert len(names) == len(set(names))


def test_alerts_fire_when_their_condition_holds_and_only_then(tmp_path: Path) -> None:
    checks = [check for number, case in enumerate(CASES) for check in _checks(number, case)]
    done = _run(tmp_path, promql_expr_test=checks)
    assert done.returncode == 0, done.stdout + done.stderr


def test_descriptions_have_their_values_when_alerts_fire(tmp_path: Path) -> None:
    """promtool shows alerts that it was told not to expect, annotations and all; so it is told to expect none."""
    shown = _run(tmp_path, alert_rule_test=[_expect_none(case) for case in CASES])
    text = shown.stdout + shown.stderr
    for case in CASES:
        assert f'alertname="{case.alert}"' in text
    assert "<no value>" not in text
    assert "error calling" not in text
    described = re.findall(r'description="([^"]*)"', text)
    assert len(described) >= len(CASES)
    assert not [words for words in described if "<" in words or "{{" in words or "NaN" in words]


def _run(directory: Path, **checks: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """All cases side by side."""
    series = [
        {"series": _in_its_namespace(number, name), "values": _notation(spec.values(case.ill_min))}
        for number, case in enumerate(CASES)
        for name, spec in case.series.items()
    ]
    test = {"interval": "1m", "input_series": series, **checks}
    (directory / "test.yaml").write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    return promtool("test", "rules", "test.yaml", cwd=directory)


def _checks(number: int, case: Case) -> Iterator[dict[str, Any]]:
    """Before, in the first minute, at the end of the ill minutes, and long after."""
    ill, well = WELL_MIN + case.ill_min - 1, WELL_MIN + case.ill_min + AFTER_MIN - 1
    matchers = ", ".join(f'{name}="{value}"' for name, value in case.labels.items())
    any_alert = _in_its_namespace(number, 'ALERTS{alertstate="firing", namespace="n"}')
    others = any_alert.replace("}", f', alertname!~"{"|".join((case.alert, *case.also))}"}}')
    fires = _in_its_namespace(number, f'count(ALERTS{{alertname="{case.alert}", alertstate="firing", {matchers}}})')
    yield _check(any_alert, WELL_MIN - 1, none=True)
    if ALERTS[case.alert].after not in ("0m", "1m"):
        yield _check(fires, WELL_MIN, none=True)
    yield _check(fires, ill)
    yield _check(others, ill, none=True)
    yield _check(any_alert, well, none=True)


def _expect_none(case: Case) -> dict[str, Any]:
    return {"eval_time": f"{WELL_MIN + case.ill_min - 1}m", "alertname": case.alert, "exp_alerts": []}


def _in_its_namespace(number: int, selector: str) -> str:
    return selector.replace('namespace="n"', f'namespace="n{number}"')


def _notation(values: Sequence[float | None]) -> str:
    return " ".join("_" if value is None else f"{value:.6f}" for value in values)


def _check(expr: str, at_min: int, *, none: bool = False) -> dict[str, Any]:
    samples = [] if none else [{"labels": "{}", "value": 1}]
    return {"expr": expr, "eval_time": f"{at_min}m", "exp_samples": samples}
