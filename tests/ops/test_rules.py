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
from deploy.monitoring.alerts.security import SECURITY
from deploy.monitoring.rules import Alert, to_yaml
from kvdir.testing.prometheus_servers import program
from tests.ops.rules_cases import AFTER_MIN, CASES, WELL_MIN, Case, of

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


ONCE = {
    "peer_agent_skipped_events_total": 400,
    "peer_agent_log_lines_dropped_total": 400,
    "kvdir_limited_total": 400,
    "kvdir_checkpoints_failed_total": 1,
    "kvdir_lookup_worker_restarts_total": 2,
    "kvdir_digest_contradictions_total": 2,
    "kvdir_store_breaker_opened_total": 3,
}
"""By how much a counter may jump without waking anybody, if it does not go on."""


def test_nobody_is_told_of_a_burst_that_is_over(tmp_path: Path) -> None:
    """With the longest interval of scrapes that is usual: there increases are extrapolated most."""
    series = [{"series": of(name), "values": f"0x39 {jump}x40"} for name, jump in ONCE.items()]
    fired = 'count(count_over_time(ALERTS{alertstate="firing"}[1h])) > 0'
    done = _promtool_test(tmp_path, RULES, "1m", series, promql_expr_test=[_check(fired, 79, none=True)])
    assert done.returncode == 0, done.stdout + done.stderr


HOURS = 15 * 24
"""Longer than what the rule of certificates looks back."""
RENEWED = ((90, 60, 15), (18, 12, 15), (7, 4.6, 15), (1, 0.6, 15), (0.25, 0.16, 15), (0.25, 0.16, 0.05), (1, 0.6, 0.1))
"""Days: how long a certificate lives, when it is renewed, with a third left, and for how long the process has run."""
NOT_RENEWED = ((21.5, 90, 15), (16.5, 90, 5), (15.1, 90, 1))


def test_a_certificate_is_said_to_end_when_it_was_not_renewed_in_time(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(to_yaml([SECURITY]))
    at_h = range(HOURS)
    series, checks = [], []
    for number, (life, renewed, runs) in enumerate((*RENEWED, *NOT_RENEWED)):
        ends = [(at - at % (24 * renewed) + 24 * life) * 3600 if at > HOURS - 24 * runs else None for at in at_h]
        selector = _in_its_namespace(number, of("kvdir_tls_expires_timestamp_seconds", port="grpc"))
        series.append({"series": selector, "values": _notation(ends)})
        fired = f'count(count_over_time(ALERTS{{alertstate="firing", namespace="n{number}"}}[14d])) > bool 0'
        checks.append(_check(fired, 60 * (HOURS - 1), none=number < len(RENEWED)))
    done = _promtool_test(tmp_path, tmp_path / "rules.yaml", "1h", series, promql_expr_test=checks)
    assert done.returncode == 0, done.stdout + done.stderr


def _run(directory: Path, **checks: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """All cases side by side."""
    series = [
        {"series": _in_its_namespace(number, name), "values": _notation(spec.values(case.ill_min))}
        for number, case in enumerate(CASES)
        for name, spec in case.series.items()
    ]
    return _promtool_test(directory, RULES, "1m", series, **checks)


def _promtool_test(
    directory: Path, rules: Path, interval: str, series: list[dict[str, str]], **checks: list[dict[str, Any]]
) -> subprocess.CompletedProcess[str]:
    """interval: of scrapes and evaluations."""
    test = {"interval": interval, "input_series": series, **checks}
    document = {"rule_files": [str(rules)], "evaluation_interval": interval, "tests": [test]}
    (directory / "test.yaml").write_text(json.dumps(document))
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
