"""`kvdir policy`: faults, the table, what a certificate may do; and digests of salts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from kvdir.cli.main import main
from kvdir.namespace import salt_digest

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "policy.toml")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["policy", *arguments])


def test_the_example_is_a_policy_when_it_is_checked() -> None:
    shown = run("check", EXAMPLE)
    assert shown.exit_code == 0, shown.stderr
    document = json.loads(run("check", EXAMPLE, "--output", "json").stdout)
    agent, engines, router, operators = document["identities"]
    assert (agent["nodes"], agent["store"]) == (["{node}"], ["acme", "globex", "none"])
    assert (engines["tenants"], router["store"], operators["tenants"]) == (["acme"], [], ["*"])
    assert document["local"]["roles"] == ["admin", "engine"]


def test_what_a_certificate_may_do_is_shown_when_one_is_named() -> None:
    shown = json.loads(run("check", EXAMPLE, "--as", "spiffe://example.org/agent/n7", "--output", "json").stdout)
    assert (shown["name"], shown["nodes"]) == ("agent-n7", ["n7"])
    assert json.loads(run("check", EXAMPLE, "--as", "router.inference.svc", "--output", "json").stdout)["name"] == "router"
    nobody = run("check", EXAMPLE, "--as", "spiffe://example.org/nobody")
    assert (nobody.exit_code, "it may do nothing" in nobody.stderr) == (1, True)


def test_every_fault_is_said_when_a_file_has_some(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('[tenants.a]\nsalt_files = ["gone"]\n[[identity]]\nname = "x"\nroles = ["king"]\n')
    refused = run("check", str(file))
    assert refused.exit_code == 3
    for words in ("gone: cannot be read", "'king' is unknown", "matches nobody"):
        assert words in refused.stderr
    assert "cannot be read" in run("check", str(tmp_path / "missing")).stderr


def test_a_salts_digest_is_that_of_namespaces_when_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "salt"
    file.write_bytes(b"sixteen bytes or more\n")
    assert run("digest", str(file)).stdout == f"salt:{salt_digest('sixteen bytes or more')}\n"
    file.write_bytes(b" sixteen bytes or more \r\n\n")  # as agents read tenant_salt_file
    assert run("digest", str(file)).stdout == f"salt:{salt_digest('sixteen bytes or more')}\n"
    file.write_bytes(b"short\n")
    refused = run("digest", str(file))
    assert (refused.exit_code, "short salts can be guessed" in refused.stderr, "short\n" in refused.output) == (1, True, False)
