"""Fail-over, lost writes, slots that move or are missing: a real cluster and real Sentinels, under writes and lookups."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kvdir.store import make_store
from kvdir.store.base import BlockStore, StoreLost, StoreRefused, StoreUnavailable, Writer
from kvdir.store.redis import RedisBlockStore
from kvdir.store.slots import key_slot, shard_tags
from kvdir.testing.check_directory_store import D, held, holder_of, store, taken
from kvdir.testing.index_fixture import fingerprints
from kvdir.testing.redis_servers import ClusterOfServers, Server, redis_cluster, redis_sentinel, until

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]
FAILOVER_S = 30.0


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[BlockStore]:
    over = make_store(url)
    try:
        await over.open(deadline_s=D)
        yield over
    finally:
        await over.close()


class Load:
    """Writes blocks 0, 1, ... in order, and looks up what it wrote, until told to stop. lost: a write found that some are gone.

    progress: set after every step.
    """

    def __init__(self, over: BlockStore, writer: Writer, holder: int) -> None:
        self.over, self.writer, self.holder = over, writer, holder
        self.written = self.answered = self.unavailable = 0
        self.lost = self.stop = False
        self.progress = asyncio.Event()

    async def write(self) -> None:
        while not self.stop:
            batch = store(self.holder, range(self.written, self.written + 200))
            try:
                await self.over.write(self.writer, [batch], deadline_s=FAILOVER_S)
            except StoreLost:
                self.lost = True
                return
            finally:
                self.progress.set()
            self.written += 200

    async def look(self) -> None:
        while not self.stop:
            question = fingerprints(range(max(0, self.written - 50), self.written + 500))
            try:
                found = await self.over.lookup(question, 16, scope=1, deadline_s=0.5)
            except StoreUnavailable:
                self.unavailable += 1
            else:
                self.answered += 1
                assert set(found.sets) <= {self.holder.to_bytes(4, "little")}
            self.progress.set()


async def test_a_cluster_goes_on_when_a_master_is_killed_under_load() -> None:
    with redis_cluster() as cluster:
        async with opened(cluster.url) as over:
            writer = await taken(over)
            load = Load(over, writer, await holder_of(over, writer))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(load.write())
                tasks.create_task(load.look())
                await _more(load, 5)
                victim = cluster.masters[1]
                victim.kill()
                await asyncio.to_thread(until, lambda: _is_master(cluster.replica_of(victim)), "a replica takes over")
                await _more(load, 20)
                load.stop = True
            assert load.unavailable > 0, "there was a time without that master"
            counted = (await over.counts([load.holder], deadline_s=D)).blocks[load.holder]
            if load.lost:  # the replica lacked acknowledged writes: the writer was told, the owner restates
                assert counted < load.written + 200
                again = await taken(over)
                await over.write(again, [store(load.holder, range(load.written))], deadline_s=D)
                counted = (await over.counts([load.holder], deadline_s=D)).blocks[load.holder]
            assert counted >= load.written
            assert await held(over, range(load.written)) == [(0, load.written, (load.holder,))]


def _is_master(server: Server) -> bool:
    return server.info("role") == "master"


async def _more(load: Load, answers: int) -> None:
    """Until the load has had so many more answers and written more."""
    answered, written = load.answered + answers, load.written
    async with asyncio.timeout(FAILOVER_S):
        while load.answered < answered or (load.written == written and not load.lost):
            load.progress.clear()
            await load.progress.wait()


async def test_writes_that_a_fail_over_lost_are_found_by_the_next_write() -> None:
    with redis_sentinel() as group:
        master, replica = group.master, group.replica
        master.command("ACL", "SETUSER", "copier", "on", ">copy", "~*", "&*", "+@all")
        for name, value in (("masteruser", "copier"), ("masterauth", "copy")):
            replica.command("CONFIG", "SET", name, value)
        async with opened(group.url) as over, opened(group.url) as other:
            writer = await taken(over)
            one = await holder_of(over, writer)
            await over.write(writer, [store(one, range(1000))], deadline_s=D)
            await asyncio.to_thread(until, lambda: master.command("WAIT", 1, 1000) == 1, "the replica has it all")
            master.command("ACL", "SETUSER", "copier", "off")  # from here on the replica gets nothing
            master.command("CLIENT", "KILL", "TYPE", "replica")
            await over.write(writer, [store(one, range(1000, 2000))], deadline_s=D)
            assert (await over.counts([one], deadline_s=D)).blocks == {one: 2000}
            master.kill()
            await asyncio.to_thread(until, lambda: _is_master(replica), "the replica takes over")
            assert await _held_later(other, range(2000)) == [(0, 1000, (one,))]
            assert (await over.counts([one], deadline_s=FAILOVER_S)).blocks == {one: 1000}, "counts reveal the loss"
            with pytest.raises(StoreLost, match="acknowledged"):
                await over.write(writer, [store(one, [5000])], deadline_s=FAILOVER_S)
            again = await over.take("node-a", 7, deadline_s=D)
            await over.write(again.writer, [store(one, range(2000))], deadline_s=D)
            assert await held(other, range(2000)) == [(0, 2000, (one,))]


async def test_a_master_that_stops_without_a_word_is_left_for_the_one_that_sentinels_name() -> None:
    with redis_sentinel() as group:
        async with opened(group.url) as over:
            writer = await taken(over)
            one = await holder_of(over, writer)
            await over.write(writer, [store(one, range(300))], deadline_s=D)
            await asyncio.to_thread(until, lambda: group.master.command("WAIT", 1, 1000) == 1, "the replica has it all")
            group.master.pause()
            try:
                clock, slowest, found = asyncio.get_running_loop().time, 0.0, 0
                async with asyncio.timeout(FAILOVER_S):
                    while not found:
                        begun = clock()
                        with contextlib.suppress(StoreUnavailable):
                            found = (await over.lookup(fingerprints(range(300)), 16, scope=1, deadline_s=0.1)).hits
                        slowest = max(slowest, clock() - begun)
                assert found == 300
                assert slowest < 1, "no lookup took much longer than its deadline"
                await over.write(writer, [store(one, range(300, 400))], deadline_s=FAILOVER_S)
            finally:
                group.master.resume()
            assert await held(over, range(400)) == [(0, 400, (one,))]


async def _held_later(over: BlockStore, numbers: range) -> object:
    async with asyncio.timeout(FAILOVER_S):
        while True:
            try:
                return await held(over, numbers)
            except StoreUnavailable:
                continue


async def test_missing_slots_are_named() -> None:
    with redis_cluster() as cluster:
        async with opened(cluster.url) as over:
            for server in cluster.servers:
                server.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
            for server in cluster.servers:
                with contextlib.suppress(Exception):
                    server.command("CLUSTER", "DELSLOTSRANGE", 16000, 16383)
            await asyncio.to_thread(until, lambda: _serves(cluster.masters[0], 15999), "the slots are gone")
            late = make_store(cluster.url)
            with pytest.raises(StoreRefused, match=r"slots 16000-16383 are served by no master.*--cluster"):
                await late.open(deadline_s=D)
            await late.close()
            with pytest.raises(StoreUnavailable, match=r"16000-16383|clusterdown"):
                await over.counts([1], deadline_s=1)


def _serves(server: Server, last: int) -> bool:
    return max(slots[1] for slots in server.command("CLUSTER", "SLOTS")) == last


async def test_a_slot_that_moves_under_load_loses_nothing() -> None:
    """As redis-cli --cluster reshard does it: import, migrate, keys one by one, then everybody learns the new master."""
    with redis_cluster() as cluster:
        async with opened(f"{cluster.url}?shards=4") as over:
            assert isinstance(over, RedisBlockStore)
            writer = await taken(over)
            load = Load(over, writer, await holder_of(over, writer))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(load.write())
                tasks.create_task(load.look())
                await _more(load, 20)
                slot = key_slot(shard_tags(over.url.prefix, 4)[0])
                await asyncio.to_thread(_move, cluster, slot)
                await _more(load, 20)
                load.stop = True
            assert not load.lost
            assert (await over.counts([load.holder], deadline_s=D)).blocks == {load.holder: load.written}
            assert await held(over, range(load.written)) == [(0, load.written, (load.holder,))]
            assert over.figures.retries["migrating"] > 0


def _move(cluster: ClusterOfServers, slot: int) -> None:
    source = next(server for server in cluster.masters if _has(server, slot))
    target = next(server for server in cluster.masters if server is not source)
    names = {server: server.command("CLUSTER", "MYID") for server in (source, target)}
    target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
    source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
    while keys := source.command("CLUSTER", "GETKEYSINSLOT", slot, 1):
        source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
    for server in (target, source, *cluster.masters):
        server.command("CLUSTER", "SETSLOT", slot, "NODE", names[target])


def _has(server: Server, slot: int) -> bool:
    mine = server.port
    return any(first <= slot <= last and master[1] == mine for first, last, master, *_ in server.command("CLUSTER", "SLOTS"))
