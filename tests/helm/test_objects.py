"""Objects that name each other mean each other: selectors, ports, probes, accounts, certificates, network policies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import CI, OPERATOR, Object, Rendered, ci_values, render

pytestmark = pytest.mark.helm

PROBES = {"startupProbe": "startup", "livenessProbe": "liveness", "readinessProbe": "readiness"}


def matches(selector: Object, labels: Object) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def pods_of(rendered: Rendered) -> list[tuple[Object, Object]]:
    """(labels, spec) of every pod."""
    return [(pod["metadata"]["labels"], pod["spec"]) for _, pod in rendered.pods()]


def port_names(spec: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for container in spec["containers"] for port in container["ports"]}


@pytest.mark.parametrize("name", CI)
def test_every_selector_finds_one_kind_of_pods_when_rendered(name: str) -> None:
    rendered = render(ci_values(name))
    pods = pods_of(rendered)
    for item in rendered.objects:
        spec: Any = item.get("spec", {})
        match item["kind"]:
            case "StatefulSet" | "DaemonSet":
                assert matches(spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"])
                found = [labels for labels, _ in pods if matches(spec["selector"]["matchLabels"], labels)]
                assert len(found) == 1
            case "Service":
                (chosen,) = [pod for labels, pod in pods if matches(spec["selector"], labels)]
                for port in spec["ports"]:
                    assert port_names(chosen)[port["targetPort"]] == port["port"]
            case "PodDisruptionBudget":
                assert len([labels for labels, _ in pods if matches(spec["selector"]["matchLabels"], labels)]) == 1


@pytest.mark.parametrize("name", CI)
def test_monitors_find_their_ports_when_rendered(name: str) -> None:
    rendered = render(ci_values(name) | {"monitoring": {"monitors": True}})
    (service,) = [
        item
        for item in rendered.of("Service")
        if matches(rendered.of("ServiceMonitor")[0]["spec"]["selector"]["matchLabels"], item["metadata"]["labels"])
    ]
    assert service["spec"]["clusterIP"] == "None", "each coordinator is scraped, not one of them"
    (endpoint,) = rendered.of("ServiceMonitor")[0]["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    monitor = rendered.of("PodMonitor")[0]["spec"]
    for labels, spec in pods_of(rendered):
        chosen = matches(monitor["selector"]["matchLabels"], labels)
        assert chosen == (monitor["podMetricsEndpoints"][0]["port"] in port_names(spec))


@pytest.mark.parametrize("name", CI)
def test_probes_ask_the_health_port_for_its_three_names_when_rendered(name: str) -> None:
    for _, spec in pods_of(render(ci_values(name))):
        for container in spec["containers"]:
            ports = port_names(spec)
            for probe, service in PROBES.items():
                assert container[probe]["grpc"]["service"] == service
                assert container[probe]["grpc"]["port"] in (ports.get("health"), ports.get("kvdir-health"))


@pytest.mark.parametrize("name", CI)
def test_network_policies_open_every_port_that_pods_have_when_they_are_on(name: str) -> None:
    rendered = render(ci_values(name) | {"networkPolicy": {"enabled": True}})
    for policy in rendered.of("NetworkPolicy"):
        opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())}
        for labels, spec in pods_of(rendered):
            if matches(policy["spec"]["podSelector"]["matchLabels"], labels):
                assert set(port_names(spec).values()) <= opened
        assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_engines_keep_their_own_ports_when_a_policy_selects_their_pods() -> None:
    policy = render({"insecure": True}).one("NetworkPolicy", "kvdir-agent")
    free = [rule["ports"] for rule in policy["spec"]["ingress"] if "from" not in rule]
    ranges = [(port["port"], port.get("endPort", port["port"])) for ports in free for port in ports if "protocol" not in port]
    open_ports = {port for first, last in ranges for port in range(first, last + 1)}
    assert set(range(1, 65536)) - open_ports == {7410, 7412}, "of an engine's pod only the agent's own ports are closed"


@pytest.mark.parametrize("name", CI)
def test_accounts_and_mounted_objects_exist_when_the_chart_makes_them(name: str) -> None:
    values = ci_values(name)
    rendered = render(values)
    outside = set(_external(values))
    made = {(item["kind"], item["metadata"]["name"]) for item in rendered.objects}
    made |= {("Secret", item["spec"]["secretName"]) for item in rendered.of("Certificate")}
    for _, spec in pods_of(rendered):
        assert ("ServiceAccount", spec["serviceAccountName"]) in made
        for volume in spec["volumes"]:
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in made | outside
            if "configMap" in volume:
                config = rendered.one("ConfigMap", volume["configMap"]["name"])
                assert {item["key"] for item in volume["configMap"].get("items", ())} <= set(config["data"])


def _external(values: Object) -> list[tuple[str, str]]:
    tls, policy = values.get("tls", {}), values.get("policy", {})
    return [("Secret", name) for name in (*tls.get("secret", {}).values(), policy.get("secretName", ""))]


def test_only_agents_may_read_endpoint_slices_when_discovery_is_by_kubernetes() -> None:
    rendered = render(ci_values("full"))
    (role,), (binding,) = rendered.of("Role"), rendered.of("RoleBinding")
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "vllm", "namespace": "llm"}]
    assert not render({"insecure": True}).of("Role")


def test_a_budget_is_made_only_when_a_drain_leaves_somebody() -> None:
    assert render({"insecure": True}).of("PodDisruptionBudget")
    assert not render({"insecure": True, "coordinator": {"replicas": 1}}).of("PodDisruptionBudget")
    assert not render({"insecure": True, "coordinator": {"pdb": {"enabled": False}}}).of("PodDisruptionBudget")


def test_names_fit_when_the_release_has_a_long_one() -> None:
    rendered = render(ci_values("full"), name="a" * 53, apis=(OPERATOR,))
    for item in rendered.objects:
        assert len(item["metadata"]["name"]) <= 63
        for value in item["metadata"]["labels"].values():
            assert len(value) <= 63
    assert len(rendered.of("StatefulSet")[0]["metadata"]["name"]) <= 52, "of the label controller-revision-hash"
