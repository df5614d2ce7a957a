"""What the chart writes for the daemons is what they take: settings, environment, namespaces, and memory that is enough."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import CI, ROOT, Object, Rendered, ci_values, merged, render

pytestmark = [pytest.mark.helm, pytest.mark.timeout(300)]

RUN: dict[str, Any] = {
    "capture_output": True,
    "text": True,
    "timeout": 150,
    "cwd": ROOT,
    "env": {**os.environ, "PYTHONPATH": str(ROOT)},
    "check": False,
}
POD = {"POD_NAME": "vllm-7c9d8b6f5-x2x9k", "POD_UID": "b7c5a9be-1f0e-4a53-9d38-3f1a1f0f3b11", "POD_IP": "10.0.0.11"}


def cases(rendered: Rendered, agent: Object) -> list[dict[str, Any]]:
    """Of the coordinators and of the agent, as daemons.py takes them."""
    policies = [item["data"]["policy.toml"] for item in rendered.of("ConfigMap") if "policy.toml" in item["data"]]
    data = rendered.one("ConfigMap", "kvdir-agent")["data"]
    files = {
        f"/etc/kvdir/namespaces/{key.removeprefix('namespace.')}": text for key, text in data.items() if key != "agent.toml"
    }
    if policies:
        files["/etc/kvdir/policy/policy.toml"] = policies[0]
    (coordinator,) = rendered.of("StatefulSet")[0]["spec"]["template"]["spec"]["containers"]
    toml = rendered.one("ConfigMap", "kvdir-coordinator")["data"]["coordinator.toml"]
    return [
        {"daemon": "coordinator", "toml": toml, "environ": environ(coordinator, "KVDIR_"), "files": files},
        {"daemon": "agent", "toml": data["agent.toml"], "environ": environ(agent, "PEER_AGENT_"), "files": files},
    ]


def environ(container: Object, prefix: str) -> dict[str, str]:
    """As the kubelet gives it; a Secret's value is the store's URL, the only one there is."""
    out = {}
    for item in container["env"]:
        if item["name"].startswith(prefix):
            text = item.get("value") or ("redis://r:6379" if "secretKeyRef" in item["valueFrom"] else POD["POD_NAME"])
            out[item["name"]] = re.sub(r"\$\((\w+)\)", lambda found: POD[found[1]], text)
    return out


def agent_container(rendered: Rendered) -> Object:
    """Of the DaemonSet; an engine's pod is not in the chart (test_sidecar.py)."""
    (container,) = rendered.of("DaemonSet")[0]["spec"]["template"]["spec"]["containers"]
    return container


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of all values of ci, by "name daemon", and of settings that the schema says are there."""
    asked: dict[str, dict[str, Any]] = {}
    for name in CI:
        values = ci_values(name)
        sidecar = {"agent": {"mode": "daemonset", "arena": {"hugePages": ""}, "discovery": {"serviceAccounts": []}}}
        container = agent_container(render(merged(values, sidecar)))
        for case in cases(render(values), container):
            asked[f"{name} {case['daemon']}"] = case
    root = tmp_path_factory.mktemp("root")
    run = subprocess.run(
        [os.environ["DAEMONS_PYTHON"], ROOT / "tests/helm/daemons.py", root],
        input=json.dumps(list(asked.values())),
        **RUN,
    )
    assert run.returncode == 0, run.stderr
    return dict(zip(asked, json.loads(run.stdout), strict=True))


@pytest.mark.parametrize("daemon", ["coordinator", "agent"])
@pytest.mark.parametrize("name", CI)
def test_a_daemon_takes_its_file_when_the_chart_wrote_it(name: str, daemon: str, verdicts: dict[str, list[str]]) -> None:
    assert verdicts[f"{name} {daemon}"] == []


def test_the_node_is_named_by_its_pod_when_an_agent_starts() -> None:
    rendered = render({"insecure": True, "agent": {"mode": "daemonset"}})
    found = environ(agent_container(rendered), "PEER_AGENT_")
    assert found["PEER_AGENT_NODE"] == f"{POD['POD_NAME']}.{POD['POD_UID']}"
    assert found["PEER_AGENT_ADVERTISE"] == "10.0.0.11:7410"
    ipv6 = environ(agent_container(render(ci_values("csi"))), "PEER_AGENT_")
    assert ipv6["PEER_AGENT_ADVERTISE"] == f"[{POD['POD_IP']}]:7410"


def test_an_agents_certificate_holds_the_name_that_peers_ask_for_when_each_pod_has_its_own() -> None:
    rendered = render(ci_values("csi"))
    attributes = {
        part: next(volume["csi"]["volumeAttributes"] for volume in pod["spec"]["volumes"] if "csi" in volume)
        for part, pod in ((workload.rpartition("-")[2], pod) for workload, pod in rendered.pods())
    }

    def held(part: str, kind: str) -> str:
        """As the driver expands it."""
        return re.sub(r"\$\{(\w+)\}", lambda found: POD[found[1]], attributes[part][f"csi.cert-manager.io/{kind}"])

    toml = rendered.one("ConfigMap", "kvdir-agent")["data"]["agent.toml"]
    expected = dict(re.findall(r'^(tls_\w+_name) = "(.*)"$', toml, re.MULTILINE))
    node = environ(agent_container(rendered), "PEER_AGENT_")["PEER_AGENT_NODE"]
    assert held("agent", "dns-names") == expected["tls_peer_name"].replace("{node}", node)
    assert expected["tls_server_name"] in held("coordinator", "dns-names").split(",")
    assert held("agent", "uri-sans").endswith(f"/agent/{node}")


def test_memory_is_enough_for_the_arena_when_the_agent_plans_it(tmp_path: Path) -> None:
    """`peer-agent serve --dry-run` says what it would take; the volume and the limit hold that, the replica and the heap."""
    values = {
        "insecure": True,
        "agent": {"mode": "daemonset", "accept": {"size": "3M", "namespaces": 3}, "replica": {"size": "5Mi"}},
    }
    rendered = render(values)
    toml = rendered.one("ConfigMap", "kvdir-agent")["data"]["agent.toml"]
    file = tmp_path / "agent.toml"
    file.write_text(toml)
    command = [os.environ["DAEMONS_PYTHON"], "-m", "peer_agent", "serve", "--config", file, "--dry-run", "--output", "json"]
    command += ["--arena-path", "/dev/shm/kvdir-test-helm", "--advertise", "127.0.0.1:7410"]
    run = subprocess.run(command, **RUN)
    assert run.returncode == 0, run.stderr
    arena_bytes = json.loads(run.stdout)["arena_bytes"]
    assert arena_bytes >= 9_000_000
    mebibytes = int(agent_container(rendered)["resources"]["limits"]["memory"].removesuffix("Mi"))
    assert mebibytes * 2**20 >= arena_bytes + 5 * 2**20 + 768 * 2**20
    sidecar = render(merged(values, {"agent": {"mode": "sidecar"}}))
    assert "takes 798Mi of memory" in sidecar.notes, "16 MiB beside arena, replica and heap"


@pytest.mark.parametrize("part", ["coordinator", "agent"])
def test_a_kubelets_probes_are_answered_when_a_daemon_runs_with_the_charts_file(part: str, tmp_path: Path) -> None:
    """An agent is ready although no coordinator is there: its pod is an engine's."""
    rendered = render({"insecure": True, "agent": {"mode": "daemonset"}})
    container = agent_container(rendered)
    if part == "coordinator":
        (container,) = rendered.of("StatefulSet")[0]["spec"]["template"]["spec"]["containers"]
    services = [container[probe]["grpc"]["service"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    file = tmp_path / f"{part}.toml"
    file.write_text(rendered.one("ConfigMap", f"kvdir-{part}")["data"][file.name])
    module = {"coordinator": "kvdir", "agent": "peer_agent"}[part]
    run = subprocess.run([os.environ["DAEMONS_PYTHON"], ROOT / "tests/helm/live.py", module, file, *services], **RUN)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer == {"probes": dict.fromkeys(services, "SERVING"), "code": 0}
