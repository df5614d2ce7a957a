"""The read path over real agents in this process: nominate, owner decides, verified read, negative feedback."""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from kvdir.errors import DeadlineExceeded
from kvdir.fingerprint import Fingerprints
from kvdir.testing.wait import eventually
from peer_agent.cli.main import main as agent_main
from peer_agent.core.effects import LoadStatus
from peer_agent.server.directory import Coordinators
from peer_agent.testing import LocalCluster, local_cluster, sample_namespace

TRANSPORTS = [("shm", "tcp"), ("tcp",)]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


@pytest.fixture(params=TRANSPORTS, ids=lambda names: names[0])
async def pair(directory: Path, request: pytest.FixtureRequest) -> AsyncIterator[LocalCluster]:
    async with local_cluster(directory, "a", "b", transports=request.param) as cluster:
        yield cluster


async def test_blocks_come_from_the_peer_when_only_it_has_them(pair: LocalCluster):
    fingerprints = pair.blocks.chain(40)
    writer, reader = await pair.engine("a"), await pair.engine("b")
    assert (await writer.store(fingerprints, pair.blocks.data(fingerprints))).stored == 40
    await pair.wait_known("a")
    into = pair.blocks.room(fingerprints)
    result = await reader.load(fingerprints, into=into)
    assert result.count(LoadStatus.HIT_PEER) == 40
    assert result.peer_bytes == 40 * pair.namespace.block_bytes
    pair.blocks.check(fingerprints, into, result)
    again = await reader.load(fingerprints, into=into)
    assert again.count(LoadStatus.HIT_LOCAL) == 40
    pair.blocks.check(fingerprints, into, again)
    await pair.wait_known("b")


async def test_locks_at_the_owner_end_when_the_read_is_over(pair: LocalCluster):
    fingerprints = pair.blocks.chain(8)
    writer, reader = await pair.engine("a"), await pair.engine("b")
    await writer.store(fingerprints, pair.blocks.data(fingerprints))
    await pair.wait_known("a")
    await reader.load(fingerprints, into=pair.blocks.room(fingerprints))
    await eventually(lambda: pair.agents["a"].store.locks == 0, what="the owner's lock ended")


async def test_owner_answers_for_the_whole_list_when_the_directory_knows_half(directory: Path):
    async with local_cluster(directory, "b") as cluster:
        reader = await cluster.engine("b")
        await cluster.start_agent("a", event_loss=0.5)
        writer = await cluster.engine("a")
        known, all_ = cluster.blocks.chain(1), cluster.blocks.chain(30)
        for position in range(30):
            one = all_.slice(position, 1)
            await writer.store(one, cluster.blocks.data(one))
        await eventually(lambda: cluster.known_blocks("a") > 0, what="something is known of a")
        into = cluster.blocks.room(all_)
        result = await reader.load(all_, into=into)
        assert result.count(LoadStatus.HIT_PEER) == 30
        cluster.blocks.check(all_, into, result)
        assert known[0] == all_[0]


async def test_stale_and_reported_when_the_owner_no_longer_has_it(directory: Path):
    async with local_cluster(directory, coordinator=False, arena_bytes=64 << 10) as cluster:  # 15 blocks
        await cluster.start_coordinator(heartbeat_interval_ms=60_000)  # no digest tells that the owner's own account is wrong
        for node in "ab":
            await cluster.start_agent(node)
        fingerprints = cluster.blocks.chain(10)
        writer, reader = await cluster.engine("a"), await cluster.engine("b")
        await writer.store(fingerprints, cluster.blocks.data(fingerprints))
        await cluster.wait_known("a")
        # Evicted behind the directory's back: the inventory changes, no event goes out.
        inventory = cluster.agents["a"].store._inventory
        inventory.discard(cluster.namespace.digest, fingerprints.slice(0, 4))
        into = cluster.blocks.room(fingerprints)
        result = await reader.load(fingerprints, into=into)
        assert result.count(LoadStatus.STALE) == 4
        assert result.count(LoadStatus.HIT_PEER) == 6
        assert result.recompute == (0, 1, 2, 3)
        cluster.blocks.check(fingerprints, into, result)
        counters = cluster.agents["b"].reader.counters
        await eventually(lambda: counters.stale_reported == 4, what="reported")
        await eventually(lambda: cluster.known_blocks("a") == 6, what="the directory has learned")


async def test_several_owners_fill_the_gaps_when_none_has_all(directory: Path):
    async with local_cluster(directory, "a", "b", "c", "reader") as cluster:
        fingerprints = cluster.blocks.chain(12)
        for at, node in enumerate("abc"):
            part = fingerprints.slice(4 * at, 4)
            engine = await cluster.engine(node)
            await engine.store(part, cluster.blocks.data(part))
            await cluster.wait_known(node)
        reader = await cluster.engine("reader")
        into = cluster.blocks.room(fingerprints)
        result = await reader.load(fingerprints, into=into)
        assert result.count(LoadStatus.HIT_PEER) == 12
        cluster.blocks.check(fingerprints, into, result)


async def test_one_read_serves_both_when_two_engines_load_the_same_blocks(pair: LocalCluster):
    fingerprints = pair.blocks.chain(60)
    writer, first, second = await pair.engine("a"), await pair.engine("b"), await pair.engine("b")
    await writer.store(fingerprints, pair.blocks.data(fingerprints))
    await pair.wait_known("a")
    rooms = [pair.blocks.room(fingerprints) for _ in range(2)]
    results = await asyncio.gather(
        *(engine.load(fingerprints, into=room) for engine, room in zip((first, second), rooms, strict=True))
    )
    for room, result in zip(rooms, results, strict=True):
        assert result.hits == 60
        pair.blocks.check(fingerprints, room, result)
    assert pair.agents["b"].reader.counters.peer_bytes == 60 * pair.namespace.block_bytes, "read once"
    pair.agents["b"].store._inventory.check()


async def test_reads_what_fits_when_the_arena_is_smaller_than_the_list(directory: Path):
    async with local_cluster(directory, "a") as cluster:
        await cluster.start_agent("b", arena_bytes=32 << 10)  # 6 blocks
        fingerprints = cluster.blocks.chain(30)
        writer, reader = await cluster.engine("a"), await cluster.engine("b")
        await writer.store(fingerprints, cluster.blocks.data(fingerprints))
        await cluster.wait_known("a")
        into = cluster.blocks.room(fingerprints)
        result = await reader.load(fingerprints, into=into)
        assert result.count(LoadStatus.HIT_PEER) == 6
        assert result.count(LoadStatus.MISS) == 24
        cluster.blocks.check(fingerprints, into, result)


async def test_prefetched_blocks_are_local_hits_when_they_are_loaded(pair: LocalCluster):
    fingerprints = pair.blocks.chain(20)
    writer, reader = await pair.engine("a"), await pair.engine("b")
    await writer.store(fingerprints, pair.blocks.data(fingerprints))
    await pair.wait_known("a")
    assert await reader.prefetch(fingerprints) == 20
    store = pair.agents["b"].store
    await eventually(lambda: store.occupancy()[0].committed == 20, what="prefetched")
    into = pair.blocks.room(fingerprints)
    result = await reader.load(fingerprints, into=into, local_only=True)
    assert result.count(LoadStatus.HIT_LOCAL) == 20
    pair.blocks.check(fingerprints, into, result)


async def test_lookup_names_peers_when_they_hold_blocks(pair: LocalCluster):
    fingerprints = pair.blocks.chain(6)
    writer, reader = await pair.engine("a"), await pair.engine("b")
    await writer.store(fingerprints.slice(0, 4), pair.blocks.data(fingerprints.slice(0, 4)))
    await pair.wait_known("a")
    answer = await reader.lookup(fingerprints, deadline_s=1.0)
    assert (answer.local, answer.nominated) == (bytes(6), b"\1\1\1\1\0\0")
    assert answer.directory_reached


async def test_lookup_tells_what_is_here_when_the_directory_is_silent(pair: LocalCluster, monkeypatch: pytest.MonkeyPatch):
    async def silent(directory: Coordinators, digest: bytes, fingerprints: Fingerprints, *, timeout_s: float):
        await asyncio.sleep(timeout_s)
        raise DeadlineExceeded("no answer in time")

    monkeypatch.setattr(Coordinators, "nominate", silent)
    engine, held = await pair.engine("a"), pair.blocks.chain(3)
    await engine.store(held, pair.blocks.data(held))
    found = await engine.lookup(pair.blocks.chain(5), deadline_s=1.0)
    assert (found.local, found.directory_reached, found.reason) == (bytes([1, 1, 1, 0, 0]), False, "")


async def test_small_chunks_arrive_whole_when_a_list_is_split(directory: Path):
    async with local_cluster(directory, "a", "b", max_chunk_bytes=3 * 4096, max_flight_bytes=4 * 4096) as cluster:
        fingerprints = cluster.blocks.chain(50)
        writer, reader = await cluster.engine("a"), await cluster.engine("b")
        await writer.store(fingerprints, cluster.blocks.data(fingerprints))
        await cluster.wait_known("a")
        into = cluster.blocks.room(fingerprints)
        result = await reader.load(fingerprints, into=into)
        assert result.count(LoadStatus.HIT_PEER) == 50
        cluster.blocks.check(fingerprints, into, result)


async def test_large_blocks_cross_whole_on_every_plane(directory: Path):
    namespace = sample_namespace(block_bytes=1 << 20)
    for transports in TRANSPORTS:
        async with local_cluster(
            directory, "a", "b", namespace=namespace, transports=transports, arena_bytes=17 << 20
        ) as cluster:
            fingerprints = cluster.blocks.chain(12)
            writer, reader = await cluster.engine("a"), await cluster.engine("b")
            assert (await writer.store(fingerprints, list(cluster.blocks.data(fingerprints)))).stored == 12
            await cluster.wait_known("a")
            into = cluster.blocks.room(fingerprints)
            result = await reader.load(fingerprints, into=list(into), deadline_s=10)
            assert result.count(LoadStatus.HIT_PEER) == 12
            cluster.blocks.check(fingerprints, into, result)
            assert cluster.agents["b"].reader._peers.planes_in_use() == {transports[0]: 1}


def calls_at(cluster: LocalCluster, node: str) -> dict[str, int]:
    """Calls that the node's listeners have answered so far, by method."""
    figures = cluster.agents[node]._listeners.calls.methods
    return {method.rpartition("/")[2]: sum(item.by_code.values()) for method, item in figures.items()}


async def test_one_lock_and_one_unlock_are_all_calls_when_a_load_reads_from_a_peer(pair: LocalCluster):
    first, second = pair.blocks.chain(40), pair.blocks.chain(40, root="second")
    writer, reader = await pair.engine("a"), await pair.engine("b")
    for fingerprints in (first, second):
        await writer.store(fingerprints, pair.blocks.data(fingerprints))
    await pair.wait_known("a")
    await reader.load(first, into=pair.blocks.room(first))  # connects
    await eventually(lambda: pair.agents["a"].store.locks == 0, what="the first load is over for the owner, too")
    before = calls_at(pair, "a")
    result = await reader.load(second, into=pair.blocks.room(second))
    assert result.count(LoadStatus.HIT_PEER) == 40
    await eventually(lambda: pair.agents["a"].store.locks == 0, what="unlocked")
    made = {method: count - before.get(method, 0) for method, count in calls_at(pair, "a").items()}
    assert {method: count for method, count in made.items() if count} == {"Lock": 1, "Unlock": 1}


async def test_unlock_travels_with_the_next_lock_when_loads_follow_each_other(pair: LocalCluster):
    lists = [pair.blocks.chain(4, root=str(number)) for number in range(10)]
    writer, reader = await pair.engine("a"), await pair.engine("b")
    for fingerprints in lists:
        await writer.store(fingerprints, pair.blocks.data(fingerprints))
    await pair.wait_known("a")
    for fingerprints in lists:
        assert (await reader.load(fingerprints, into=pair.blocks.room(fingerprints))).hits == 4
    await eventually(lambda: pair.agents["a"].store.locks == 0, what="unlocked")
    made = calls_at(pair, "a")
    assert made["Lock"] == 10
    assert made.get("Unlock", 0) < 10


async def test_nobody_is_called_when_all_blocks_are_here(pair: LocalCluster, monkeypatch: pytest.MonkeyPatch):
    fingerprints = pair.blocks.chain(20)
    engine = await pair.engine("b")
    await engine.store(fingerprints, pair.blocks.data(fingerprints))

    async def nominate(*arguments, **options):
        raise AssertionError("the directory was asked")

    monkeypatch.setattr(pair.agents["b"].reader._directory, "nominate", nominate)
    before = calls_at(pair, "a")
    result = await engine.load(fingerprints, into=pair.blocks.room(fingerprints))
    assert result.count(LoadStatus.HIT_LOCAL) == 20
    assert (result.timings.lookup_us, result.predicted_us) == (0, 0)
    assert calls_at(pair, "a") == before
    assert pair.agents["b"].reader._tasks.failures == 0
    assert len(pair.agents["b"].reader._tasks) == 0


@pytest.mark.parametrize(("prefill_tokens_per_s", "served"), [(1e9, 0), (100.0, 20), (0.0, 20)])
async def test_hits_that_cost_more_than_they_save_are_left_where_they_are(
    pair: LocalCluster, prefill_tokens_per_s: float, served: int
):
    """A block has 16 tokens: at 1e9 tokens/s it is recomputed in 16 ns, at 100 in 160 ms."""
    fingerprints = pair.blocks.chain(20)
    writer, reader = await pair.engine("a"), await pair.engine("b", prefill_tokens_per_s=prefill_tokens_per_s)
    await writer.store(fingerprints, pair.blocks.data(fingerprints))
    await pair.wait_known("a")
    into = pair.blocks.room(fingerprints)
    result = await reader.load(fingerprints, into=into, explain=True)
    assert result.count(LoadStatus.HIT_PEER) == served
    assert result.count(LoadStatus.SKIPPED) == 20 - served
    pair.blocks.check(fingerprints, into, result)
    counters = pair.agents["b"].reader.counters
    assert counters.blocks[LoadStatus.SKIPPED] == 20 - served
    (nominee,) = result.explanation["nominees"]
    if not served:
        assert (result.net_gain_us, nominee["verdict"]) == (0, "not asked: recomputing is faster")
        assert calls_at(pair, "a").get("Lock", 0) == 0
    elif prefill_tokens_per_s:
        assert 0 < result.net_gain_us < 20 * 160_000
        assert counters.saved_s == pytest.approx(20 * 0.16)
        assert counters.spent_s == pytest.approx(counters.saved_s - result.net_gain_us / 1e6, abs=1e-4)
        assert result.predicted_us > 0
    else:
        assert (result.net_gain_us, counters.saved_s, counters.spent_s) == (0, 0, 0)


async def test_namespace_file_says_the_prefill_rate_when_the_engine_does_not(directory: Path):
    async with local_cluster(directory, "a", coordinator=True) as cluster:
        file = directory / "with-rate.json"
        fields = json.loads(cluster.namespace.canonical())
        del fields["version"]
        file.write_text(json.dumps(fields | {"prefill_tokens_per_s": 1e9}))
        await cluster.start_agent("b", namespaces=(str(file),))
        fingerprints = cluster.blocks.chain(5)
        writer, reader = await cluster.engine("a"), await cluster.engine("b")
        await writer.store(fingerprints, cluster.blocks.data(fingerprints))
        await cluster.wait_known("a")
        result = await reader.load(fingerprints, into=cluster.blocks.room(fingerprints))
        assert result.count(LoadStatus.SKIPPED) == 5


async def test_metrics_tell_predictions_gain_and_queues_without_naming_peers(directory: Path):
    async with local_cluster(directory, "owner", "reader", transports=("tcp",), http_listen="127.0.0.1:0") as cluster:
        fingerprints = cluster.blocks.chain(20)
        writer, reader = await cluster.engine("owner"), await cluster.engine("reader", prefill_tokens_per_s=100.0)
        await writer.store(fingerprints, cluster.blocks.data(fingerprints))
        await cluster.wait_known("owner")
        await reader.load(fingerprints, into=cluster.blocks.room(fingerprints))
        url = f"http://{cluster.agents['reader'].ready.http}/metrics"
        text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}
    assert values["peer_agent_read_prediction_ratio_count", ("plane", "tcp")] == 1
    assert values["peer_agent_load_prediction_ratio_count",] == 1
    assert values["peer_agent_net_gain_seconds",] > 0
    assert values["peer_agent_saved_seconds_total",] == pytest.approx(3.2)
    assert values["peer_agent_load_blocks_total", ("status", "skipped")] == 0
    assert values["peer_agent_queued_reads", ("priority", "prefetch")] == 0
    assert values["peer_agent_flight_bytes",] == 0
    assert not any("owner" in sample.labels.values() for sample in samples)


async def test_peer_agent_explain_tells_who_served_what(directory: Path):
    async with local_cluster(directory, "owner", "reader") as cluster:
        wanted = cluster.blocks.chain(21)
        writer, reader = await cluster.engine("owner"), await cluster.engine("reader")
        for engine, held in ((writer, wanted.slice(0, 20)), (reader, wanted.slice(0, 10))):
            await engine.store(held, cluster.blocks.data(held))
        await cluster.wait_known("owner")
        (directory / "wanted.fps").write_bytes(wanted.packed)
        arguments = [
            "explain", str(directory / "test.json"), "--file", str(directory / "wanted.fps"),
            "--agent", cluster.agents["reader"].ready.engine, "--deadline-s", "10", "--prefill-tokens-per-s", "100",
        ]  # fmt: skip
        run = partial(asyncio.to_thread, CliRunner().invoke, agent_main)
        result = await run([*arguments, "--output", "json"])
        shown = await run(arguments)
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["statuses"] == ["hit_local"] * 10 + ["hit_peer"] * 10 + ["miss"]
    assert answer["blocks"] == {"miss": 1, "hit_local": 10, "hit_peer": 10}
    (nominee,) = answer["nominees"]
    assert (nominee["node"], nominee["verdict"], nominee["claims"], nominee["served"]) == ("owner", "answered", 10, 10)
    assert sum(count for read in answer["reads"] for _, count in read["runs"]) == 10
    assert answer["net_gain_us"] > 0
    assert shown.exit_code == 0
    assert "1 miss, 20 hit_local" in shown.stdout
