"""Certificate files: what is refused at start and how, what is said later, and that the last good ones stay."""

from __future__ import annotations

import contextlib
import re
import shutil
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvdir
from kvdir.config import load
from kvdir.errors import ConfigError
from kvdir.rpc import certificates
from kvdir.rpc import tls as tls_module
from kvdir.rpc.certificates import Certificate, TlsFiles, read_certificate
from kvdir.rpc.tls import Credentials, Dialer, ServerTls
from kvdir.server.config import CoordinatorConfig
from kvdir.testing.certificates import install, shared_certificates
from peer_agent.server.config import AgentConfig
from peer_agent.server.listeners import open_tls

CERTIFICATES = shared_certificates()
GOOD = CERTIFICATES.files("agent-a")


def files(certificate: str, key: str, ca: str = "ca.pem") -> TlsFiles:
    return TlsFiles(*(str(CERTIFICATES.directory / name) for name in (certificate, key, ca)))


@pytest.fixture
def mine(tmp_path: Path) -> TlsFiles:
    """A copy of agent-a's files, to be renewed."""
    made = TlsFiles(*(str(tmp_path / name) for name in ("tls.crt", "tls.key", "ca.crt")))
    for source, target in ((GOOD.certificate, made.certificate), (GOOD.key, made.key), (GOOD.ca, made.ca)):
        shutil.copyfile(source, target)
    return made


@pytest.mark.parametrize(
    ("given", "names", "words"),
    [
        (
            lambda: CERTIFICATES.files("past"),
            (),
            "tls_cert: .*past.pem would be refused by every peer: certificate has exp",
        ),
        (
            lambda: CERTIFICATES.files("foreign-a"),
            (),
            "foreign-a.pem would be refused.*unable to get local issuer.*a CA in ",
        ),
        (lambda: CERTIFICATES.files("client"), (), "client.pem would be refused by every peer: unsuitable certificate purpose"),
        (lambda: CERTIFICATES.files("nameless"), (), "holds no DNS name.*only spiffe://kvdir.test/agent/a"),
        (lambda: CERTIFICATES.files("named"), ("kvdir..x",), "is for elsewhere.test, not for kvdir..x"),
        (lambda: CERTIFICATES.files("named"), ("10.0.0.1",), "is for elsewhere.test, not for 10.0.0.1.*tls_server_name"),
        (
            lambda: files("agent-a.pem", "agent-b.key"),
            (),
            "tls_key: .*agent-b.key is not the key of the certificate in ",
        ),
        (lambda: files("node.pem", "node-encrypted.key"), (), "tls_key: .* is encrypted: write it without a password"),
        (lambda: CERTIFICATES.files("edwards"), (), "tls_key: .*edwards.key is an Edwards-curve key.*use ECDSA P-256"),
        (lambda: files("node.csr", "node.key"), (), "tls_cert: .*node.csr holds no PEM certificate"),
        (lambda: files("node.pem", "node.csr"), (), "tls_key: .*node.csr holds no PEM private key"),
        (lambda: files("node.pem", "node.key", "node.key"), (), "tls_ca: .*node.key holds no PEM certificate of a CA"),
        (
            lambda: TlsFiles("/nowhere/a", "/nowhere/b", "/dev/null"),
            (),
            "(?s)tls_cert: /nowhere/a.*tls_key: /nowhere/b.*empty",
        ),
    ],
)
def test_files_are_refused_with_the_fix_when_a_peer_would_refuse_them(
    given: Callable[[], TlsFiles], names: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_certificate(given(), server=True, names=names)


def test_certificate_tells_its_names_when_it_is_good() -> None:
    found = read_certificate(GOOD, server=True, names=("127.0.0.1", "kvdir"), perhaps=("localhost", "10.0.0.1"))
    assert found.names == ("kvdir", "localhost", "a.agent.test", "127.0.0.1")
    assert found.uris == ("spiffe://kvdir.test/agent/a",)
    assert found.unnamed == ("10.0.0.1",)


def test_client_only_certificate_is_good_when_nobody_dials_its_owner() -> None:
    assert read_certificate(CERTIFICATES.files("client"), server=False).names == ()


def test_last_good_certificate_stays_and_it_is_said_when_renewed_files_are_bad(mine: TlsFiles) -> None:
    credentials = ServerTls(mine)
    before = credentials.current()
    install(CERTIFICATES.files("past"), mine)
    assert credentials.current() is before
    assert "renewed certificates are not used: tls_cert" in credentials.remark()
    assert "certificate has expired" in credentials.remark()
    assert credentials.fault() == ""
    assert (credentials.generation, credentials.reloads, credentials.failed_reloads) == (0, 0, 1)
    install(CERTIFICATES.files("agent-a-2"), mine)
    assert credentials.current() is not before
    assert credentials.remark() == ""
    assert (credentials.generation, credentials.reloads) == (1, 1)


def test_certificate_stays_when_only_half_of_the_files_were_renewed(mine: TlsFiles) -> None:
    """As who writes them one after another does; the rest makes them whole."""
    credentials = Credentials(mine)
    before = credentials.current()
    shutil.copyfile(CERTIFICATES.files("agent-a-2").certificate, mine.certificate)
    assert credentials.current() is before
    assert "is not the key of the certificate" in credentials.failure
    shutil.copyfile(CERTIFICATES.files("agent-a-2").key, mine.key)
    assert credentials.current() is not before
    assert credentials.failure == ""


def test_certificate_is_renewed_when_a_symbolic_link_is_swapped(tmp_path: Path) -> None:
    """As the kubelet does with a mounted Secret: all three files at once."""
    for name in ("agent-a", "agent-a-2"):
        source, directory = CERTIFICATES.files(name), tmp_path / name
        directory.mkdir()
        for file, path in (("tls.crt", source.certificate), ("tls.key", source.key), ("ca.crt", source.ca)):
            shutil.copyfile(path, directory / file)
    data = tmp_path / "..data"
    data.symlink_to(tmp_path / "agent-a")
    credentials = ServerTls(TlsFiles(*(str(data / file) for file in ("tls.crt", "tls.key", "ca.crt"))))
    before = credentials.current()
    (tmp_path / "..new").symlink_to(tmp_path / "agent-a-2")
    (tmp_path / "..new").replace(data)
    assert credentials.current() is not before
    assert (credentials.reloads, credentials.failed_reloads) == (1, 0)


def test_files_are_read_again_when_they_are_replaced_between_two_looks(mine: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    shake, looks = certificates._handshake, []

    def replaced_meanwhile(*given: object, **more: object) -> object:
        looks.append(1)
        if len(looks) == 1:
            raise ssl.SSLError("PEM lib")  # as load_cert_chain does
        if len(looks) == 2:
            install(CERTIFICATES.files("agent-a-2"), mine)
        return shake(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(certificates, "_handshake", replaced_meanwhile)
    found = read_certificate(mine, server=False)
    assert found.chain == Path(CERTIFICATES.files("agent-a-2").certificate).read_bytes()
    monkeypatch.setattr(certificates, "_TRIES", 1)
    looks.clear()
    with pytest.raises(ConfigError, match=r"cannot be used: .*PEM lib"):
        read_certificate(mine, server=False)


def test_no_key_is_shown_when_a_certificate_is_printed() -> None:
    assert "PRIVATE" not in repr(read_certificate(GOOD, server=True))


def test_files_are_tried_again_though_unchanged_when_they_could_not_be_used(
    mine: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = Credentials(mine)
    later = replace(credentials.current())
    attempts: Iterator[Certificate | ConfigError] = iter([ConfigError(["the clock was wrong"]), later])

    def read() -> Certificate:
        if isinstance(found := next(attempts), ConfigError):
            raise found
        return found

    monkeypatch.setattr(credentials, "_read", read)
    monkeypatch.setattr(tls_module, "RETRY_S", 0.0)
    Path(mine.ca).touch()
    credentials.current()
    assert credentials.failure == "the clock was wrong"
    assert credentials.current() is later
    assert credentials.failure == ""


def test_fault_and_remark_follow_the_clock_when_a_certificate_ends(mine: TlsFiles) -> None:
    credentials = ServerTls(mine)
    ends = credentials.expires_unix_s
    assert (credentials.fault(), credentials.remark()) == ("", "")
    credentials.clock = lambda: ends - 3600
    assert "expires in 1.0 h" in credentials.remark()
    credentials.clock = lambda: ends + 60
    assert "expired 60 s ago: renew it" in credentials.fault()


def test_generation_of_a_dialer_goes_up_when_files_are_renewed(mine: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_module, "LOOK_S", 0.0)
    dialer = Dialer.of(mine)
    assert dialer.generation == 0
    install(CERTIFICATES.files("agent-a-2"), mine)
    assert dialer.generation == 1
    assert Dialer.of(None).generation == 0


def test_unix_sockets_are_plain_when_everything_else_is_tls() -> None:
    dialer = Dialer.of(GOOD)
    assert dialer.secures("127.0.0.1:1")
    assert not dialer.secures("unix:/dev/shm/x.sock")


def test_channels_and_ports_are_opened_in_one_place() -> None:
    """Whoever opens one elsewhere forgets TLS. The health port is plaintext on purpose; tests and their helpers may."""
    opens = re.compile(r"insecure_channel\(|secure_channel\(|add_insecure_port\(|add_secure_port\(")
    root = Path(kvdir.__file__).parents[1]
    found = {
        str(path.relative_to(root))
        for package in ("kvdir", "peer_agent")
        for path in (root / package).rglob("*.py")
        if "testing" not in path.parts and opens.search(path.read_text())
    }
    assert found == {"kvdir/rpc/tls.py", "kvdir/rpc/health_port.py"}


TLS = {"tls_cert": "a", "tls_key": "b", "tls_ca": "c"}


@pytest.mark.parametrize("config", [CoordinatorConfig, AgentConfig])
def test_public_addresses_need_no_insecure_when_there_is_tls(config: type[CoordinatorConfig] | type[AgentConfig]) -> None:
    public = {"listen": "10.0.0.1:1", "http_listen": "0.0.0.0:2", "health_listen": "0.0.0.0:3"}
    given = dict(public) if config is CoordinatorConfig else public | {"namespaces": ("x",), "accept_bytes": 1}
    plain, secured = config(**given), config(**given, **TLS)
    assert sorted(fault.partition(":")[0] for fault in plain.faults()) == sorted(public)
    assert all("tls_cert" in fault for fault in plain.faults())
    assert secured.faults() == []


def test_ports_without_certificates_need_insecure_when_there_is_tls() -> None:
    (fault,) = CoordinatorConfig(indexer_listen="0.0.0.0:7404", **TLS).faults()
    assert fault.startswith("indexer_listen: 0.0.0.0:7404 is not loopback")
    assert "tls_cert" not in fault


def test_all_faults_are_named_when_settings_of_tls_are_missing_or_out_of_place(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    lines = ('tls_cert = "a"', 'data_tls_key = "b"', 'listen = "0.0.0.0:1"', 'health_listen = "nonsense"', 'log_level = "x"')
    file.write_text("\n".join((*lines, 'accept_bytes = "1MiB"')))
    with pytest.raises(ConfigError) as caught:
        load(AgentConfig, prefix="PEER_AGENT_", file=file, environ={})
    said = "\n".join(caught.value.faults)
    for words in (
        "tls_key and tls_ca: missing",
        "data_tls_cert and data_tls_ca: missing",
        "advertise: required",
        "health_listen: 'nonsense'",
        "log_level: 'x'",
    ):
        assert words in said


def test_data_plane_takes_the_files_of_the_control_plane_when_it_has_none_of_its_own() -> None:
    own = {"data_tls_cert": "x", "data_tls_key": "y", "data_tls_ca": "z"}
    assert AgentConfig().data_tls is None
    assert AgentConfig(**TLS).data_tls == TlsFiles("a", "b", "c")
    assert AgentConfig(**TLS, **own).data_tls == TlsFiles("x", "y", "z")
    assert AgentConfig(**own).tls is None
    assert replace(AgentConfig(**TLS), tls_server_name="kvdir").tls == TlsFiles("a", "b", "c", "kvdir")


@pytest.mark.parametrize(
    ("place", "name", "said"),
    [
        ("dns:///kvdir:7400", "", True),
        ("k8s:///kvdir.prod:7400", "", True),
        ("kvdir:7400", "", False),
        ("dns:///kvdir:7400", "a", False),
    ],
)
def test_agent_says_which_name_it_will_miss_when_coordinators_are_dialled_by_address(
    place: str, name: str, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = AgentConfig(tls_cert=GOOD.certificate, tls_key=GOOD.key, tls_ca=GOOD.ca, coordinators=(place,))
    with contextlib.suppress(ConfigError):  # of a certificate that has not that name
        open_tls(replace(config, tls_server_name=name))
    assert [f"those of {place} are dialled" in record.fields["remark"] for record in caplog.records] == [True] * said
