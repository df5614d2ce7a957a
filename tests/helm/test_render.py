"""The chart renders for every combination, and what it gives is valid Kubernetes at the oldest and newest version."""

from __future__ import annotations

import itertools

import helm_python as helm
import kubernetes_validate
import pytest

from tests.helm.chart import CHART, CI, FLOOR, NEWEST, OPERATOR, ci_values, merged, render

pytestmark = pytest.mark.helm

MODES = ("sidecar", "daemonset")
NO_SECRETS = {"coordinator": "", "agent": ""}
RDMA = {"off": {"enabled": False, "resource": "", "env": []}, "on": {"enabled": True, "resource": "rdma/ib"}}
TLS = {
    "none": {
        "insecure": True,
        "tls": {"mode": "none", "secret": NO_SECRETS},
        "policy": {"toml": "", "secretName": ""},
    },
    "secret": {"tls": {"mode": "secret", "secret": {"coordinator": "a", "agent": "b"}}},
    "certManager": {"tls": {"mode": "certManager", "certManager": {"issuerName": "ca"}, "secret": NO_SECRETS}},
    "csi": {"tls": {"mode": "csi", "certManager": {"issuerName": "ca"}, "secret": NO_SECRETS}},
}
MODE = {
    "sidecar": {"mode": "sidecar", "discovery": {"mode": "dns", "serviceAccounts": []}},
    "daemonset": {"mode": "daemonset", "arena": {"hugePages": ""}, "discovery": {"serviceAccounts": []}},
}
FOREIGN = ("monitoring.coreos.com/v1", "cert-manager.io/v1")


@pytest.mark.parametrize("name", CI)
def test_lint_finds_nothing_when_values_are_those_of_ci(name: str) -> None:
    found = helm.lint(CHART, ci_values(name), strict=True, kube_version=f"{FLOOR}.0")
    assert not found["errors"]
    assert not [item for item in found["messages"] if item["severity"] > 1]


@pytest.mark.parametrize("name", CI)
def test_objects_are_valid_when_rendered_for_the_oldest_and_the_newest_kubernetes(name: str) -> None:
    for version in (FLOOR, NEWEST):
        for item in render(ci_values(name), apis=(OPERATOR,), kubernetes=version).objects:
            if item["apiVersion"] not in FOREIGN:
                kubernetes_validate.validate(item, version, strict=True)


def test_the_pause_before_the_end_is_a_command_when_kubernetes_has_sleep_switched_off() -> None:
    def pause(version: str) -> object:
        (container,) = render({"insecure": True}, kubernetes=version).of("StatefulSet")[0]["spec"]["template"]["spec"][
            "containers"
        ]
        return container["lifecycle"]["preStop"]

    assert pause("1.29") == {"exec": {"command": ["sleep", "5"]}}
    assert pause("1.30") == pause(NEWEST) == {"sleep": {"seconds": 5}}


def test_what_looks_like_a_number_stays_a_text_when_it_is_a_name() -> None:
    certificates = {"tls": {"mode": "csi", "serverName": "10", "certManager": {"issuerName": "1e3"}}}
    values = {**certificates, "nameOverride": "7", "agent": {"mode": "daemonset"}}
    for item in render(values, name="123").objects:
        kubernetes_validate.validate(item, NEWEST, strict=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CI)
def test_every_combination_renders_when_its_parts_do(name: str, mode: str) -> None:
    for rdma, tls, monitoring in itertools.product(RDMA, TLS, (True, False)):
        values = merged(ci_values(name), TLS[tls])
        values = merged(values, {"agent": {**MODE[mode], "rdma": RDMA[rdma]}})
        values = merged(values, {"monitoring": {"monitors": monitoring, "rules": monitoring, "dashboards": monitoring}})
        rendered = render(values)
        names = [(item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in rendered.objects]
        assert len(names) == len(set(names)), "two objects of one name"
        assert {item["metadata"]["namespace"] for item in rendered.objects} == {"llm"}
        assert bool(rendered.of("PodMonitor")) == monitoring
        assert bool(rendered.of("DaemonSet")) == (mode == "daemonset")


@pytest.mark.parametrize("wish", [None, True, False])
@pytest.mark.parametrize("known", [True, False])
def test_monitors_follow_the_cluster_when_nothing_is_said(wish: bool | None, known: bool) -> None:
    rendered = render({"insecure": True, "monitoring": {"monitors": wish}}, apis=(OPERATOR,) if known else ())
    expected = known if wish is None else wish
    assert len(rendered.of("PodMonitor")) == len(rendered.of("ServiceMonitor")) == expected
