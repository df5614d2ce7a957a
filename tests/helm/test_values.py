"""Values that cannot work: refused by `helm template`, by the schema or with a sentence that has the fix."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

import helm_python as helm
import pytest
import yaml

from tests.helm.chart import CHART, ROOT, dotted, merged, render

pytestmark = pytest.mark.helm

GOOD = {"insecure": True}
SECRETS = {"mode": "secret", "secret": {"coordinator": "a", "agent": "b"}}
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())

REFUSED_WITH_A_SENTENCE: list[tuple[dict[str, Any], str]] = [
    ({"insecure": False}, "tls.mode to secret, certManager or csi, or acknowledge it with insecure=true"),
    ({"tls": {"mode": "secret", "secret": {"agent": "b"}}}, "tls.secret.coordinator: name the Secret"),
    ({"tls": {"mode": "secret", "secret": {"coordinator": "a"}}}, "tls.secret.agent: name the Secret"),
    ({"tls": {"secret": {"agent": "b"}}}, "set tls.mode=secret, or leave tls.secret empty"),
    ({"tls": {"mode": "certManager"}}, "tls.certManager.issuerName: name the Issuer"),
    (
        {"tls": {"mode": "certManager", "certManager": {"issuerName": "ca", "duration": "8h", "renewBefore": "480m"}}},
        "renewBefore: 480m must be less than duration, 8h",
    ),
    ({"policy": {"toml": "x = 1"}}, "policy needs TLS"),
    ({"policy": {"secretName": "p"}}, "policy needs TLS"),
    ({"tls": SECRETS, "policy": {"toml": "x = 1", "secretName": "p"}}, "policy.toml and policy.secretName: give one of them"),
    (
        {"insecure": False, "tls": SECRETS, "coordinator": {"indexer": {"enabled": True}}},
        "coordinator.indexer.enabled: this API is plain HTTP",
    ),
    ({"coordinator": {"store": {"type": "redis"}}}, "coordinator.store.secretName: name the Secret"),
    ({"coordinator": {"store": {"secretName": "s"}}}, "set it to redis, or leave the Secret out"),
    (
        {"coordinator": {"store": {"type": "redis", "secretName": "s"}, "checkpoint": {"enabled": True}}},
        "coordinator.checkpoint: a directory in Redis is kept there",
    ),
    (
        {"coordinator": {"store": {"type": "redis", "secretName": "s"}, "lookupWorkers": 1}},
        "coordinator.lookupWorkers: they read an index in memory",
    ),
    ({"coordinator": {"replicas": 1, "pdb": {"enabled": True}}}, "with 1 replica it would block every drain"),
    ({"coordinator": {"replicas": 2, "pdb": {"maxUnavailable": 2}}}, "2 of 2 replicas protects nothing"),
    ({"coordinator": {"terminationGracePeriodSeconds": 14}}, "14 is too short: preStopSeconds, grace_s and 5 s to end are 15"),
    (
        {"coordinator": {"terminationGracePeriodSeconds": 34, "config": {"grace_s": 24.5}}},
        "34 is too short: preStopSeconds, grace_s and 5 s to end are 35",
    ),
    ({"agent": {"accept": {"size": "0"}}}, "agent: it would serve nothing: give agent.namespaces, or agent.accept.size"),
    ({"agent": {"rdma": {"enabled": True}}}, "agent.rdma.resource: name what the device plugin offers"),
    ({"agent": {"rdma": {"resource": "rdma/ib"}}}, "agent.rdma has settings but agent.rdma.enabled is false"),
    (
        {"agent": {"rdma": {"enabled": True, "resource": "rdma/ib", "env": [{"name": "PEER_AGENT_LISTEN", "value": "x"}]}}},
        "PEER_AGENT_LISTEN is a setting of the agent",
    ),
    ({"agent": {"runAsUser": 0}}, "agent.runAsUser: an agent needs no root but to lock memory for RDMA"),
    ({"agent": {"mode": "daemonset", "arena": {"hugePages": "2Mi"}}}, "use agent.mode=sidecar, or huge pages of the kernel"),
    (
        {"agent": {"mode": "daemonset", "discovery": {"mode": "kubernetes", "serviceAccounts": [{"name": "x"}]}}},
        "the DaemonSet has its own: leave the list empty",
    ),
    ({"agent": {"mode": "daemonset", "daemonset": {"terminationGracePeriodSeconds": 14}}}, "grace_s and 5 s to end are 15"),
    ({"agent": {"discovery": {"mode": "kubernetes"}}}, "name those of the engines' pods"),
    ({"agent": {"discovery": {"serviceAccounts": [{"name": "x"}]}}}, "nobody needs rights with agent.discovery.mode=dns"),
    (
        {"agent": {"resources": {"limits": {"memory": "4Gi"}}}},
        "agent.resources.limits.memory: 4Gi is less than arena, replica and agent.heap together, 5392Mi",
    ),
    ({"agent": {"heap": "200Mi"}}, "agent.heap: 200Mi is too small"),
    (
        {"agent": {"resources": {"requests": {"memory": "16Gi"}, "limits": {"memory": "8Gi"}}}},
        "agent.resources: the memory request, 16Gi, is above the limit, 8Gi",
    ),
    (
        {"coordinator": {"resources": {"requests": {"memory": "3Gi"}}}},
        "coordinator.resources: the memory request, 3Gi, is above the limit, 2Gi",
    ),
    ({"coordinator": {"lookupWorkers": 1, "lookupShm": "2Gi"}}, "2Gi does not hold coordinator.lookupShm, 2Gi, and 256Mi"),
    (
        {"coordinator": {"config": {"max_index_bytes": "3GiB"}}},
        "max_index_bytes: 3GiB is above coordinator.resources.limits.memory, 2Gi",
    ),
    (
        {"coordinator": {"lookupWorkers": 1, "config": {"max_index_bytes": 1500000000}}},
        "max_index_bytes: 1.5e+09 is above coordinator.lookupShm, 1Gi",
    ),
    ({"agent": {"mode": "daemonset", "daemonset": {"hostPath": f"/mnt/{'d' * 90}"}}}, "more than the 107 characters"),
    ({"coordinator": {"config": {"listen": "x:1"}}}, "coordinator.config.listen: the chart sets it"),
    ({"coordinator": {"config": {"store": "redis://x"}}}, "the chart sets it; use coordinator.store"),
    ({"coordinator": {"config": {"tls_cert": "x"}}}, "coordinator.config.tls_cert: the chart sets it; use tls"),
    ({"agent": {"config": {"node": "x"}}}, "agent.config.node: the chart sets it"),
    ({"agent": {"config": {"arena_bytes": 1}}}, "the chart sets it; use agent.arena"),
    ({"agent": {"config": {"replica_path": "x"}}}, "the chart sets it; use agent.replica"),
    (
        {"coordinator": {"podLabels": {"app.kubernetes.io/name": "x"}}},
        "coordinator.podLabels: app.kubernetes.io/name is a label",
    ),
    ({"commonLabels": {"kvdir/agent": "x"}}, "commonLabels: kvdir/agent is a label"),
    ({"monitoring": {"interval": "5s"}}, "monitoring.scrapeTimeout: 10s is above monitoring.interval, 5s"),
    ({"monitoring": {"dashboards": True, "dashboardLabels": {"grafana_dashboard": None}}}, "monitoring.dashboardLabels"),
]

REFUSED_BY_THE_SCHEMA: list[tuple[str, Any]] = [
    ("agent.mode", "deployment"),
    ("agent.arena.size", "4 GB"),
    ("agent.arena.size", 4),
    ("agent.arena.hugePages", "4Mi"),
    ("agent.runAsUser", -1),
    ("agent.namespaces", {"Not A Name": "x"}),
    ("agent.discovery.mode", "consul"),
    ("agent.daemonset.hostPath", "dev/shm"),
    ("agent.rdma.resource", "infiniband"),
    ("agent.rdma.count", 0),
    ("agent.config", {"arena_byte": 1}),
    ("agent.config", {"prefault": "yes"}),
    ("coordinator.config", {"stale_after_s": "5 seconds"}),
    ("coordinator.replicas", 0),
    ("coordinator.replicas", "3"),
    ("coordinator.store.type", "etcd"),
    ("coordinator.tolerations", [{"Key": "x"}]),
    ("coordinator.resources", {"limit": {}}),
    ("image.digest", "sha256:abc"),
    ("image.pullPolicy", "Sometimes"),
    ("ipFamily", "IPv5"),
    ("monitoring.interval", "15"),
    ("monitoring.rules", "yes"),
    ("networkPolicy.clients", [{}]),
    ("tls.mode", "on"),
]


@pytest.mark.parametrize(("over", "words"), REFUSED_WITH_A_SENTENCE, ids=[words[:40] for _, words in REFUSED_WITH_A_SENTENCE])
def test_rendering_fails_with_a_sentence_when_values_cannot_work_together(over: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.HelmRenderError) as caught:
        render(merged(GOOD, over))
    assert words in str(caught.value)


@pytest.mark.parametrize(("path", "value"), REFUSED_BY_THE_SCHEMA, ids=[f"{p}-{v}" for p, v in REFUSED_BY_THE_SCHEMA])
def test_the_schema_names_the_place_when_a_value_is_of_another_kind(path: str, value: Any) -> None:
    with pytest.raises(helm.HelmValuesError, match=f"'/{path.replace('.', '/')}"):
        render(merged(GOOD, dotted(path, value)))


def test_all_faults_are_said_at_once_when_there_are_five() -> None:
    values = {"coordinator": {"store": {"type": "redis"}, "replicas": 1, "pdb": {"enabled": True}}}
    values |= {"agent": {"accept": {"size": "0"}, "rdma": {"enabled": True}}}
    with pytest.raises(helm.HelmRenderError) as caught:
        render(values)
    assert str(caught.value).count("\n- ") == 6  # and a budget of one replica protects nothing


def _closed(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of the objects with keys of their own."""
    if "properties" in schema and path != "global":
        yield path
        for key, part in schema["properties"].items():
            yield from _closed(part, f"{path}.{key}".lstrip("."))


@pytest.mark.parametrize("path", list(_closed(SCHEMA)))
def test_an_unknown_key_is_refused_when_it_is_at(path: str) -> None:
    with pytest.raises(helm.HelmValuesError, match="additional properties 'surprise' not allowed"):
        render(merged(GOOD, dotted(f"{path}.surprise".lstrip("."), 1)))


def test_the_schema_knows_every_value_when_it_is_in_values_yaml() -> None:
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())

    def missing(part: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
        for key, value in part.items() if isinstance(part, dict) and "properties" in schema else ():
            if key not in schema["properties"]:
                yield f"{path}{key}"
            else:
                yield from missing(value, schema["properties"][key], f"{path}{key}.")
        yield from (f"{path}{key}" for key in schema.get("properties", {}) if isinstance(part, dict) and key not in part)

    assert list(missing(values, SCHEMA, "")) == []


def test_versions_are_those_of_the_package_when_the_chart_is_released() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert f"ARG VERSION={version}" in (ROOT / "deploy/Containerfile").read_text()
