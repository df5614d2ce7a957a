"""What the block store does when one server is stopped, emptied, full, evicts, loses its functions, or is not ours."""

import itertools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvdir.errors import ConfigError
from kvdir.store import make_store
from kvdir.store.base import BlockStore, Position, StoreFull, StoreLost, StoreRefused, StoreUnavailable, Writer
from kvdir.store.library import Library
from kvdir.store.records import pack_numbers
from kvdir.store.redis import RedisBlockStore
from kvdir.store.slots import meta_tag, shard_tags
from kvdir.testing.certificates import shared_certificates
from kvdir.testing.check_directory_store import D, held, holder_of, remove, store, taken
from kvdir.testing.index_fixture import fingerprints
from kvdir.testing.redis_servers import NotInstalled, Server, free_ports, redis_server, valkey_program

pytestmark = pytest.mark.redis
_prefixes = itertools.count()
Opening = Callable[[str], Awaitable[BlockStore]]


@pytest.fixture(scope="module", params=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    try:
        program = valkey_program() if request.param == "valkey" else ""
    except NotInstalled as error:
        pytest.skip(str(error))
    with redis_server(program=program) as running:
        yield running


@pytest.fixture
async def opening() -> AsyncIterator[Opening]:
    """Opens the store at a URL, and closes it after the test."""
    stores = list[BlockStore]()

    async def open_one(url: str) -> BlockStore:
        stores.append(make_store(url))
        await stores[-1].open(deadline_s=D)
        return stores[-1]

    yield open_one
    for opened in stores:
        await opened.close()


@pytest.fixture
def url(server: Server) -> str:
    return f"{server.url}?prefix=fault{next(_prefixes)}"


async def test_a_write_that_arrives_after_a_later_one_changes_nothing(opening: Opening, url: str) -> None:
    over = await opening(url)
    writer = await taken(over)
    one = await holder_of(over, writer)
    late = Writer(writer.node, writer.epoch, writer.token)  # what a coordinator sent before, and the network kept
    for numbers in (range(500), range(500, 1000)):
        await over.write(writer, [store(one, numbers)], deadline_s=D)
    with pytest.raises(StoreUnavailable, match="overtaken"):
        await over.write(late, [remove(one, range(1000))], deadline_s=D)
    assert await held(over, range(1000)) == [(0, 1000, (one,))]


async def test_a_take_over_that_arrives_twice_forgets_no_writes(opening: Opening, server: Server, url: str) -> None:
    over = await opening(f"{url}&shards=1")
    assert isinstance(over, RedisBlockStore)
    writer = await taken(over)
    one = await holder_of(over, writer)
    late = Writer(writer.node, writer.epoch, writer.token)
    for numbers in (range(500), range(500, 1000)):
        await over.write(writer, [store(one, numbers)], deadline_s=D)
    record = shard_tags(over.url.prefix, 1)[0] + b":s"
    again = Library().call("fence", record, f"{over.store_id:016x}", writer.node, writer.token)
    assert server.command(*again) == str(writer.token).encode()
    with pytest.raises(StoreUnavailable, match="overtaken"):
        await over.write(late, [remove(one, range(1000))], deadline_s=D)
    await over.write(writer, [store(one, range(1000, 1100))], deadline_s=D)


async def test_a_change_of_the_roster_that_arrives_after_a_later_one_changes_nothing(opening: Opening, url: str) -> None:
    over = await opening(url)
    writer = await taken(over)
    late = Writer(writer.node, writer.epoch, writer.token)
    one = await holder_of(over, writer)
    await over.swap(writer, drop=[one], deadline_s=D)
    for call in (
        over.create(late, [(b"namespace", 1)], visible=True, deadline_s=D),
        over.save(Writer(writer.node, writer.epoch, writer.token), record=b"old", deadline_s=D),
    ):
        with pytest.raises(StoreUnavailable, match="overtaken"):
            await call
    assert (await over.roster(deadline_s=D)).holders == {}
    await over.save(writer, record=b"new", deadline_s=D)


async def test_acknowledged_changes_of_the_roster_that_were_lost_are_found_by_the_next_save(
    opening: Opening, server: Server, url: str
) -> None:
    over = await opening(url)
    assert isinstance(over, RedisBlockStore)
    writer = await taken(over)
    one = await holder_of(over, writer)
    await over.save(writer, position=Position(7, 1), record=b"", deadline_s=D)
    keys = [meta_tag(over.url.prefix) + name for name in (b":m", b":n", b":h", b":c")]
    before = [server.command("DUMP", key) for key in keys]
    two = await holder_of(over, writer)
    await over.swap(writer, drop=[one], deadline_s=D)
    for key, value in zip(keys, before, strict=True):
        server.command("RESTORE", key, 0, value, "REPLACE")  # what a replica that lagged would have
    assert (await over.roster(deadline_s=D)).holders.keys() == {one}, "the writer has dropped it, and has two"
    for call in (
        over.save(writer, record=b"", deadline_s=D),
        over.swap(writer, show=[two], deadline_s=D),
        over.create(writer, [(b"namespace", 1)], visible=True, deadline_s=D),
    ):
        with pytest.raises(StoreLost, match="acknowledged"):
            await call
    again = await over.take("node-a", 7, deadline_s=D)
    assert [holder.number for holder in again.holders] == [one]
    await over.save(again.writer, record=b"", deadline_s=D)


async def test_a_roster_that_was_evicted_is_found_and_begun_anew(opening: Opening, server: Server, url: str) -> None:
    over, other = await opening(url), await opening(url)
    assert isinstance(over, RedisBlockStore)
    writer = await taken(over)
    one = await holder_of(over, writer)
    await over.write(writer, [store(one, range(10))], deadline_s=D)
    await over.save(writer, position=Position(7, 1), record=b"", deadline_s=D)
    assert await held(other, range(10)) == [(0, 10, (one,))]
    server.command("DEL", meta_tag(over.url.prefix) + b":h")
    with pytest.raises(StoreLost):
        await over.save(writer, record=b"", deadline_s=D)
    again = await over.take("node-a", 7, deadline_s=D)
    assert (again.position, again.holders) == (None, ()), "nothing of it can be answered any more, so all is to be told again"
    assert await held(other, range(10)) == []
    two = await holder_of(over, again.writer)
    await over.write(again.writer, [store(two, range(5))], deadline_s=D)
    await over.save(again.writer, position=Position(7, 2), record=b"", deadline_s=D)
    assert await held(other, range(10)) == [(0, 5, (two,))]


async def test_evictions_do_not_add_up_to_ever_more_buckets(opening: Opening, server: Server, url: str) -> None:
    over = await opening(f"{url}&shards=1")
    assert isinstance(over, RedisBlockStore)
    writer = await taken(over)
    one = await holder_of(over, writer)
    tag = shard_tags(over.url.prefix, 1)[0]
    for _ in range(8):
        await over.write(writer, [store(one, range(3000))], deadline_s=D)
        buckets = [key for key in server.command("KEYS", tag + b"*") if not key.endswith(b":s")]
        server.command("DEL", *buckets)
    assert int(server.command("HGET", tag + b":s", "k")) < 2 * 3000 / 48
    assert (await over.counts([one], deadline_s=D)).lost_buckets > 400


async def test_a_stopped_server_ends_calls_in_time_and_its_late_writes_change_nothing(
    opening: Opening, server: Server, url: str
) -> None:
    over = await opening(url)
    writer = await taken(over)
    one = await holder_of(over, writer)
    await over.write(writer, [store(one, range(300))], deadline_s=D)
    server.pause()
    try:
        for call in (
            over.write(writer, [remove(one, range(300))], deadline_s=0.2),
            over.lookup(fingerprints(range(9)), 16, scope=1, deadline_s=0.1),
            over.nodes(deadline_s=0.1),
        ):
            begun = time.monotonic()
            with pytest.raises(StoreUnavailable, match="not in time"):
                await call
            assert time.monotonic() - begun < 2
    finally:
        server.resume()
    await over.write(writer, [store(one, range(300))], deadline_s=D)
    assert await held(over, range(300)) == [(0, 300, (one,))]
    assert (await over.counts([one], deadline_s=D)).blocks == {one: 300}


async def test_acknowledged_writes_that_a_shard_lost_are_found_by_the_next_write(
    opening: Opening, server: Server, url: str
) -> None:
    over = await opening(f"{url}&shards=1")
    assert isinstance(over, RedisBlockStore)
    writer = await taken(over)
    one = await holder_of(over, writer)
    await over.write(writer, [store(one, range(10))], deadline_s=D)
    (tag,) = shard_tags(over.url.prefix, 1)
    before = server.command("DUMP", tag + b":s")
    await over.write(writer, [store(one, range(10, 20))], deadline_s=D)
    await over.write(writer, [], deadline_s=D)
    server.command("RESTORE", tag + b":s", 0, before, "REPLACE")  # what a replica that lagged would have
    with pytest.raises(StoreLost, match="acknowledged"):
        await over.write(writer, [], deadline_s=D)
    with pytest.raises(StoreLost, match="acknowledged"):
        await over.write(writer, [store(one, [30])], deadline_s=D)
    assert (await over.counts([one], deadline_s=D)).blocks == {one: 10}, "20 were acknowledged"
    again = await taken(over)
    await over.write(again, [store(one, range(30, 40))], deadline_s=D)


async def test_a_flushed_store_says_so_and_is_made_anew(opening: Opening) -> None:
    with redis_server() as server:
        over, other = await opening(server.url), await opening(server.url)
        writer = await taken(over)
        one = await holder_of(over, writer)
        await over.write(writer, [store(one, range(10))], deadline_s=D)
        was = over.store_id
        server.command("FLUSHALL")
        for call in (
            held(over, range(10)),
            over.write(writer, [store(one, range(10))], deadline_s=D),
            over.save(writer, record=b"", deadline_s=D),
            over.take("node-a", 7, deadline_s=D),
            over.sweep(10, deadline_s=D),
        ):
            with pytest.raises(StoreLost):
                await call
        await over.open(deadline_s=D)
        assert over.store_id != was
        with pytest.raises(StoreLost):
            await held(other, range(10))
        await other.open(deadline_s=D)
        assert other.store_id == over.store_id
        again = await taken(over)
        two = await holder_of(over, again)
        await over.write(again, [store(two, range(5))], deadline_s=D)
        assert await held(other, range(10)) == [(0, 5, (two,))]


async def test_a_shard_of_a_store_that_is_gone_is_emptied_when_a_new_one_takes_it(
    opening: Opening, server: Server, url: str
) -> None:
    over = await opening(f"{url}&shards=1")
    assert isinstance(over, RedisBlockStore)
    writer = await taken(over)
    await over.write(writer, [store(await holder_of(over, writer), range(2000))], deadline_s=D)
    tag = shard_tags(over.url.prefix, 1)[0].decode()
    assert len(server.command("KEYS", tag + "*")) > 20
    server.command("DEL", meta_tag(over.url.prefix) + b":m")
    await over.open(deadline_s=D)
    writer = await taken(over)
    assert len(server.command("KEYS", tag + "*")) == 2, "a record and one bucket"
    assert await held(over, range(10)) == []


async def test_a_server_that_restarts_empty_is_lost_and_not_wrong(opening: Opening) -> None:
    with redis_server() as server:
        over = await opening(server.url)
        writer = await taken(over)
        one = await holder_of(over, writer)
        await over.write(writer, [store(one, range(10))], deadline_s=D)
        server.kill()
        with pytest.raises(StoreUnavailable, match=r"cannot connect|connection lost"):
            await over.roster(deadline_s=0.3)
        server.start()
        with pytest.raises(StoreLost):
            await held(over, range(10))


async def test_fences_of_forgotten_nodes_are_swept(opening: Opening, server: Server, url: str) -> None:
    over = await opening(f"{url}&shards=1")
    assert isinstance(over, RedisBlockStore)
    await taken(over, "node-a")
    gone = await taken(over, "node-b")
    assert await over.forget("node-b", gone.token, deadline_s=D)
    assert await over.sweep(100, deadline_s=D) == 0
    record = shard_tags(over.url.prefix, 1)[0] + b":s"
    assert [field for field in server.command("HKEYS", record) if field.startswith(b"f")] == [b"fnode-a"]


async def test_a_sweep_in_turns_leaves_nothing_of_a_holder_that_one_of_them_did_not_know_to_be_dead(
    opening: Opening, server: Server, url: str
) -> None:
    over = await opening(f"{url}&shards=1")
    assert isinstance(over, RedisBlockStore)
    writer = await taken(over)
    one, two = await holder_of(over, writer), await holder_of(over, writer)
    await over.write(writer, [store(one, range(2000)), store(two, range(1000, 3000))], deadline_s=D)
    await over.swap(writer, drop=[one, two], deadline_s=D)
    record = shard_tags(over.url.prefix, 1)[0] + b":s"
    for dead, buckets in ((pack_numbers([one, two]), 5), (pack_numbers([one]), 5), (pack_numbers([one, two]), 1000)):
        server.command(*Library().call("sweep", record, f"{over.store_id:016x}", dead, buckets))
    while await over.sweep(1000, deadline_s=D):
        pass
    assert server.command("HGET", record, "b") == b"0"
    assert (await over.counts([one, two], deadline_s=D)).blocks == {one: 0, two: 0}


async def test_functions_that_were_deleted_are_loaded_again(opening: Opening, server: Server, url: str) -> None:
    over = await opening(url)
    writer = await taken(over)
    one = await holder_of(over, writer)
    server.command("FUNCTION", "FLUSH", "SYNC")
    await over.write(writer, [store(one, range(10))], deadline_s=D)
    server.command("FUNCTION", "FLUSH", "SYNC")
    assert await held(over, range(10)) == [(0, 10, (one,))]
    assert over.figures.retries["no-functions"] >= 2


async def test_a_full_store_refuses_writes_answers_lookups_and_takes_removals(opening: Opening) -> None:
    with redis_server("--maxmemory", "5mb") as server:
        over = await opening(server.url)
        writer = await taken(over)
        one, two = await holder_of(over, writer), await holder_of(over, writer)
        await over.write(writer, [store(two, range(1000))], deadline_s=D)
        full = await _fill(over, writer, one)
        health = await over.health(deadline_s=D)
        assert (health.evicts, health.evicted, health.max_bytes) == (False, 0, 5 * 2**20)
        assert await held(over, range(900, 1000)) == [(0, 100, tuple(sorted((one, two))))]
        await over.save(writer, record=b"known although full", deadline_s=D)
        assert await over.write(writer, [remove(two, range(10))], deadline_s=D) == (10,)
        counted = (await over.counts([one], deadline_s=D)).blocks[one]
        assert full <= counted < full + 8000
        await over.swap(writer, drop=[one], deadline_s=D)
        freed = 0
        while step := await over.sweep(10_000, deadline_s=D):
            freed += step
        assert freed == counted
        await over.write(writer, [store(two, range(1000, 2000))], deadline_s=D)


async def _fill(over: BlockStore, writer: Writer, holder: int) -> int:
    """Writes blocks 0, 1, ... until the store is full; returns how many it has taken for certain."""
    for start in range(0, 2_000_000, 8000):
        try:
            await over.write(writer, [store(holder, range(start, start + 8000))], deadline_s=D)
        except StoreFull:
            return start
    raise AssertionError("it never was full")


async def test_eviction_loses_blocks_but_says_so_and_answers_nothing_wrong(opening: Opening) -> None:
    with redis_server("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-random") as server:
        over = await opening(server.url)
        writer = await taken(over)
        one = await holder_of(over, writer)
        assert (await over.health(deadline_s=D)).evicts
        lost, wrote = False, 0
        try:
            for start in range(0, 400_000, 8000):
                await over.write(writer, [store(one, range(start, start + 8000))], deadline_s=D)
                wrote = start + 8000
            question = fingerprints([*range(0, wrote, 7), *range(10**7, 10**7 + 1000)])
            found = await over.lookup(question, 16, scope=1, deadline_s=D)
            assert found.hits <= len(range(0, wrote, 7))
            lost = found.lost_buckets > 0 and (await over.counts([one], deadline_s=D)).lost_buckets > 0
        except StoreLost:
            lost = True  # the record of a shard or of the store was among what went
        assert lost
        assert (await over.health(deadline_s=D)).evicted > 0


async def test_wrong_credentials_are_refused_and_shown_nowhere(opening: Opening) -> None:
    with redis_server(password="right") as server:
        over = await opening(server.url)
        assert "right" not in repr(over.url) + str(over.url)  # type: ignore[attr-defined]
        for wrong in (f"redis://:s3cret@127.0.0.1:{server.port}", f"redis://me:s3cret@127.0.0.1:{server.port}"):
            with pytest.raises(StoreRefused, match=r"check user, password") as refused:
                await opening(wrong)
            assert "s3cret" not in str(refused.value)
        with pytest.raises(StoreRefused, match="check user, password"):
            await opening(f"redis://127.0.0.1:{server.port}")
        server.command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@read", "+info")
        with pytest.raises(StoreRefused, match="ACL"):
            await opening(f"redis://reader:pw@127.0.0.1:{server.port}")


async def test_another_schema_version_is_refused_with_words(opening: Opening, server: Server, url: str) -> None:
    prefix = url.rpartition("=")[2]
    key = meta_tag(prefix) + b":m"
    server.command("HSET", key, "schema", 99, "id", "1")
    with pytest.raises(StoreRefused, match=rf"{key.decode()} holds schema version 99.*speaks version 1.*another prefix"):
        await opening(url)
    server.command("DEL", key)
    server.command("HSET", key, "something", "else")
    with pytest.raises(StoreRefused, match="not ours"):
        await opening(url)
    server.command("DEL", key)
    server.command("SET", key, "a string")
    with pytest.raises(StoreRefused, match=r"another application.*prefix"):
        await opening(url)


async def test_a_read_only_replica_is_refused_and_its_master_named(opening: Opening, server: Server) -> None:
    named = pytest.raises(StoreRefused, match=rf"replica of 127\.0\.0\.1:{server.port}")
    with redis_server("--replicaof", f"127.0.0.1 {server.port}") as replica, named:
        await opening(replica.url)


async def test_a_server_that_is_no_cluster_is_refused(opening: Opening, server: Server) -> None:
    with pytest.raises(StoreRefused, match=r"use redis://"):
        await opening(f"redis+cluster://127.0.0.1:{server.port}")


async def test_nobody_there_is_unavailable_within_the_deadline() -> None:
    over = make_store("redis://127.0.0.1:1")
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"cannot connect"):
        await over.open(deadline_s=0.5)
    assert time.monotonic() - begun < 2
    await over.close()


def test_a_url_lists_every_fault_and_no_secret() -> None:
    with pytest.raises(ConfigError) as refused:
        make_store("redis://u:s3cret@a,b:x/9?shards=0.5&what=1&prefix={}")
    assert len(refused.value.faults) >= 4
    assert "s3cret" not in str(refused.value)


async def test_tls_is_verified_both_ways(opening: Opening) -> None:
    files, strangers = shared_certificates().files("here"), shared_certificates().files("here", ca="foreign-ca")
    (port,) = free_ports(1)
    tls = (
        "--tls-port",
        str(port),
        "--tls-cert-file",
        files.certificate,
        "--tls-key-file",
        files.key,
        "--tls-ca-cert-file",
        files.ca,
    )
    with redis_server(*tls):
        address = f"rediss://127.0.0.1:{port}"
        over = await opening(f"{address}?ca={files.ca}&cert={files.certificate}&key={files.key}")
        writer = await taken(over)
        one = await holder_of(over, writer)
        await over.write(writer, [store(one, range(10))], deadline_s=D)
        assert await held(over, range(10)) == [(0, 10, (one,))]
        for wrong in ("", f"?ca={strangers.ca}&cert={files.certificate}&key={files.key}"):
            with pytest.raises(StoreRefused, match=r"certificate is not trusted.*check ca"):
                await opening(address + wrong)
        without = make_store(f"{address}?ca={files.ca}")
        with pytest.raises(StoreUnavailable, match=r"(?i)ssl|reset|closed"):
            await without.open(deadline_s=0.5)
        await without.close()
    with pytest.raises(ConfigError, match="TLS files cannot be used"):
        make_store("rediss://a?ca=/nowhere/ca.pem")


async def test_the_rights_that_the_documentation_names_are_enough(opening: Opening) -> None:
    page = (Path(__file__).parents[2] / "docs/redis.md").read_text()
    (rights,) = re.findall(r"The user needs\s+`([^`]+)` on\s+`~\{kvdir-\*`", page)
    with redis_server() as server:
        server.command("ACL", "SETUSER", "kvdir", "on", ">pw", "~{kvdir-*", *rights.split())
        over = await opening(f"redis://kvdir:pw@127.0.0.1:{server.port}")
        writer = await taken(over)
        one, two = await holder_of(over, writer), await holder_of(over, writer)
        await over.write(writer, [store(one, range(1000)), store(two, range(10))], deadline_s=D)
        await over.save(writer, record=b"r", deadline_s=D)
        await over.swap(writer, drop=[one], deadline_s=D)
        assert await over.sweep(1000, deadline_s=D) > 0
        assert await held(over, range(20)) == [(0, 10, (two,))]
        assert await over.nodes(deadline_s=D)
        assert await over.health(deadline_s=D)
