"""The pure parts of the block store in Redis, and one connection against a server that we script."""

import asyncio
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdir.errors import ConfigError, KvdirError
from kvdir.index.reference import ReferenceIndex
from kvdir.store import make_store
from kvdir.store.base import (
    Change,
    ChangeKind,
    Fenced,
    HolderRecord,
    Roster,
    StoreFull,
    StoreLost,
    StoreRefused,
    StoreUnavailable,
)
from kvdir.store.connection import Connection
from kvdir.store.layout import TAIL_BYTES, Picture, Visible, probes_of, split
from kvdir.store.library import Library
from kvdir.store.records import ServerInfo, changed_roster, number_bytes, pack_numbers
from kvdir.store.reply import ConnectionLost, ReplyError
from kvdir.store.rounds import ROUND_BLOCKS, Op, ops_of, rounds
from kvdir.store.slots import SLOTS, key_slot, shard_tags
from kvdir.store.topology import Address, Cluster, Sentinels
from kvdir.store.url import Credentials, Kind, StoreUrl
from kvdir.store.verdict import Again, judge
from kvdir.testing.index_fixture import fingerprints

# -- layout ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3, 64, 1024])
def test_shards_are_spread_evenly_over_the_slots(shards: int) -> None:
    tags = shard_tags("kvdir", shards)
    assert len(set(tags)) == shards
    assert [key_slot(tag + b":s") * shards // SLOTS for tag in tags] == list(range(shards))
    assert tags == shard_tags("kvdir", shards), "names depend on nothing else"


def test_split_keeps_the_order_inside_a_shard() -> None:
    keys = np.random.default_rng(1).integers(0, 2**64, 1000, dtype=np.uint64)
    seen: list[int] = []
    for part in split(keys.tobytes(), 7):
        assert list(part.positions) == sorted(part.positions)
        assert set((keys[part.positions].astype(object) >> 32) * 7 >> 32) == {part.shard}
        assert part.tails == b"".join(int(key).to_bytes(8, "little")[:TAIL_BYTES] for key in keys[part.positions])
        seen += part.positions.tolist()
    assert sorted(seen) == list(range(1000))
    assert list(split(b"", 7)) == []


def _records(visible: set[int], hidden: set[int]) -> dict[int, HolderRecord]:
    return {n: HolderRecord(n, "node", 1, b"n", 2, n in visible) for n in visible | hidden}


def test_only_listed_and_visible_holders_are_translated() -> None:
    visible = Visible(_records({1, 5, 70000}, {2}))
    assert visible(pack_numbers([70000, 2, 9, 1])) == pack_numbers([1, 70000])
    assert visible(pack_numbers([2, 9])) == b""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 250), st.integers(1, 250)), max_size=8), st.integers(0, 260))
def test_a_prefix_by_probes_ends_where_it_does_and_claims_nothing_untrue_when_holders_have_no_holes(
    stretches: list[tuple[int, int, int]], asked: int
) -> None:
    oracle = ReferenceIndex(seed=1)
    for holder in range(4):  # one stretch a holder: chained fingerprints have no holes
        for mine, start, count in stretches:
            if mine == holder:
                oracle.store(fingerprints(range(start, start + count)), 16, scope=0, holder=holder + 1, now_s=1)
                break
    truth = oracle.lookup(fingerprints(range(asked)), 16, scope=0, prefix=True)
    visible = Visible(_records({1, 2, 3, 4}, set()))

    def look(picture: Picture, at: "np.ndarray[tuple[int], np.dtype[np.intp]]") -> None:
        keys = oracle.keys(fingerprints(range(asked)), 16, scope=0)
        for part in split(keys, 5, at):
            found = oracle.lookup(b"".join(fingerprints([n]) for n in part.positions.tolist()), 16, scope=0)
            ids = bytearray(2 * len(part.positions))
            for start, count, number in struct.iter_unpack("<III", found.runs):
                ids[2 * start : 2 * (start + count)] = struct.pack("<H", number + 1) * count
            picture.add(part, bytes(ids), found.sets, visible)

    picture = Picture(asked)
    probes = probes_of(asked)
    look(picture, probes)
    look(picture, picture.open_strides(probes))
    runs, sets, hits = picture.answer(prefix=True)
    assert hits == truth.hits
    claimed, true = _by_position(runs, sets), _by_position(truth.runs, truth.sets)
    assert claimed.keys() == true.keys()
    assert all(claimed[at] <= true[at] for at in true), "somebody who has only what lies between two probes may go unseen"
    assert all(claimed[at] == true[at] for at in true if at in probes)


def _by_position(runs: bytes, sets: list[bytes]) -> dict[int, set[int]]:
    holders = [set(struct.unpack(f"<{len(packed) // 4}I", packed)) for packed in sets]
    return {at: holders[n] for start, count, n in struct.iter_unpack("<III", runs) for at in range(start, start + count)}


def test_rounds_are_bounded_and_keep_the_order_of_a_shard() -> None:
    big = Change(ChangeKind.STORE, 1, 0, b"", 16)
    queues = {
        0: ops_of(0, big, b"a" * TAIL_BYTES * (2 * ROUND_BLOCKS + 5)) + ops_of(1, big, b"b" * TAIL_BYTES),
        3: ops_of(2, big, b"c" * TAIL_BYTES * 3),
    }
    done: dict[int, list[Op]] = {0: [], 3: []}
    for each in rounds(queues):
        for shard, ops in each.items():
            assert sum(len(op.tails) for op in ops) <= ROUND_BLOCKS * TAIL_BYTES
            done[shard] += ops
    assert done == queues


# -- replies -----------------------------------------------------------------------------------------------------------------


def _version(text: str) -> tuple[str, bool]:
    info = ServerInfo.parse(text.encode())
    return info.version, info.has_functions


def test_servers_are_told_apart_by_info() -> None:
    assert _version("redis_version:6.2.14\r\nrole:master\r\n") == ("Redis 6.2.14", False)
    assert _version("redis_version:7.0.15\r\n") == ("Redis 7.0.15", True)
    assert _version("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:8.1.1\r\n") == ("Valkey 8.1.1", True)
    assert _version("") == ("Redis ?", False)
    for policy, evicts in (("noeviction", False), ("volatile-lru", False), ("allkeys-lfu", True)):
        assert ServerInfo.parse(f"maxmemory:5\r\nmaxmemory_policy:{policy}\r\n".encode()).evicts is evicts
    assert not ServerInfo.parse(b"maxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n").evicts


def test_a_roster_takes_changes_or_the_whole() -> None:
    record = b"1\x02" + struct.pack("<Q", 2**63 + 1) + b"\x03abcnode"
    whole = changed_roster(Roster(3, _records({9}, set())), [b"10", 1, number_bytes(7), record])
    assert whole == Roster(10, {7: HolderRecord(7, "node", 2**63 + 1, b"abc", 2, True)})
    part = changed_roster(whole, [b"11", 0, number_bytes(7), b"", number_bytes(8), b"0" + record[1:]])
    assert part == Roster(11, {8: HolderRecord(8, "node", 2**63 + 1, b"abc", 2, False)})


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("MOVED 7 10.0.0.1:6379", Again("moved", elsewhere=True)),
        ("ASK 7 10.0.0.1:6379", Again("migrating")),
        ("TRYAGAIN Multiple keys", Again("tryagain")),
        ("CLUSTERDOWN The cluster is down", Again("clusterdown", elsewhere=True)),
        ("LOADING Redis is loading", Again("loading")),
        ("READONLY You can't write", Again("readonly", elsewhere=True)),
        ("ERR Function not found", Again("no-functions", load=True)),
        ("ERR max number of clients reached", Again("clients", words="max number of clients reached")),
        ("ERR Script attempted to access a non local key in a cluster node script: x", Again("migrating")),
        ("KVLOST the shard is gone", StoreLost),
        ("KVFENCED a newer writer", Fenced),
        ("KVLATE a later write was done", StoreUnavailable),
        ("OOM command not allowed", StoreFull),
        ("WRONGTYPE Operation", StoreRefused),
        ("WRONGPASS invalid", StoreRefused),
        ("NOAUTH Authentication required.", StoreRefused),
        ("NOPERM this user", StoreRefused),
        ("ERR The user executing the script can't run this command", StoreRefused),
        ("ERR unknown command 'FCALL', with args beginning with", StoreRefused),
        ("ERR something that nobody expects", StoreRefused),
    ],
)
def test_error_replies_are_judged(text: str, meaning: Again | type[KvdirError]) -> None:
    verdict = judge(ReplyError(text), "host:1")
    if isinstance(meaning, Again):
        assert verdict == meaning
    else:
        assert type(verdict) is meaning
        assert "host:1" in str(verdict)


def test_the_library_is_named_after_schema_and_text() -> None:
    library = Library()
    assert library.name.startswith("kvdir_1_")
    assert library.code.startswith(f"#!lua name={library.name}\n")
    assert "LIBRARY" not in library.code
    assert library.call("write", b"k", 1)[:3] == ("FCALL", f"{library.name}_write", 1)


# -- where the store is ------------------------------------------------------------------------------------------------------


def test_urls_are_taken_apart() -> None:
    one = StoreUrl.parse("redis://me:p%40ss@[::1]:7000/3?prefix=x&shards=8&connect_timeout_s=0.5")
    assert (one.kind, one.addresses, one.db, one.prefix, one.shards) == (Kind.SINGLE, (("::1", 7000),), 3, "x", 8)
    assert (one.credentials, one.connect_timeout_s, one.tls) == (Credentials("me", "p@ss"), 0.5, None)
    assert str(one) == "redis://[::1]:7000/3"
    cluster = StoreUrl.parse("rediss+cluster://:pw@a,b:7001")
    assert (cluster.kind, cluster.addresses, cluster.credentials) == (
        Kind.CLUSTER,
        (("a", 6379), ("b", 7001)),
        Credentials("", "pw"),
    )
    assert cluster.tls is not None
    group = StoreUrl.parse("redis+sentinel://a,b:1/main?db=2&sentinel_password=q")
    assert (group.kind, group.addresses, group.service, group.db) == (Kind.SENTINEL, (("a", 26379), ("b", 1)), "main", 2)
    assert group.sentinel_credentials.password == "q"
    assert all(secret not in repr(url) + str(url) for url, secret in ((one, "p@ss"), (cluster, "pw"), (group, "password='q")))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memcached://a", "scheme"),
        ("redis://", "no host"),
        ("redis://a,b", "several hosts"),
        ("redis://a:0", "not host:port"),
        ("redis://a/x", "db is a whole number"),
        ("redis://a?shards=0.5", "shards is a whole number"),
        ("redis+cluster://a/1", "one database"),
        ("redis+sentinel://a", "name of the master"),
        ("redis://a?shards=99999", "shards"),
        ("redis://a?prefix={x}", "prefix"),
        ("redis://a?ca=x", "rediss://"),
        ("redis://a?passwort=x", "no option 'passwort'"),
        ("rediss://a?ca=/nowhere/ca.pem", ""),
    ],
)
def test_faulty_urls_are_refused_with_words(url: str, words: str) -> None:
    if words:
        with pytest.raises(ConfigError, match=words):
            StoreUrl.parse(url)
    else:
        assert StoreUrl.parse(url).tls is not None


@pytest.mark.parametrize("password", ["s3/cret", "s3?cret", "s3/cr?et", "s3@c/ret", "s3@c?ret", "s3@cr/e@t"])
def test_a_password_that_is_not_encoded_is_refused_and_not_shown(password: str) -> None:
    with pytest.raises(ConfigError, match="percent-encoded") as refused:
        StoreUrl.parse(f"redis://me:{password}@host:6379/1?prefix=x")
    assert not any(piece in str(refused.value) for piece in ("s3", "cr", "et"))


async def test_a_cluster_is_learned_from_whoever_answers_and_its_gaps_are_named() -> None:
    slots = [[0, 5460, [b"10.0.0.1", 7000, b"id"], [b"10.0.0.9", 7009, b"id"]], [5461, 16000, [b"", 7001, b"id"]]]

    async def ask(address: Address, command: tuple[object, ...]) -> object:
        if address[0] == "dead":
            raise StoreUnavailable("dead")
        return slots

    cluster = Cluster((("dead", 1), ("seed", 2)))
    with pytest.raises(StoreUnavailable, match="0-16383"):
        cluster.address(0)
    await cluster.learn(ask)
    assert cluster.masters() == (("10.0.0.1", 7000), ("seed", 7001))
    assert (cluster.address(5460), cluster.address(5461)) == (("10.0.0.1", 7000), ("seed", 7001))
    assert "16001-16383" in cluster.gaps()


async def test_sentinels_are_asked_until_one_names_a_master() -> None:
    answers: dict[str, object] = {"a": None, "b": [b"10.0.0.1", b"6379"]}

    async def ask(address: Address, command: tuple[object, ...]) -> object:
        return answers[address[0]]

    group = Sentinels((("a", 1), ("b", 2)), "main")
    await group.learn(ask)
    assert group.address(7) == ("10.0.0.1", 6379)
    answers["b"] = None
    with pytest.raises(StoreUnavailable, match="knows no master named 'main'"):
        await group.learn(ask)
    assert group.address(7) == ("10.0.0.1", 6379), "what was known stays"


# -- a connection ------------------------------------------------------------------------------------------------------------

Answer = Callable[[list[bytes]], bytes | None]


@asynccontextmanager
async def _scripted(answer: Answer) -> AsyncIterator[Address]:
    """A server that answers each command with `answer(command)`, or closes when that is None; after STOP it reads no more."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readline():
                command = [await _bulk(reader) for _ in range(int(head[1:]))]
                if command[0] == b"STOP":
                    await over.wait()
                reply = b"+OK\r\n" if command[0] == b"CLIENT" else answer(command)
                if reply is None:
                    break
                writer.write(reply)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the test has ended the connection
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[:2]
        over.set()


async def _bulk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline())[1:])
    return (await reader.readexactly(size + 2))[:size]


@asynccontextmanager
async def _connected(answer: Answer) -> AsyncIterator[Connection]:
    async with _scripted(answer) as address:
        connection = await Connection.connect(address, credentials=Credentials())
        try:
            yield connection
        finally:
            connection.abort("the test is over")
            await connection.wait_closed()


async def test_replies_are_raw_and_an_error_is_one_of_them() -> None:
    replies = {
        b"array": b"*6\r\n$3\r\na\r\n\r\n:-7\r\n+OK\r\n$-1\r\n*0\r\n$0\r\n\r\n",
        b"moved": b"-MOVED 7 10.0.0.1:6379\r\n",
        b"loading": b"-LOADING Redis is loading\r\n",  # to redis-py an error of the connection
        b"binary": b"$2\r\n\xff\xfe\r\n",
    }
    async with _connected(lambda command: replies[command[1]]) as connection:
        array, moved, loading, binary = await connection.send([("GET", name) for name in replies])
        assert (array, binary) == ([b"a\r\n", -7, b"OK", None, [], b""], b"\xff\xfe")
        assert isinstance(moved, ReplyError)
        assert (moved.kind, moved.rest) == ("MOVED", "7 10.0.0.1:6379")
        assert isinstance(loading, ReplyError)
        assert (loading.kind, connection.usable) == ("LOADING", True)


async def test_the_reply_of_one_who_gave_up_is_thrown_away() -> None:
    held: list[bytes] = []

    def answer(command: list[bytes]) -> bytes:
        held.append(b":%b\r\n" % command[1])
        if command[0] != b"NOW":
            return b""
        out = b"".join(held)
        held.clear()
        return out

    async with _connected(answer) as connection:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.send([("N", 1), ("N", 2)]), 0.02)
        assert connection.silent_s() > 0
        replies = await asyncio.gather(connection.send([("N", 3)]), connection.send([("NOW", 4)]))
        assert replies == [[3], [4]]
        assert connection.silent_s() == 0


async def test_what_nobody_waits_for_any_more_is_not_written() -> None:
    seen: list[bytes] = []

    def answer(command: list[bytes]) -> bytes:
        seen.append(command[0])
        return b":1\r\n"

    async with _connected(answer) as connection:
        late = asyncio.ensure_future(connection.send([("LATE",)]))
        asyncio.get_running_loop().call_soon(late.cancel)
        with pytest.raises(asyncio.CancelledError):
            await late
        assert await connection.send([("NEXT",)]) == [1]
    assert seen == [b"NEXT"]


@pytest.mark.parametrize("reply", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_a_broken_connection_ends_everything_that_is_due(reply: bytes | None) -> None:
    async with _connected(lambda command: reply) as connection:
        with pytest.raises(ConnectionLost):
            await asyncio.gather(connection.send([("PING",)]), connection.send([("PING",), ("PING",)]))
        await connection.wait_closed()
        assert not connection.usable
        with pytest.raises(ConnectionLost):
            await connection.send([("PING",)])


async def test_a_reply_that_nobody_asked_for_breaks_the_connection() -> None:
    async with _connected(lambda command: b":1\r\n:2\r\n") as connection:
        assert await connection.send([("PING",)]) == [1]
        await connection.wait_closed()
        assert not connection.usable


async def test_a_connection_ends_at_once_although_the_server_reads_nothing() -> None:
    async with _connected(lambda command: b"") as connection:
        calls = [asyncio.ensure_future(connection.send([command])) for command in (("STOP",), ("SET", bytes(20_000_000)))]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(calls[0]), 0.05)
        begun = asyncio.get_running_loop().time()
        connection.abort("it was silent")
        await connection.wait_closed()
        assert asyncio.get_running_loop().time() - begun < 1
        for call in calls:
            with pytest.raises(ConnectionLost, match="silent"):
                await call


async def test_a_server_that_refuses_the_password_refuses_the_connection() -> None:
    async with _scripted(lambda command: b"-WRONGPASS no\r\n") as address:
        with pytest.raises(ReplyError, match="WRONGPASS no"):
            await Connection.connect(address, credentials=Credentials("", "x"))


async def test_an_address_where_nobody_listens_is_an_os_error() -> None:
    async with _scripted(lambda command: b"") as address:
        pass
    with pytest.raises(ConnectionRefusedError):
        await Connection.connect(address, credentials=Credentials())


def test_a_store_without_redis_py_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kvdir.store.redis", "kvdir.store.slots", "redis.crc"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"redis://somewhere needs redis-py: pip install 'kvdir\[redis\]'") as refused:
        make_store("redis://me:s3cret@somewhere")
    assert "s3cret" not in str(refused.value)
