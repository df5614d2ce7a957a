"""The chart as Helm renders it: values in, objects out."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml
from helm_python import _native

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm/kvdir"
RELEASE, NAMESPACE = "kvdir", "llm"
OPERATOR = "monitoring.coreos.com/v1"
FLOOR, NEWEST = "1.29", "1.37"
CI = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}

Object = dict[str, Any]
Values = Mapping[str, Any]


class _Strict(yaml.CSafeLoader):
    """A key given twice is a fault of a template: YAML readers take the last one and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.YAMLError(f"a key twice in {node.start_mark}: {keys}")
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, slots=True)
class Rendered:
    """objects: in order of templates. text: all of them, as YAML. notes: what `helm install` prints."""

    objects: tuple[Object, ...]
    text: str
    notes: str

    def one(self, kind: str, name: str) -> Object:
        (found,) = [item for item in self.objects if item["kind"] == kind and item["metadata"]["name"] == name]
        return found

    def of(self, kind: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] == kind]

    def pods(self) -> Iterator[tuple[str, Object]]:
        """(name of the workload, its pod template)."""
        for item in self.objects:
            if item["kind"] in ("StatefulSet", "DaemonSet", "Deployment"):
                yield item["metadata"]["name"], item["spec"]["template"]


@functools.cache
def loaded(path: Path = CHART) -> helm.Chart:
    return helm.Chart.load(path)


def render(
    values: Values,
    *,
    chart: Path = CHART,
    name: str = RELEASE,
    namespace: str = NAMESPACE,
    apis: tuple[str, ...] = (),
    kubernetes: str = NEWEST,
) -> Rendered:
    """As `helm template`, for a version and with the API groups `apis`. Raises helm.HelmError with what the chart refuses.

    The public render() knows no API groups; the library's own function does.
    """
    options = {"name": name, "namespace": namespace, "api_versions": list(apis), "kube_version": f"{kubernetes}.0"}
    raw = _native.call_string("helm_render", loaded(chart)._raw(), json.dumps(dict(values)), json.dumps(options))
    files: dict[str, str] = json.loads(raw)
    notes = "".join(text for path, text in files.items() if path == f"{chart.name}/templates/NOTES.txt")
    manifests = [text for path, text in sorted(files.items()) if not path.endswith("NOTES.txt") and text.strip()]
    text = "".join(f"---\n{_tidy(manifest)}\n" for manifest in manifests)
    return Rendered(tuple(item for item in yaml.load_all(text, _Strict) if item), text, notes)


def _tidy(manifest: str) -> str:
    """Without the blank lines that templates leave behind, for people who read a golden file."""
    return "\n".join(line.rstrip() for line in manifest.splitlines() if line.strip()).removeprefix("---\n")


def ci_values(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(CI[name].read_text())
    return values


def merged(base: Values, over: Values) -> dict[str, Any]:
    """`over` laid onto `base` as Helm does it: maps key by key, everything else whole."""
    out = copy.deepcopy(dict(base))
    for key, value in over.items():
        out[key] = merged(out[key], value) if isinstance(value, Mapping) and isinstance(out.get(key), dict) else value
    return out


def dotted(text: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of "a.b"."""
    for key in reversed(text.split(".")):
        value = {key: value}
    out: dict[str, Any] = value
    return out
