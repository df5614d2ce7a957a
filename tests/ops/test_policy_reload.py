"""A policy that changes while streams are open: what it takes away ends them, what it gives opens, nonsense changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvdir.core.feed_items import End, Start
from kvdir.core.watcher import MIN_CREDIT_BYTES
from kvdir.fingerprint import Fingerprints
from kvdir.rpc.lookup_codec import encode_lookup_request
from kvdir.rpc.watch_codec import decode_response, encode_start
from kvdir.testing.fake_node import FakeNode
from kvdir.testing.served import Served
from kvdir.testing.tenants import ACME_SPACE, POLICY, dialer, hear, secured_serving, write_policy
from kvdir.testing.wait import eventually
from kvdir.v1 import admin_pb2, directory_pb2

BLOCKS = Fingerprints.chain(b"%d" % number for number in range(20))
LOOKUP = encode_lookup_request(ACME_SPACE.digest, BLOCKS, mode=directory_pb2.LOOKUP_MODE_PREFIX, touch=False)
A, B = 'tenants = ["none", "acme"]\nnodes = ["a"]', 'tenants = ["none"]\nnodes = ["b"]'
A_IS_NO_AGENT = POLICY.replace(f'roles = ["agent"]\n{A}', 'roles = ["router"]\ntenants = ["none"]')
A_WITHOUT_ACME = POLICY.replace(A, 'tenants = ["none"]\nnodes = ["a"]')
B_WITH_ACME = POLICY.replace(B, 'tenants = ["none", "acme"]\nnodes = ["b"]')
WITHIN_S = 20.0
"""Many times the reload interval, for a machine that is busy."""


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with secured_serving(tmp_path) as served:
        yield served


class Open:
    """A stream that is open: its first answer has come."""

    def __init__(self, channel: grpc.aio.Channel, method: str) -> None:
        self._channel = channel
        self.call: Any = channel.stream_stream(method)()

    async def ask(self, request: Any) -> bytes:
        await self.call.write(request.SerializeToString())
        answer: bytes = await self.call.read()
        assert answer is not grpc.aio.EOF, await self.call.details()
        return answer

    async def ends(self) -> tuple[list[bytes], str, str]:
        """What still comes, and how it ends."""
        said: list[bytes] = []
        async with asyncio.timeout(WITHIN_S):
            try:
                while (answer := await self.call.read()) is not grpc.aio.EOF:
                    said.append(answer)
            except grpc.aio.AioRpcError:
                pass
            return said, (await self.call.code()).name, await self.call.details()


def becomes(served: Served, text: str) -> None:
    write_policy(Path(served.coordinator.config.policy), text)


def lookups(number: int) -> directory_pb2.LookupStreamRequest:
    return directory_pb2.LookupStreamRequest(lookups=[directory_pb2.StreamedLookup(id=number, lookup=LOOKUP, deadline_ms=9000)])


def answered(data: bytes) -> directory_pb2.LookupResponse:
    return directory_pb2.LookupStreamResponse.FromString(data).answers[0].lookup


async def test_open_streams_end_when_the_role_is_taken_away(served: Served) -> None:
    node = FakeNode(served.address, "a", namespace=ACME_SPACE, dialer=dialer("agent-a"))
    async with node, dialer("agent-a").aio(served.address, options=()) as channel:
        node.store(BLOCKS)
        await node.synced()
        watch, lookup = (Open(channel, f"/kvdir.v1.Directory/{name}") for name in ("Watch", "LookupStream"))
        await watch.ask(encode_start(Start("test", credit_bytes=4 * MIN_CREDIT_BYTES)))
        assert answered(await lookup.ask(lookups(1))).nodes[0].node == "a"
        becomes(served, A_IS_NO_AGENT)
        said, code, words = await watch.ends()
        assert (code, "takes one of agent" in words) == ("PERMISSION_DENIED", True)
        assert [item.end.begin_anew for item in map(decode_response, said) if isinstance(item.end, End)] == [True]
        # A router may look up, but not this tenant: the stream goes on, and the next lookup sees it.
        assert answered(await lookup.ask(lookups(2))).error.startswith("unknown-namespace")
        becomes(served, POLICY.replace("spiffe://kvdir.test/agent/a", "spiffe://kvdir.test/agent/other"))
        said, code, words = await lookup.ends()
        assert (said, code, "no identity of the policy" in words) == ([], "PERMISSION_DENIED", True)
        await eventually(lambda: "no identity of the policy" in str(node.publisher.stats().last_error), within_s=WITHIN_S)
        assert served.coordinator.gate.refused["role"] >= 2


async def test_what_was_stored_goes_when_its_tenant_is_taken_away(served: Served) -> None:
    directory = served.coordinator.directory
    node = FakeNode(served.address, "a", namespace=ACME_SPACE, dialer=dialer("agent-a"))
    async with node:
        node.store(BLOCKS)
        await node.synced()
        assert directory.index.stats().blocks == len(BLOCKS)
        becomes(served, A_WITHOUT_ACME)
        await eventually(lambda: not list(directory.holders), within_s=WITHIN_S, what="its holders are gone")
        becomes(served, POLICY)
        await eventually(lambda: directory.index.stats().blocks == len(BLOCKS), within_s=WITHIN_S, what="and come back")


async def test_a_right_opens_without_a_restart_when_it_is_given(served: Served) -> None:
    before = await hear(served.address, "agent-b", "/kvdir.v1.Directory/Lookup", LOOKUP)
    assert "known: none yet" in before.details
    async with dialer("agent-b").aio(served.address, options=()) as channel:
        watch = Open(channel, "/kvdir.v1.Directory/Watch")
        await watch.ask(encode_start(Start("test", credit_bytes=4 * MIN_CREDIT_BYTES)))
        becomes(served, B_WITH_ACME)
        _, code, words = await watch.ends()
        assert (code, "other tenants are to be seen now" in words) == ("PERMISSION_DENIED", True)
        watch = Open(channel, "/kvdir.v1.Directory/Watch")
        await watch.ask(encode_start(Start("test", credit_bytes=4 * MIN_CREDIT_BYTES)))


async def test_the_last_good_policy_stays_when_the_file_is_nonsense(served: Served) -> None:
    security = served.coordinator.security
    becomes(served, POLICY + "\nsurprise = [")
    await eventually(lambda: "not valid TOML" in security.fault, within_s=WITHIN_S, what="the fault is told")
    remark = served.coordinator.remark()
    assert ("the policy file is not taken" in remark, "TOML" in remark) == (True, False), "anybody may read /readyz"
    for name, faults in (("router", False), ("admin", True)):  # which name tenants and identities
        heard = await hear(served.address, name, "/kvdir.v1.Admin/WhoAmI", admin_pb2.WhoAmIRequest())
        remark = admin_pb2.WhoAmIResponse.FromString(heard.answers[0]).remark
        assert ("is not taken" in remark, "not valid TOML" in remark) == (True, faults)
    becomes(served, A_WITHOUT_ACME)
    await eventually(lambda: not security.remark(), within_s=WITHIN_S, what="the fault is over")
    assert security.file is not None
    assert (security.file.reloads, security.file.refused_reloads) == (1, 1)
