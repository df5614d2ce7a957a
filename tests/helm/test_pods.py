"""Every pod is within the restricted Pod Security profile, and where it cannot be, by exactly what was asked for.

Source: Kubernetes Pod Security Standards, "Restricted".
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import CI, Object, ci_values, merged, render

pytestmark = pytest.mark.helm

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def violations(spec: Object) -> list[str]:
    """What of a pod spec is outside of the restricted profile."""
    out = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    pod = spec.get("securityContext", {})
    for volume in spec.get("volumes", []):
        out += [f"volume {kind}" for kind in volume if kind != "name" and kind not in VOLUMES]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        context = {**pod, **container.get("securityContext", {})}
        capabilities = context.get("capabilities", {})
        checks: dict[str, Any] = {
            "privileged": not context.get("privileged"),
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
            "runAsNonRoot": context.get("runAsNonRoot") is True,
            "runAsUser": context.get("runAsUser", 1) != 0,
            "seccompProfile": context.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "drop ALL": capabilities.get("drop") == ["ALL"],
            "hostPort": not any("hostPort" in port for port in container.get("ports", [])),
        }
        out += [f"{container['name']}: {name}" for name, well in checks.items() if not well]
        out += [f"add {name}" for name in capabilities.get("add", []) if name != "NET_BIND_SERVICE"]
    return out


@pytest.mark.parametrize("name", CI)
def test_pods_are_restricted_when_neither_rdma_nor_a_host_path_is_asked_for(name: str) -> None:
    values = merged(ci_values(name), {"agent": {"rdma": {"enabled": False, "resource": "", "env": []}}})
    for workload, pod in render(values).pods():
        assert violations(pod["spec"]) == (["volume hostPath"] if workload.endswith("-agent") else [])


def test_rdma_adds_ipc_lock_and_nothing_else_when_it_is_on() -> None:
    base = {"insecure": True, "agent": {"mode": "daemonset"}}
    with_rdma = merged(base, {"agent": {"rdma": {"enabled": True, "resource": "rdma/ib", "count": 2}}})
    plain, rdma = (render(values).of("DaemonSet")[0]["spec"]["template"]["spec"] for values in (base, with_rdma))
    assert violations(plain) == ["volume hostPath"]
    assert violations(rdma) == ["volume hostPath", "add IPC_LOCK"]
    for kind in ("requests", "limits"):
        assert rdma["containers"][0]["resources"][kind]["rdma/ib"] == "2"


def test_root_has_one_capability_when_rdma_needs_it_to_lock_memory() -> None:
    """Kubernetes sets no ambient capabilities, so that a process of another user has none after exec."""
    agent = {"mode": "daemonset", "runAsUser": 0, "rdma": {"enabled": True, "resource": "rdma/ib"}}
    rendered = render({"agent": agent, "tls": {"mode": "csi", "certManager": {"issuerName": "ca"}}})
    pod = rendered.of("DaemonSet")[0]["spec"]["template"]["spec"]
    expected = ["volume hostPath", "kvdir-agent: runAsNonRoot", "kvdir-agent: runAsUser", "add IPC_LOCK"]
    assert violations(pod) == expected
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    (certificate,) = [volume["csi"]["volumeAttributes"] for volume in pod["volumes"] if "csi" in volume]
    assert "csi.cert-manager.io/fs-group" not in certificate, "the driver takes none of 0, and the files are root's"


@pytest.mark.parametrize("name", CI)
def test_no_container_can_write_but_into_its_volumes_when_it_runs(name: str) -> None:
    for _, pod in render(ci_values(name)).pods():
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["enableServiceLinks"] is False, "nothing here reads variables of Services"
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]


@pytest.mark.parametrize("name", CI)
def test_volumes_and_mounts_name_each_other_when_rendered(name: str) -> None:
    for _, pod in render(ci_values(name)).pods():
        claims = {"directory"} if name == "full" else set()
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]} | claims
        mounts = [mount for container in pod["spec"]["containers"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == volumes
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)


@pytest.mark.parametrize(("mode", "grace_s"), [("coordinator", 20), ("agent", 25)])
def test_a_pod_gets_the_time_it_takes_to_stop_when_grace_is_longer(mode: str, grace_s: int) -> None:
    rendered = render(
        {"insecure": True, "agent": {"mode": "daemonset"}, mode: {"config": {"grace_s": grace_s}}}
        | ({"agent": {"mode": "daemonset", "config": {"grace_s": grace_s}}} if mode == "agent" else {})
    )
    kind, before = ("DaemonSet", 0) if mode == "agent" else ("StatefulSet", 5)
    spec = rendered.of(kind)[0]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == before + grace_s + 5
