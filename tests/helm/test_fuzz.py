"""Values of ci with up to six others in their place: they render or are refused with a sentence, never a template's error."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import helm_python as helm
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.helm.chart import CHART, CI, ci_values, dotted, merged, render
from tests.helm.test_objects import matches, pods_of
from tests.helm.test_pods import violations

pytestmark = pytest.mark.helm

CASES = 150
MOST = 6
Schema = dict[str, Any]
PASSED_ON: dict[str, list[Any]] = {
    "amounts": [{}, {"memory": "2Gi"}, {"memory": 4294967296, "cpu": 2}, {"cpu": "500m"}],
    "affinity": [{}],
    "duration": ["15s", "10m", "8h", "1h30m"],
    "labels": [{}, {"a": "b"}, {"kvdir/x": "y"}],
    "name": ["a-name", "another"],
    "nameOrEmpty": ["", "a-name"],
    "peers": [[], [{"namespaceSelector": {}}]],
    "quantity": ["0", "64Mi", "512Mi", "1.5G", "8Gi", "123456789"],
    "text": ["", "[x]\na = 1\n"],
    "texts": [{}, {"a": "b"}],
    "tolerations": [[], [{"key": "gpu", "operator": "Exists"}]],
}
"""What templates only pass on, and what they compute with, by a few values of each kind."""
SETTINGS = ("grace_s", "listen", "max_index_bytes", "quota")
"""Of the daemons', that templates look at, and one that is a table."""
RDMA = ("add IPC_LOCK", "kvdir-agent: runAsNonRoot", "kvdir-agent: runAsUser")
BRIEF = {"monitoring": {"dashboards": False, "rules": False}}  # large, and the same in all draws


def schema() -> Schema:
    document: Schema = json.loads((CHART / "values.schema.json").read_text())
    document["$defs"] |= {name: {"enum": values} for name, values in PASSED_ON.items()}
    agent = document["properties"]["agent"]["properties"]
    agent["namespaces"] = {"enum": [{}, {"llama": 'model = "x"\n'}]}
    agent["image"] = {"enum": ["", "registry.example/ucx:1"]}
    agent["rdma"]["properties"]["resource"] = {"enum": ["", "rdma/ib"]}
    agent["daemonset"]["properties"]["hostPath"] = {"enum": ["/dev/shm", "/mnt/memory"]}
    document["properties"]["global"] = {"enum": [{}]}
    for part in ("coordinatorSettings", "agentSettings"):
        known = document["$defs"][part]["properties"]
        document["$defs"][part]["properties"] = {key: known[key] for key in SETTINGS if key in known}
    return document


def leaves(part: Schema, defs: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """(path, schema) of every value, settings of daemons among them."""
    while "$ref" in part:
        part = defs[part["$ref"].rpartition("/")[2]]
    if "properties" not in part:
        yield path, part
    for key, value in part.get("properties", {}).items():
        yield from leaves(value, defs, f"{path}.{key}".lstrip("."))


def draws(part: Schema, defs: Schema) -> st.SearchStrategy[Any]:
    """Values of a part, of the keywords that our schema has."""
    if "$ref" in part:
        return draws(defs[part["$ref"].rpartition("/")[2]], defs)
    if "enum" in part:
        return st.sampled_from([copy.deepcopy(value) for value in part["enum"]])
    if "anyOf" in part:
        return st.one_of([draws(one, defs) for one in part["anyOf"]])
    kinds = part["type"] if isinstance(part["type"], list) else [part["type"]]
    return st.one_of([_of_kind(kind, part, defs) for kind in kinds])


def _of_kind(kind: str, part: Schema, defs: Schema) -> st.SearchStrategy[Any]:
    match kind:
        case "object":
            parts = {key: draws(value, defs) for key, value in part.get("properties", {}).items()}
            required = {key: parts.pop(key) for key in part.get("required", ())}
            return st.fixed_dictionaries(required, optional=parts)
        case "array":
            return st.lists(draws(part["items"], defs), max_size=2)
        case "integer":
            return st.integers(part.get("minimum", 0), min(part.get("maximum", 100), 10**9))
        case "number":
            return st.floats(0, 1000)
        case "string":
            return st.from_regex(part.get("pattern", "[a-z]{0,8}"), fullmatch=True, alphabet=st.characters(max_codepoint=126))
    return {"boolean": st.booleans(), "null": st.none()}[kind]


DOCUMENT = schema()
LEAVES = dict(leaves(DOCUMENT, DOCUMENT["$defs"]))


@st.composite
def some_values(draw: st.DrawFn) -> dict[str, Any]:
    values = merged(ci_values(draw(st.sampled_from(list(CI)))), BRIEF)
    for path in draw(st.lists(st.sampled_from(list(LEAVES)), min_size=1, max_size=MOST, unique=True)):
        values = merged(values, dotted(path, draw(draws(LEAVES[path], DOCUMENT["$defs"]))))
    return values


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, int]]:
    """That draws were neither all refused nor all taken."""
    counts = {"rendered": 0, "refused": 0}
    yield counts
    assert min(counts.values()) > CASES // 20, counts


@pytest.mark.timeout(300)
@seed(20261130)
@settings(max_examples=CASES, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(values=some_values(), name=st.sampled_from(["kvdir", "r", "a" * 53]))
def test_a_draw_renders_or_says_why_when_the_schema_takes_it(
    values: dict[str, Any], name: str, outcomes: dict[str, int]
) -> None:
    try:
        rendered = render(values, name=name)
    except helm.HelmRenderError as error:
        if "These values cannot work:\n- " not in str(error):
            raise
        outcomes["refused"] += 1
        return
    outcomes["rendered"] += 1
    names = [(item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in rendered.objects]
    assert len(names) == len(set(names))
    for _, pod in rendered.pods():
        assert set(violations(pod["spec"])) <= {"volume hostPath", *RDMA}
    for item in rendered.of("Service"):
        assert [labels for labels, _ in pods_of(rendered) if matches(item["spec"]["selector"], labels)]
