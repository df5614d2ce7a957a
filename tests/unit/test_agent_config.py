"""An agent's settings: everything that cannot work is refused at once, and the words say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvdir.errors import ConfigError
from peer_agent.server.config import AgentConfig, join_address, split_address
from peer_agent.server.identity import Limits
from peer_agent.server.namespaces import explain_unknown, read_namespaces
from peer_agent.testing import sample_namespace


def faults(**settings: object) -> str:
    return "\n".join(AgentConfig(**({"node": "n1", "namespaces": ("x.toml",)} | settings)).faults())  # type: ignore[arg-type]


def test_defaults_listen_on_loopback_only():
    assert faults() == ""
    config = AgentConfig(node="n1")
    for address in (config.listen, config.data_listen, config.http_listen):
        assert address.startswith("127.0.0.1:")
    assert config.engine_address == "unix:/dev/shm/kvdir-n1.sock"
    assert (config.replica_file, AgentConfig(node="n1", replica=True).replica_file) == ("", "/dev/shm/kvdir-n1.replica")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"listen": "10.0.0.1:7410"}, "listen: 10.0.0.1:7410 is reachable from elsewhere"),
        ({"data_listen": "0.0.0.0:0"}, "data_listen: 0.0.0.0:0 is reachable from elsewhere"),
        ({"listen": "0.0.0.0:7410", "insecure": True}, "advertise: required"),
        ({"listen": "nonsense"}, "listen: 'nonsense' is not HOST:PORT"),
        ({"engine_listen": "10.0.0.1:1"}, "engine_listen: 10.0.0.1:1 must be loopback"),
        ({"engine_listen": "unix:" + "x" * 200}, "the limit of a socket's path"),
        ({"namespaces": ()}, "namespaces: at least one file"),
        ({"replica": True}, "replica: needs coordinators"),
        ({"replica_namespaces": ("all", "3f2a")}, "replica_namespaces: 3f2a: a digest is 64 hexadecimal digits"),
        ({"replica_max_bytes": -1}, "replica_max_bytes: must not be negative"),
        ({"replica_max_lag_s": 0.0}, "replica_max_lag_s: must be positive"),
        ({"transports": ("shm", "rdma")}, "transports: rdma; known: shm, tcp, ucx"),
        ({"transports": ()}, "transports: none given"),
        ({"huge_pages": "yes"}, "huge_pages: 'yes' is not one of auto, off, require"),
        ({"huge_pages": "require", "prefault": False}, "huge_pages: require needs prefault"),
        ({"data_tls_cert": "a"}, "data_tls_key and data_tls_ca: missing; TLS needs all of"),
        ({"event_loss": 1.0}, "event_loss: must be"),
        ({"log_level": "loud"}, "'loud' is not one of"),
        ({"max_locks": 0}, "max_locks: must be positive"),
        ({"max_fingerprints": 1 << 20}, "max_fingerprints: must be at most 262144"),
        ({"node": "a/b"}, "node: 'a/b' must not"),
    ],
)
def test_what_cannot_work_is_named(settings: dict[str, object], words: str):
    assert words in faults(**settings)


def test_all_faults_come_at_once():
    assert len(faults(log_level="loud", max_locks=0, event_loss=2, transports=("x",)).splitlines()) == 4


def test_public_addresses_are_accepted_when_asked_for():
    assert faults(listen="10.0.0.1:7410", data_listen="10.0.0.1:0", insecure=True) == ""


def test_tcp_plane_may_be_public_when_it_has_tls():
    tls = {"data_tls_cert": "a", "data_tls_key": "b", "data_tls_ca": "c"}
    assert faults(data_listen="10.0.0.1:0", **tls) == ""
    assert "listen: 10.0.0.1:1 is reachable" in faults(listen="10.0.0.1:1", **tls), "gRPC has no TLS yet"


def test_addresses_split_and_join():
    for text in ("127.0.0.1:7410", "[::1]:0", "localhost:65535"):
        assert join_address(*split_address(text)) == text
    for text in ("127.0.0.1", "host:", ":1", "host:65536", "host:-1"):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            split_address(text)


def test_wishes_are_shortened_to_the_limits():
    limits = Limits(max_fingerprints=1, max_reply_bytes=1, max_lease_s=10, max_pin_s=1, max_deadline_s=5)
    assert (limits.lease_s(500), limits.lease_s(0), limits.lease_s(60_000)) == (0.5, 10, 10)
    assert limits.deadline_s(1000, None) == 1
    assert limits.deadline_s(0, 3.0) == 3
    assert limits.deadline_s(60_000, None) == 5
    assert limits.deadline_s(1000, -1.0) == 0


def write(path: Path, **fields: object) -> str:
    values = json.loads(sample_namespace().canonical())
    del values["version"]
    path.write_text(json.dumps(values | fields))
    return str(path)


def test_namespace_files_give_namespaces_and_shares(tmp_path: Path):
    (tmp_path / "salt").write_text("a long enough secret\n")
    first = write(tmp_path / "a.json", share=3, prefill_tokens_per_s=8000)
    second = write(tmp_path / "b.json", tenant_salt_file="salt")
    served = read_namespaces([first, second])
    assert served[0].namespace == sample_namespace()
    assert [item.share for item in served] == [3.0, 1.0]
    assert [item.prefill_tokens_per_s for item in served] == [8000.0, 0.0]
    assert served[1].namespace.tenant.startswith("salt:")
    assert "secret" not in repr(served)


def test_faults_of_all_namespace_files_come_at_once(tmp_path: Path):
    files = [
        write(tmp_path / "a.json", share=0),
        write(tmp_path / "b.json", weights=""),
        str(tmp_path / "none.toml"),
        write(tmp_path / "d.json", prefill_tokens_per_s=-1),
    ]
    (tmp_path / "c.toml").write_text("= nonsense")
    with pytest.raises(ConfigError) as caught:
        read_namespaces([*files, str(tmp_path / "c.toml")])
    text = str(caught.value)
    for words in (
        "a.json: share: must be a positive number",
        "b.json: weights: required",
        "none.toml: ",
        "d.json: prefill_tokens_per_s: ",
        "c.toml: ",
    ):
        assert words in text


def test_one_namespace_in_two_files_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="the same namespace as"):
        read_namespaces([write(tmp_path / "a.json"), write(tmp_path / "b.json")])


def test_unknown_namespace_is_explained_by_the_nearest_one():
    near, far = sample_namespace(), sample_namespace(model="far", kv_dtype="int8", layout="HND")
    asked = sample_namespace(block_tokens=32)
    text = explain_unknown(asked.digest, asked.canonical().encode(), [far, near])
    assert "block_tokens: 32 here, 16 there" in text
    assert "kv_dtype" not in text
    assert "cannot be read" in explain_unknown(bytes(32), b"{", [near])
    assert "same release" in explain_unknown(bytes(32), asked.canonical().encode(), [near])
