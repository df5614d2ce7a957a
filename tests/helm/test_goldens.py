"""What values give, in full, for reviewers: a change of a template shows in a diff of these files.

make test-helm ARGS="-k golden" UPDATE=1     writes them anew
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import kubernetes_validate
import pytest

from tests.helm.chart import CHART, FLOOR, NEWEST, OPERATOR, Object, Rendered, ci_values, merged, render
from tests.helm.test_pods import violations
from tests.helm.test_settings import environ

pytestmark = pytest.mark.helm

GOLDEN = Path(__file__).parent / "golden"
EXAMPLE = CHART / "examples/vllm.yaml"
BRIEF = {"monitoring": {"rules": False, "dashboards": False}}  # they are files of their own


def same(file: Path, text: str) -> None:
    """`text` is what the file says; with UPDATE it then does."""
    if os.environ.get("UPDATE"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), (
        f'{file.name} is out of date: make test-helm ARGS="-k golden" UPDATE=1, and look at the diff'
    )


@pytest.mark.parametrize("name", ["minimal", "full", "daemonset"])
def test_objects_are_those_of_the_golden_file_when_rendered(name: str) -> None:
    same(GOLDEN / f"{name}.yaml", render(merged(ci_values(name), BRIEF)).text)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its dependency, as `helm dependency build` lays it out."""
    chart = tmp_path_factory.mktemp("charts") / "vllm"
    shutil.copytree(CHART / "examples/vllm", chart)
    shutil.copytree(CHART, chart / "charts/kvdir", ignore=shutil.ignore_patterns("examples", "ci"))
    return chart


def rendered_example(chart: Path, values: Object | None = None) -> Rendered:
    return render(values or {}, chart=chart, name="demo")


def test_the_rendered_example_is_the_golden_file_when_a_chart_has_this_one_as_a_dependency(vllm: Path) -> None:
    header = "# Rendered from examples/vllm: helm template demo examples/vllm --namespace llm\n"
    same(EXAMPLE, header + rendered_example(vllm, {"kvdir": {"monitoring": {"monitors": False, "rules": False}}}).text)


def test_the_engine_pod_is_restricted_and_valid_when_it_has_the_agent_as_a_sidecar(vllm: Path) -> None:
    rendered = rendered_example(vllm)
    pod = rendered.of("Deployment")[0]["spec"]["template"]["spec"]
    assert violations(pod) == []
    for item in rendered.objects:
        for version in (FLOOR, NEWEST):
            kubernetes_validate.validate(item, version, strict=True)
    (agent,) = pod["initContainers"]
    assert agent["restartPolicy"] == "Always", "a native sidecar: it starts before the engine and ends after it"
    assert agent["startupProbe"]["periodSeconds"] * agent["startupProbe"]["failureThreshold"] >= 60 + 32


def test_users_are_whole_numbers_when_they_are_as_large_as_openshifts(vllm: Path) -> None:
    """Helm reads numbers as floating point, and writes large ones as 1e+09."""
    user = 1000660000
    sidecar = rendered_example(vllm, {"kvdir": {"agent": {"runAsUser": user}}}).of("Deployment")[0]
    node = render({"insecure": True, "agent": {"mode": "daemonset", "runAsUser": user}}).of("DaemonSet")[0]
    for workload, containers in ((sidecar, "initContainers"), (node, "containers")):
        spec = workload["spec"]["template"]["spec"]
        for context in (spec["securityContext"], spec[containers][0]["securityContext"]):
            assert [(text, type(text)) for key, text in context.items() if key in ("runAsUser", "runAsGroup", "fsGroup")] == [
                (user, int)
            ] * (3 if "fsGroup" in context else 2)


def test_engine_and_agent_meet_when_they_are_in_one_pod(vllm: Path) -> None:
    rendered = rendered_example(vllm)
    pod = rendered.of("Deployment")[0]["spec"]["template"]["spec"]
    (agent,), (engine,) = pod["initContainers"], pod["containers"]
    toml = rendered.one("ConfigMap", "demo-kvdir-agent")["data"]["agent.toml"]
    (address,) = [line.split('"')[1] for line in toml.splitlines() if line.startswith("engine_listen")]
    assert f'"agent":"{address}"' in engine["args"][-1]
    shared = {mount["name"]: mount["mountPath"] for mount in agent["volumeMounts"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
    assert mounts["kvdir-memory"] == shared["kvdir-memory"] == str(Path(address.removeprefix("unix:")).parent)
    assert not {name for name in mounts if name.startswith("kvdir-")} - {"kvdir-memory"}, "no key, no policy for the engine"
    assert agent["securityContext"]["runAsUser"] == pod["securityContext"]["runAsUser"]
    assert environ(agent, "PEER_AGENT_")["PEER_AGENT_ADVERTISE"].endswith(":7410")


def test_monitors_and_policies_find_the_engine_pod_when_it_has_the_agent(vllm: Path) -> None:
    rendered = render({"kvdir": {"monitoring": {"monitors": True}}}, chart=vllm, name="demo", apis=(OPERATOR,))
    labels = rendered.of("Deployment")[0]["spec"]["template"]["metadata"]["labels"]
    monitor = rendered.of("PodMonitor")[0]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    policy = rendered.one("NetworkPolicy", "demo-kvdir-agent")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    agent = rendered.of("Deployment")[0]["spec"]["template"]["spec"]["initContainers"][0]
    assert monitor["podMetricsEndpoints"][0]["port"] in [port["name"] for port in agent["ports"]]


def test_the_pod_follows_the_settings_when_they_change(vllm: Path) -> None:
    def annotations(level: str) -> Object:
        rendered = rendered_example(vllm, {"kvdir": {"agent": {"config": {"log_level": level}}}})
        found: Object = rendered.of("Deployment")[0]["spec"]["template"]["metadata"]["annotations"]
        return found

    assert annotations("info") != annotations("debug")
