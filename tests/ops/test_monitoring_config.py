"""Configuration files beside the dashboards, read by the programs they are for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.monitoring.alerts import GROUPS
from deploy.monitoring.rules import Alert
from deploy.monitoring.watched import ROOT
from kvdir.testing.prometheus_servers import program

HERE = ROOT / "deploy" / "monitoring"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_reads_its_configuration(tmp_path: Path) -> None:
    """With the path of the rules in a container replaced by theirs here."""
    text = (HERE / "prometheus.yml").read_text()
    inside = "/etc/prometheus/rules/*.yaml"
    assert inside in text
    (tmp_path / "prometheus.yml").write_text(text.replace(inside, str(ROOT / "helm" / "kvdir" / "files" / "rules.yaml")))
    assert "rules found" in run(program("promtool"), "check", "config", str(tmp_path / "prometheus.yml"))


def test_alertmanager_reads_its_configuration_and_every_name_in_it_is_an_alert() -> None:
    run(program("amtool"), "check-config", str(HERE / "alertmanager.yml"))
    known = {rule.name for group in GROUPS for rule in group.rules if isinstance(rule, Alert)}
    for rule in yaml.safe_load((HERE / "alertmanager.yml").read_text())["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            assert _names(matcher) <= known


def _names(matcher: str) -> set[str]:
    """alertname=X, alertname=~"X|Y" or alertname=~"Kvdir(X|Y)"."""
    expression = matcher.partition("=")[2].strip('~"')
    common, _, rest = expression.partition("(")
    return {common + name for name in rest.rstrip(")").split("|")} if rest else set(expression.split("|"))


@pytest.mark.parametrize(("severity", "receiver"), [("critical", "pager"), ("warning", "office")])
def test_an_alert_goes_to_who_must_hear_of_it(severity: str, receiver: str) -> None:
    config = f"--config.file={HERE / 'alertmanager.yml'}"
    labels = ("alertname=KvdirCorruptBlocks", f"severity={severity}")
    assert run(program("amtool"), "config", "routes", "test", config, *labels).strip() == receiver


def test_grafana_finds_what_compose_mounts() -> None:
    """Grafana itself cannot be had as a package: the files are read as YAML, and hold what its documentation asks for."""
    (source,) = yaml.safe_load((HERE / "provisioning" / "datasources.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((HERE / "provisioning" / "dashboards.yaml").read_text())["providers"]
    assert provider["options"]["path"].startswith("/var/lib/grafana/")
