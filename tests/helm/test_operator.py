"""Objects of the Prometheus operator, read by the models of its own definitions: nothing is lost, so nothing is misspelt."""

from __future__ import annotations

from typing import Any

import pytest
from cloudcoil.models.prometheus_operator import v1

from tests.helm.chart import CI, Object, ci_values, merged, render

pytestmark = pytest.mark.helm

MODELS = {"ServiceMonitor": v1.ServiceMonitor, "PodMonitor": v1.PodMonitor, "PrometheusRule": v1.PrometheusRule}
ON = {"monitoring": {"monitors": True, "rules": True, "dashboards": True}}


def lost(given: Any, read: Any, path: str = "") -> list[str]:
    """Keys that the model did not take."""
    if isinstance(given, dict):
        unknown = [f"{path}.{key}" for key in given if not isinstance(read, dict) or key not in read]
        return unknown or [fault for key in given for fault in lost(given[key], read[key], f"{path}.{key}")]
    if isinstance(given, list):
        return [fault for index, item in enumerate(given) for fault in lost(item, read[index], f"{path}[{index}]")]
    return [] if given == read or str(given) == str(read) else [f"{path}: {given!r} became {read!r}"]


@pytest.mark.parametrize("name", CI)
def test_nothing_is_lost_when_the_operators_models_read_it(name: str) -> None:
    rendered = render(merged(ci_values(name), ON))
    found = [item for item in rendered.objects if item["kind"] in MODELS]
    assert {item["kind"] for item in found} == set(MODELS)
    for item in found:
        model: Any = MODELS[item["kind"]].model_validate(item)
        assert lost(item, model.model_dump(by_alias=True, exclude_none=True, mode="json")) == []


def test_every_alert_leads_to_the_runbook_when_its_address_is_given() -> None:
    def links(values: Object) -> list[str]:
        (rule,) = render(merged({"insecure": True, **ON}, values)).of("PrometheusRule")
        alerts = [alert for group in rule["spec"]["groups"] for alert in group["rules"] if "alert" in alert]
        assert len(alerts) > 10
        return [alert["annotations"]["runbook_url"] for alert in alerts]

    assert {link.partition("#")[0] for link in links({})} == {"docs/runbook.md"}
    served = "https://wiki.example/kvdir-runbook"
    assert {link.partition("#")[0] for link in links({"monitoring": {"runbook": served}})} == {served}


def test_labels_of_a_template_stay_as_they_are_when_rules_are_wrapped() -> None:
    (rule,) = render({"insecure": True, **ON}).of("PrometheusRule")
    text = str(rule["spec"])
    assert "{{ $labels." in text, "Prometheus fills these in, not Helm"


def test_dashboards_are_one_config_map_each_when_they_are_on() -> None:
    rendered = render(merged({"insecure": True, **ON}, {"monitoring": {"dashboardAnnotations": {"folder": "kvdir"}}}))
    boards = [item for item in rendered.of("ConfigMap") if "grafana_dashboard" in item["metadata"]["labels"]]
    assert len(boards) == 5
    for item in boards:
        (text,) = item["data"].values()
        assert len(text) < 1_000_000, "of a ConfigMap"
        assert item["metadata"]["annotations"] == {"folder": "kvdir"}
