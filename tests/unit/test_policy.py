"""kvdir/core/policy.py and policy_parse.py: who is who, what is granted, and every fault of a file at once."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdir.core.policy import ALL, ANONYMOUS, OPEN, OPEN_PARTS, Grant, Identity, Pattern, Policy, Role
from kvdir.core.policy_parse import parse_policy
from kvdir.errors import ConfigError
from kvdir.namespace import salt_digest

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy.toml"
ACME = "salt:0123456789abcdef0123456789abcdef"


def parsed(text: str, **salts: bytes) -> Policy:
    def digest(name: str) -> str:
        if name not in salts:
            raise ValueError("cannot be read: No such file or directory")
        return salt_digest(salts[name])

    return parse_policy(tomllib.loads(text), salt_digest_of=digest)


def faults(text: str, **salts: bytes) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parsed(text, **salts)
    return caught.value.faults


def example() -> Policy:
    return parsed(EXAMPLE.read_text())


def who(policy: Policy, *spiffe: str, names: tuple[str, ...] = ()) -> Identity:
    found = policy.identify(spiffe, names)
    assert found is not None
    return found


def test_the_example_says_who_is_who_when_certificates_come() -> None:
    policy = example()
    agent = who(policy, "spiffe://example.org/agent/node-7")
    assert (agent.name, agent.roles) == ("agent-node-7", {Role.AGENT})
    assert agent.may_publish("node-7")
    assert agent.may_publish("node-7/vllm@1")
    assert not agent.may_publish("node-70")
    assert "salt:anything" in agent.tenants
    assert "salt:anything" not in agent.stores
    assert {"none", ACME} <= agent.stores.names
    engine = who(policy, "spiffe://example.org/acme/engine/e1")
    assert (engine.name, ACME in engine.tenants, "none" in engine.tenants) == ("acme-engines", True, False)
    router = who(policy, names=("router.inference.svc",))
    assert router.roles == {Role.ROUTER}
    assert policy.local.roles == {Role.ENGINE, Role.ADMIN}


@pytest.mark.parametrize(
    "spiffe",
    [
        "spiffe://example.org/agent",
        "spiffe://example.org/agent/",
        "spiffe://example.org/agent/a/b",
        "spiffe://example.org.evil/agent/a",
        "spiffe://example.org/AGENT/a",
        "spiffe://example.org/acme/engine/",
        "",
    ],
)
def test_nobody_is_found_when_a_certificate_only_resembles_a_pattern(spiffe: str) -> None:
    assert example().identify([spiffe], []) is None


def test_nobody_is_somebody_elses_engine_when_its_common_name_has_a_slash() -> None:
    entry = {"name": "agent-{node}", "names": ["{node}.agents"], "roles": ["agent"], "tenants": ["none"], "nodes": ["{node}"]}
    policy = parse_policy({"identity": [entry]}, salt_digest_of=lambda path: "")
    assert policy.identify([], ["b/vllm.agents"]) is None
    found = policy.identify([], ["a.agents"])
    assert found is not None
    assert [found.signed(name) for name in ("a", "a/vllm@0", "b", "")] == ["a", "a/vllm@0", "agent-a", "agent-a"]


def test_a_name_is_no_spiffe_id_when_it_looks_like_one() -> None:
    assert example().identify([], ["spiffe://example.org/operator/root"]) is None
    assert example().identify(["router.inference.svc"], []) is None


def test_everybody_may_everything_when_there_is_no_policy() -> None:
    found = who(OPEN, "spiffe://x/y")
    assert (found.name, found.tenants, found.roles) == ("spiffe://x/y", ALL, frozenset(Role))
    assert ANONYMOUS.may_publish("any")


def test_the_first_entry_counts_when_two_match() -> None:
    policy = parsed(
        """
        [[identity]]
        name = "one"
        spiffe = ["spiffe://d/agent/special"]
        roles = ["router"]
        tenants = ["none"]
        [[identity]]
        name = "rest"
        spiffe = ["spiffe://d/agent/*"]
        roles = ["admin"]
        tenants = ["*"]
        """
    )
    assert who(policy, "spiffe://d/agent/special").name == "one"
    assert who(policy, "spiffe://d/agent/other").name == "rest"
    assert policy.named("one") == who(policy, "spiffe://d/agent/special")
    assert policy.named("nobody") is None


def test_only_digests_are_kept_when_salts_come_from_files() -> None:
    salt = b"a salt nobody may see"
    policy = parsed(
        """
        [tenants.acme]
        salt_files = ["acme"]
        [[identity]]
        name = "e"
        names = ["e"]
        roles = ["engine"]
        tenants = ["acme"]
        """,
        acme=salt,
    )
    assert who(policy, names=("e",)).tenants == Grant(frozenset((f"salt:{salt_digest(salt)}",)))
    assert salt.decode() not in repr(policy)
    assert policy.tenant_names(who(policy, names=("e",)).tenants) == ["acme"]


def test_every_fault_is_named_when_a_file_has_many() -> None:
    found = faults(
        """
        surprise = 1
        [tenants.acme]
        salts = ["my secret salt"]
        [tenants.none]
        salt_files = ["missing"]
        [tenants.empty]
        [[identity]]
        name = "bad name!"
        spiffe = ["http://x/y", "spiffe://d/*/x", "spiffe://d/a{node}"]
        roles = ["king"]
        tenants = ["unknown"]
        [[identity]]
        name = "agent"
        spiffe = ["spiffe://d/agent"]
        roles = ["agent"]
        tenants = ["none"]
        [[identity]]
        name = "reader"
        names = ["r"]
        roles = ["router"]
        tenants = ["none"]
        nodes = ["{node}"]
        [local]
        roles = ["admin"]
        tenants = "none"
        nodes = ["{node}"]
        """
    )
    text = "\n".join(found)
    for part in (
        "surprise: unknown key", "acme.salts", "tenants.none", "missing: cannot be read", "tenants.empty: has no salt",
        "name: letters", "'http://x/y' is not a SPIFFE id", "'spiffe://d/*/x'", "'spiffe://d/a{node}'", "'king' is unknown",
        "'unknown' is not a tenant", "'agent': nodes", "'reader': nodes: only agents", "'reader': {node} is used",
        "local: nodes",
    ):  # fmt: skip
        assert part in text, part
    assert "my secret salt" not in text


def test_twice_the_same_is_a_fault_when_one_would_never_count() -> None:
    entry = '[[identity]]\nname = "a"\nspiffe = ["spiffe://d/x"]\nroles = ["admin"]\ntenants = ["*"]\n'
    text = "\n".join(faults(entry + entry.replace('"a"', '"b"')))
    assert "spiffe://d/x is 'a' already" in text
    assert "name is taken" in "\n".join(faults(entry + entry.replace("d/x", "d/y")))
    assert "there is none" in "\n".join(faults(""))


PARTS = st.text("ab*{}node", min_size=0, max_size=4)


@given(st.lists(PARTS, min_size=1, max_size=4), st.lists(PARTS, min_size=1, max_size=4))
def test_a_pattern_matches_part_by_part_when_compared_with_its_model(want: list[str], have: list[str]) -> None:
    """Model: as many parts, each equal, or open and not empty."""
    fits = len(want) == len(have) and all(a == b or (a in OPEN_PARTS and b) for a, b in zip(want, have, strict=True))
    assert (Pattern(".".join(want)).match(".".join(have)) is not None) == (fits and len(".".join(want).split(".")) == len(want))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["tenants", "identity", "name", "roles", "spiffe", "names", "nodes", "x"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(["tenants", "identity", "local", "other"]), JUNK))
def test_a_file_is_a_policy_or_has_faults_when_it_holds_anything(document: dict[str, object]) -> None:
    def digest(name: str) -> str:
        raise ValueError("cannot be read")

    try:
        policy = parse_policy(document, salt_digest_of=digest)
    except ConfigError:
        return
    assert policy.entries
