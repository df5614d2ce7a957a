"""docs/deploy-kubernetes.md, top to bottom: every block of values renders, every value, template and file it names exists."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, OPERATOR, ROOT, Rendered, render

pytestmark = pytest.mark.helm

TEXT = (ROOT / "docs/deploy-kubernetes.md").read_text()
VALUES: dict[str, dict[str, Any]] = {
    name: yaml.safe_load(block) for block, name in re.findall(r"```yaml\n(# values: (\S+)\n.*?)```", TEXT, re.DOTALL)
}


def rendered(name: str) -> Rendered:
    return render(VALUES[name], apis=(OPERATOR,))


@pytest.mark.parametrize("name", VALUES)
def test_values_render_when_the_page_gives_them(name: str) -> None:
    assert rendered(name).of("StatefulSet")


def test_the_page_shows_every_way_when_it_has_a_block_for_each() -> None:
    assert set(VALUES) == {f"{name}.yaml" for name in ("try", "daemonset", "tls", "policy", "monitoring", "rdma", "redis")}
    assert TEXT.count("```yaml\n") == len(VALUES)


def test_identities_of_the_policy_are_those_of_certificates_when_both_are_on_the_page() -> None:
    found = rendered("policy.yaml")
    toml = found.one("ConfigMap", "kvdir-policy")["data"]["policy.toml"]
    (coordinator,) = [volume for volume in found.of("StatefulSet")[0]["spec"]["template"]["spec"]["volumes"] if "csi" in volume]
    uri = coordinator["csi"]["volumeAttributes"]["csi.cert-manager.io/uri-sans"]
    assert f'"{uri.rpartition("/")[0]}/*"' in toml
    assert f'"{uri.rpartition("/")[0].replace("/coordinator", "/agent")}/{{node}}"' in toml


def test_templates_exist_when_the_page_names_them() -> None:
    defined = set(re.findall(r'define "([^"]+)"', (CHART / "templates/_sidecar.tpl").read_text()))
    assert defined == set(re.findall(r"`(kvdir\.sidecar\.\w+)`", TEXT))


def test_values_exist_when_the_page_names_them() -> None:
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    files = {"tls.crt", "tls.key"}
    for path in (
        set(re.findall(r"`((?:agent|coordinator|tls|policy|networkPolicy|monitoring)\.[A-Za-z.]+)(?::[^`]*)?`", TEXT)) - files
    ):
        part: Any = known
        for key in path.split("."):
            if key == "config" or part == {}:
                break
            assert key in part, path
            part = part[key]


def test_files_exist_when_the_page_names_them() -> None:
    for path in set(re.findall(r"(?:deploy|helm)/[\w./-]+", TEXT)):
        assert (ROOT / path.rstrip(".")).exists(), path
