"""Quotas over real gRPC: agents evict what they are asked to, and one lost removal never deletes a tenant's cache."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import replace

import pytest

from kvdir.core.event import Event
from kvdir.core.trust import Cumulative
from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import FAST_CONFIG, Served, publishing, said, serving, stored
from kvdir.testing.wait import eventually
from kvdir.v1 import events_pb2

BLOCK = EXAMPLE_NAMESPACE.block_bytes
CONFIG = replace(FAST_CONFIG, quota=(f"none={100 * BLOCK}",), quota_enforce=True, quota_interval_s=0.1)


async def looked_again(served: Served, times: int) -> None:
    """Until the keeper has looked at the total so many times more."""
    watched = served.coordinator.quotas.watched[0]
    for _ in range(times):
        due_s = watched.due_s
        await eventually(lambda due_s=due_s: watched.due_s > due_s)


async def test_agents_evict_the_excess_and_no_more_when_enforced() -> None:
    async with serving(CONFIG) as served, FakeNode(served.address, "a") as one, FakeNode(served.address, "b") as two:
        one.store(some_fingerprints(90, seed=1))
        two.store(some_fingerprints(60, seed=2))
        await one.synced()
        await two.synced()
        await eventually(lambda: len(one.held[Tier.CPU]) + len(two.held[Tier.CPU]) == 100)
        await eventually(lambda: served.coordinator.quotas.watched[0].verdict == "within")
        view = (await served.client.quotas()).quotas[0]
        assert (view.evicted_blocks, view.used_bytes.value, view.used_bytes.trusted) == (50, 100 * BLOCK, True)
        story = await served.client.story(node="a")
        assert {"registered", "quota", "evicted"} <= {entry.kind for entry in story.entries}


async def test_nothing_is_evicted_when_it_is_a_dry_run() -> None:
    config = replace(CONFIG, quota_enforce=False)
    async with serving(config) as served, FakeNode(served.address, "a") as node:
        node.store(some_fingerprints(150))
        await node.synced()
        await eventually(lambda: served.coordinator.quotas.watched[0].verdict == "dry-run")
        view = await served.client.quotas()
        assert (view.enforcing, [share.max_blocks for share in view.quotas[0].shares]) == (False, [50])
        assert (node.evictions, len(node.held[Tier.CPU])) == ([], 150)


async def test_cache_stays_whole_when_one_removal_is_lost() -> None:
    """The directory counts 160 blocks, the node holds 80, the quota is 100. The loss shows with the next heartbeat."""
    blocks = some_fingerprints(160)
    async with serving(CONFIG) as served, FakeNode(served.address, "b") as other, publishing(served, node="a") as call:
        await said(call, "welcome")
        await other.synced()
        await call.write(events_pb2.PublishRequest(batch=events_pb2.Batch(epoch=7, first_seq=1, events=[stored(blocks)])))
        # Number 2, the removal of 80 blocks, never arrives. The agent here answers nothing, so no repair succeeds.
        for _ in range(5):
            await call.write(events_pb2.PublishRequest(heartbeat=events_pb2.Heartbeat(epoch=7, last_seq=2)))
            await looked_again(served, 1)
        view = (await served.client.quotas()).quotas[0]
        assert view.verdict == "untrusted"
        assert isinstance(view.used_bytes, Cumulative)
        assert (view.used_bytes.trusted, view.used_bytes.value) == (False, 160 * BLOCK)
        assert view.refused > 0
        assert (view.evicted_blocks, other.evictions) == (0, [])


async def test_eviction_follows_the_truth_when_the_loss_was_repaired() -> None:
    async with serving(CONFIG) as served, FakeNode(served.address, "a", loss=0.5, seed=3) as node:
        for number in range(30):
            node.store(some_fingerprints(10, seed=number))
            node.outbox.append(Event.removed(Tier.CPU, node.digest, some_fingerprints(5, seed=number)))
            node.held[Tier.CPU] -= set(some_fingerprints(5, seed=number))
            await asyncio.sleep(0)
        await eventually(lambda: len(node.held[Tier.CPU]) == 100)
        await looked_again(served, 3)
        assert len(node.held[Tier.CPU]) == 100
        held = Fingerprints.of(sorted(node.held[Tier.CPU]))
        await eventually(lambda: served.coordinator.quotas.watched[0].verdict == "within")
        assert (await served.client.lookup(node.digest, held)).hits == 100


async def test_metrics_tell_quota_and_trust_when_scraped() -> None:
    async with serving(CONFIG) as served, FakeNode(served.address, "a") as node:
        node.store(some_fingerprints(10))
        await node.synced()
        await eventually(lambda: served.coordinator.quotas.watched[0].verdict == "within")

        def scrape() -> str:
            with urllib.request.urlopen(f"http://{served.http}/metrics", timeout=5) as response:
                text: str = response.read().decode()
                return text

        text = await asyncio.to_thread(scrape)
        assert f'kvdir_quota_limit_bytes{{subject="none"}} {float(100 * BLOCK)}' in text
        assert 'kvdir_quota_trusted{subject="none"} 1.0' in text
        assert 'kvdir_quota_verdict{subject="none",verdict="within"} 1.0' in text
        assert 'kvdir_orphans{fate="forgotten"} 0.0' in text
        assert "kvdir_partial 0.0" in text


async def test_story_and_quota_commands_refuse_bad_questions() -> None:
    async with serving() as served:
        for question in ({}, {"node": "a", "fingerprint": bytes(32)}, {"fingerprint": b"short"}):
            with pytest.raises(InvalidInput):
                await served.client.story(**question)  # type: ignore[arg-type]
