"""`kvdir diff` against running coordinators: exit codes, verdicts, and the blocks by name."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvdir.cli.main import main
from kvdir.cli.output import Exit
from kvdir.core.outbox import OwnerOutbox
from kvdir.testing.fake_node import FakeNode, some_fingerprints
from kvdir.testing.served import serving
from kvdir.testing.wait import eventually
from peer_agent.testing.link import link_to

BLOCKS = some_fingerprints(40)


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["diff", *arguments])


async def document(*arguments: str, exit: Exit = Exit.OK) -> Any:
    result = await run(*arguments, "--output", "json")
    assert result.exit_code == exit, result.output
    return json.loads(result.stdout)


async def test_equal_when_one_stream_is_published_to_both() -> None:
    async with serving() as a, serving() as b, FakeNode(a.address, "n1", outbox=OwnerOutbox(max_events=100)) as one:
        async with FakeNode(b.address, "n1", epoch=one.epoch, outbox=one.outbox) as other:
            one.store(BLOCKS)
            other.held = one.held
            await asyncio.gather(one.synced(), other.synced())
            found = await document(a.address, b.address, "--wait", "10")
            assert found["verdict"] == "equal"
            assert [side["blocks"] for side in found["parts"][0]["sides"]] == [40, 40]
        # It went without a goodbye to b, and goes on at a.
        one.remove(BLOCKS.slice(0, 3))
        await one.synced()
        found = await document(a.address, b.address, "--blocks")
        assert found["verdict"] == "behind"
        assert found["parts"][0]["behind"] == 1
        (missing,) = found["blocks"]
        assert (missing["only_in"], missing["count"]) == (b.address, 3)
        assert missing["blocks"] == sorted(BLOCKS[at][:16].hex() for at in range(3))
        assert (await run(a.address, b.address, "--wait", "0.3")).exit_code == Exit.FAILED, "asked for equality, got none"


async def test_different_when_both_stand_at_one_number_and_hold_other_blocks() -> None:
    async with (
        serving() as a,
        serving() as b,
        FakeNode(a.address, "n1") as one,
        FakeNode(b.address, "n1", epoch=one.epoch) as other,
    ):
        one.store(BLOCKS)
        other.store(BLOCKS.slice(0, 39))
        await asyncio.gather(one.synced(), other.synced())
        await eventually(lambda: one.state and other.state, what="both are known")
        result = await run(a.address, b.address, "--blocks")
        assert result.exit_code == Exit.FAILED
        assert "different" in result.output
        assert BLOCKS[39][:16].hex() in result.output


async def test_unreachable_coordinator_is_named() -> None:
    async with serving() as a:
        result = await run(a.address, "127.0.0.1:1")
    assert result.exit_code == Exit.UNREACHABLE
    assert "127.0.0.1:1" in result.output


async def test_coordinator_that_is_away_is_waited_for_when_asked_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as a, serving() as b:
        host, _, port = b.address.rpartition(":")
        async with link_to(host, int(port)) as link:
            there, link._target = link._target, ("127.0.0.1", 1)
            pauses = []

            def pause(seconds: float) -> None:
                pauses.append(seconds)
                link._target = there
                time.sleep(seconds)

            monkeypatch.setattr("kvdir.cli.diff.time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
            assert (await document(a.address, f"127.0.0.1:{link.port}", "--wait", "20"))["verdict"] == "equal"
            assert pauses, "it was asked in vain at first"


async def test_one_coordinator_is_refused() -> None:
    result = await run("127.0.0.1:1")
    assert result.exit_code == Exit.USAGE


async def test_coordinators_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as a, serving() as b:
        monkeypatch.setattr("kvdir.client.discovery.resolve_name", lambda name, port: [a.address, b.address])
        found = await document("dns:///coordinators:1")
        assert [item["address"] for item in found["coordinators"]] == [a.address, b.address]
        monkeypatch.setattr("kvdir.client.discovery.resolve_name", lambda name, port: [])
        result = await run("dns:///coordinators:1")
    assert result.exit_code == Exit.USAGE
    assert "nobody there" in result.output
