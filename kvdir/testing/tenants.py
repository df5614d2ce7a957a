"""Two tenants, and a coordinator that tells them apart by certificates: for tests of roles, tenants and policies.

Certificates are those of certificates.sh: agent-a, agent-b, engine-a, router, admin. POLICY is what they may do.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kvdir.namespace import salt_digest
from kvdir.rpc.tls import Dialer
from kvdir.server.config import CoordinatorConfig
from kvdir.testing.certificates import shared_certificates
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE
from kvdir.testing.served import FAST_CONFIG, Served, serving

SALT = "a salt of acme that nobody sees"
OPEN_SPACE = EXAMPLE_NAMESPACE
ACME_SPACE = dataclasses.replace(EXAMPLE_NAMESPACE, model="acme-model", tenant=f"salt:{salt_digest(SALT)}")

POLICY = f"""
[tenants.acme]
salts = ["salt:{salt_digest(SALT)}"]
[[identity]]
name = "coordinator"
spiffe = ["spiffe://kvdir.test/coordinator"]
roles = ["agent", "admin"]
tenants = ["*"]
nodes = ["*"]
[[identity]]
name = "agent-a"  # acme's
spiffe = ["spiffe://kvdir.test/agent/a"]
roles = ["agent"]
tenants = ["none", "acme"]
nodes = ["a"]
[[identity]]
name = "agent-b"  # of no tenant
spiffe = ["spiffe://kvdir.test/agent/b"]
roles = ["agent"]
tenants = ["none"]
nodes = ["b"]
[[identity]]
name = "engine-a"
spiffe = ["spiffe://kvdir.test/engine/a"]
roles = ["engine"]
tenants = ["none"]
[[identity]]
name = "router"
spiffe = ["spiffe://kvdir.test/router"]
roles = ["router"]
tenants = ["none"]
[[identity]]
name = "admin"
spiffe = ["spiffe://kvdir.test/admin"]
roles = ["admin"]
tenants = ["*"]
"""


def secured(directory: Path, policy: str = POLICY, **settings: Any) -> CoordinatorConfig:
    """A coordinator with certificates and this policy, whose file is directory/policy.toml."""
    files, file = shared_certificates().files("coordinator"), directory / "policy.toml"
    write_policy(file, policy)
    return dataclasses.replace(
        FAST_CONFIG, tls_cert=files.certificate, tls_key=files.key, tls_ca=files.ca, policy=str(file), **settings
    )


def write_policy(file: Path, text: str) -> None:
    """At once, as who edits it should."""
    made = file.with_suffix(".new")
    made.write_text(text)
    made.replace(file)


def dialer(name: str) -> Dialer:
    """Of a client with this certificate."""
    return Dialer.of(shared_certificates().files(name))


@contextlib.asynccontextmanager
async def secured_serving(directory: Path, policy: str = POLICY, **settings: Any) -> AsyncIterator[Served]:
    """The coordinator; `client` has its own certificate, which may everything."""
    async with serving(secured(directory, policy, **settings)) as served:
        yield served


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """All that a caller hears of one call. answers: serialized."""

    code: str
    details: str
    trailing: tuple[tuple[str, str], ...]
    answers: tuple[bytes, ...]

    def of(self, digest: bytes, *, shown_as: bytes) -> Said:
        """With another digest in the place of this one, wherever it is repeated."""
        hexed, shown = digest.hex(), shown_as.hex()
        details = self.details.replace(hexed[:16], shown[:16])
        answers = (item.replace(digest, shown_as).replace(hexed[:16].encode(), shown[:16].encode()) for item in self.answers)
        return dataclasses.replace(self, details=details, answers=tuple(answers))


async def hear(address: str, name: str, method: str, *requests: Any, most: int = 64) -> Said:
    """Calls as `name`: sends the requests, ends its side, and hears everything, at most `most` answers.

    A single request goes with the call, of whatever kind it is: grpc.aio says INTERNAL for a status that comes before a write.
    """
    async with dialer(name).aio(address, options=()) as channel:
        if len(requests) == 1:
            call: Any = channel.unary_stream(method)(requests[0].SerializeToString())
        else:
            call = channel.stream_stream(method)()
        answers: list[bytes] = []
        try:
            if len(requests) != 1:
                for request in requests:
                    await call.write(request.SerializeToString())
                await call.done_writing()
            while len(answers) < most and (data := await call.read()) is not grpc.aio.EOF:
                answers.append(data)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            pass  # the status says it
        if len(answers) >= most:
            call.cancel()
        code, details = await call.code(), await call.details() or ""
        trailing = tuple((key, str(value)) for key, value in await call.trailing_metadata() or () if key.startswith("kvdir-"))
        return Said(code.name, details, trailing, tuple(answers))
