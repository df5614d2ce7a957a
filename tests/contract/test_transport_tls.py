"""TLS on the tcp plane: strangers are refused in time, with the reason at both ends; nobody falls back to plaintext."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kvdir.errors import ConfigError
from kvdir.rpc.certificates import TlsFiles
from kvdir.testing.certificates import shared_certificates
from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.transport.base import ReadStatus
from peer_agent.transport.check_rig import Rig
from peer_agent.transport.tcp import TcpTransport
from peer_agent.transport.tls import plane_credentials

DIGEST = b"tls".ljust(32, b".")
SLOTS = 16
PATIENCE_S = 10.0
CERTIFICATES = shared_certificates()


def credentials(name: str = "node", *, ca: str = "ca") -> _native.TlsCredentials:
    return plane_credentials(CERTIFICATES.files(name, ca=ca))


@asynccontextmanager
async def rig(
    directory: Path, owner_tls: _native.TlsCredentials | None, reader_tls: _native.TlsCredentials | None
) -> AsyncIterator[Rig]:
    classes = [SizeClass(DIGEST, 4096, SLOTS)]
    with (
        Arena.create(directory / "owner", classes, epoch=1) as ours,
        Arena.create(directory / "reader", classes, epoch=2) as theirs,
    ):
        owner, reader = TcpTransport(ours, tls=owner_tls), TcpTransport(theirs, tls=reader_tls)
        await owner.export()
        try:
            yield Rig(owner, ours, reader, theirs)
        finally:
            await reader.close()
            await owner.close()


async def read_all(rig: Rig) -> None:
    connection = await rig.connect()
    stored = rig.store(range(SLOTS))
    blocks = rig.request(stored)
    outcome = await connection.read(blocks, deadline_s=PATIENCE_S)
    assert set(rig.expect(outcome, blocks, stored)) == {ReadStatus.OK}
    await connection.close()


def stats(rig: Rig) -> dict[str, int]:
    assert isinstance(rig.owner, TcpTransport)
    return rig.owner.stats()


def port(rig: Rig) -> int:
    assert isinstance(rig.owner, TcpTransport)
    return rig.owner.port


async def counted(rig: Rig, name: str, *, at_least: int = 1) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while stats(rig)[name] < at_least:
        assert time.monotonic() < until_s, f"{name} is {stats(rig)[name]}: {stats(rig)}"
        await asyncio.sleep(0.01)


def dial(port: int, tls: _native.TlsCredentials | None, *, within_s: float = PATIENCE_S) -> str:
    """Why a connection without looking at the descriptor is refused."""
    with pytest.raises(ConnectionError) as refused:
        _native.TcpConnection("127.0.0.1", port, time.monotonic_ns() + int(within_s * 1e9), tls=tls)
    return str(refused.value)


async def test_bytes_arrive_and_are_encrypted_when_both_sides_have_certificates(tmp_path: Path) -> None:
    async with rig(tmp_path, credentials("other"), credentials("node")) as both:
        await read_all(both)
        assert stats(both)["tls_handshakes"] >= 1
        assert isinstance(both.owner, TcpTransport)
        assert both.owner.tls_expires_unix_s > time.time()


async def test_descriptor_is_refused_with_what_to_do_when_only_one_side_has_tls(tmp_path: Path) -> None:
    async with rig(tmp_path, credentials(), None) as owner_only:
        with pytest.raises(ConnectionError, match=r"needs TLS: set data_tls_cert.*on this node"):
            await owner_only.connect()
    async with rig(tmp_path, None, credentials()) as reader_only:
        with pytest.raises(ConnectionError, match=r"has no TLS and ours asks for it: set data_tls_cert.*there"):
            await reader_only.connect()


async def test_descriptor_has_another_version_when_tls_is_needed(tmp_path: Path) -> None:
    """So that an agent that knows no TLS finds a descriptor that it cannot read, and takes another plane."""
    async with rig(tmp_path, credentials(), credentials()) as secured:
        assert (await secured.owner.export())[0] == 2
    async with rig(tmp_path, None, None) as plain:
        assert (await plain.owner.export())[0] == 1


async def test_plaintext_and_tls_are_told_apart_at_both_ends_when_they_meet(tmp_path: Path) -> None:
    async with rig(tmp_path, credentials(), None) as secured:
        assert "speaks TLS and we do not" in await asyncio.to_thread(dial, port(secured), None)
        await counted(secured, "tls_not_tls")
    async with rig(tmp_path, None, None) as plain:
        assert "does not speak TLS" in await asyncio.to_thread(dial, port(plain), credentials())
        await counted(plain, "protocol_errors")


async def test_native_reader_is_refused_when_another_ca_signed_it(tmp_path: Path) -> None:
    async with rig(tmp_path, credentials(), None) as owner:
        trusting = plane_credentials(CERTIFICATES.files("foreign", ca="foreign-ca"))
        assert "peer's certificate is refused" in await asyncio.to_thread(dial, port(owner), trusting)
        await counted(owner, "tls_refused_us")


@pytest.mark.parametrize(
    ("name", "counter", "words"),
    [
        (None, "tls_no_certificate", "CERTIFICATE_REQUIRED"),
        ("foreign", "tls_untrusted", "UNKNOWN_CA"),
        ("expired", "tls_untrusted", "CERTIFICATE_EXPIRED"),
    ],
)
async def test_reader_is_refused_and_counted_when_its_certificate_is_no_good(
    name: str | None, counter: str, words: str, tmp_path: Path
) -> None:
    async with rig(tmp_path, credentials(), credentials()) as owner:
        with pytest.raises(ssl.SSLError, match=words):
            await _talk(port(owner), CERTIFICATES.python_client(name))
        assert stats(owner)[counter] == 1
        await read_all(owner)


async def test_reader_hears_why_when_the_owner_refuses_its_certificate(tmp_path: Path) -> None:
    """A TLS 1.3 client is done before the server has looked at its certificate: the refusal comes in its first read."""
    both_cas = tmp_path / "both.pem"
    both_cas.write_text("".join((CERTIFICATES.directory / name).read_text() for name in ("ca.pem", "foreign-ca.pem")))
    foreign = CERTIFICATES.files("foreign")
    async with rig(tmp_path, credentials(), None) as owner:
        reader = plane_credentials(TlsFiles(foreign.certificate, foreign.key, str(both_cas)))
        assert "its data_tls_ca is not the CA that signed ours" in await asyncio.to_thread(dial, port(owner), reader)
        await counted(owner, "tls_untrusted")


async def test_older_tls_is_refused_when_offered(tmp_path: Path) -> None:
    async with rig(tmp_path, credentials(), credentials()) as owner:
        old = CERTIFICATES.python_client("other")
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            await _talk(port(owner), old)
        assert stats(owner)["tls_not_tls"] == 1


async def _talk(port: int, context: ssl.SSLContext) -> bytes:
    """The first byte that a server says after the handshake."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return await asyncio.wait_for(reader.readexactly(1), PATIENCE_S)
    finally:
        writer.transport.abort()


async def test_connect_ends_by_its_deadline_when_the_peer_takes_the_connection_and_says_nothing() -> None:
    with _listener() as silent:
        begun = time.monotonic()
        assert "did not finish the handshake in time" in await asyncio.to_thread(dial, silent, credentials(), within_s=0.3)
        assert 0.3 <= time.monotonic() - begun < PATIENCE_S


@pytest.mark.parametrize(
    "garbage", [bytes(200), b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x16\x03\x03\x00\x05hello", b"\x15\x03\x03\x00\x02\x02\x28"]
)
async def test_connect_fails_at_once_when_the_peer_answers_garbage(garbage: bytes) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(garbage)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        begun = time.monotonic()
        await asyncio.to_thread(dial, server.sockets[0].getsockname()[1], credentials(), within_s=PATIENCE_S)
        assert time.monotonic() - begun < PATIENCE_S / 2


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"], ids=["silent", "half a record"])
async def test_others_are_served_when_many_handshakes_stall(said: bytes, tmp_path: Path) -> None:
    async with rig(tmp_path, credentials(), credentials()) as owner:
        with ExitStack() as stack:
            for _ in range(64):
                stalled = stack.enter_context(socket.create_connection(("127.0.0.1", port(owner))))
                stalled.sendall(said)
            await counted(owner, "connections", at_least=64)
            await asyncio.wait_for(read_all(owner), PATIENCE_S)
        await counted(owner, "tls_unfinished", at_least=64)


async def test_new_connections_show_the_new_certificate_when_the_files_change(tmp_path: Path) -> None:
    files = TlsFiles(*(str(tmp_path / name) for name in ("cert", "key", "ca")))
    _put(CERTIFICATES.files("node"), files)
    async with rig(tmp_path, plane_credentials(files), credentials()) as owner:
        connection = await owner.connect()
        assert await _shown_by(port(owner)) == "kvdir test node"

        _put(CERTIFICATES.files("other"), files)
        until_s = time.monotonic() + PATIENCE_S
        while await _shown_by(port(owner)) != "kvdir test other":
            assert time.monotonic() < until_s
            await asyncio.sleep(0.05)

        stored = owner.store(range(SLOTS))
        blocks = owner.request(stored)
        outcome = await connection.read(blocks, deadline_s=PATIENCE_S)
        assert set(owner.expect(outcome, blocks, stored)) == {ReadStatus.OK}, "what was open stays open"
        assert stats(owner)["tls_reloads"] == 1


async def test_old_certificate_stays_in_use_when_the_new_files_do_not_fit(tmp_path: Path) -> None:
    files = TlsFiles(*(str(tmp_path / name) for name in ("cert", "key", "ca")))
    _put(CERTIFICATES.files("node"), files)
    loaded = plane_credentials(files)
    async with rig(tmp_path, loaded, credentials()) as owner:
        shutil.copyfile(CERTIFICATES.directory / "other.pem", files.certificate)  # and not its key
        until_s = time.monotonic() + PATIENCE_S
        while not loaded.failure:
            assert await _shown_by(port(owner)) == "kvdir test node"
            assert time.monotonic() < until_s
            await asyncio.sleep(0.05)
        assert "data_tls_key" in loaded.failure
        assert stats(owner)["tls_failed_reloads"] >= 1
        await read_all(owner)


def _put(source: TlsFiles, target: TlsFiles) -> None:
    shutil.copyfile(source.key, target.key)
    shutil.copyfile(source.ca, target.ca)
    shutil.copyfile(source.certificate, target.certificate)


async def _shown_by(port: int) -> str:
    """The name in the certificate that the server shows now."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=CERTIFICATES.python_client("other"))
    try:
        shown = writer.get_extra_info("peercert")
        return str(dict(pair[0] for pair in shown["subject"])["commonName"])
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (lambda: TlsFiles("/nowhere", "/nowhere", "/nowhere"), "data_tls_cert: /nowhere cannot be read: No such file"),
        (lambda: CERTIFICATES.files("expired"), "certificate has expired"),
        (lambda: CERTIFICATES.files("foreign"), "data_tls_cert: .* would be refused by every peer"),
    ],
)
def test_files_are_refused_at_start_when_peers_would_refuse_them(files: Callable[[], TlsFiles], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plane_credentials(files())


@contextmanager
def _listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]
