"""The block store in Redis or Valkey: one server, Sentinels, or a cluster.

Owns what is sent to which shard and what the answers mean; the functions that do the work inside the servers are shard.lua and
meta.lua, getting there is servers.py. docs/redis.md draws the layout, ADR 0013 has the reasons.

Rules
- A lookup reads the roster's version in the same round trip, and answers with the roster of that version or a newer one.
- A write carries a number that grows with each write of its writer: whatever arrives later than a later write is refused. It
  also carries the newest number that the shard confirmed before: a shard that has gone back behind it (a fail-over that lost
  writes) is found out by the next write to it. Changes of the roster carry the same; there each save looks.
- A shard is made for the first writer, before any holder is listed: under a roster that never changed nothing is missing.
- Holder numbers are random, so that a fail-over that forgets some does not make their numbers those of others.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdir.index import Packed, open_index
from kvdir.store.base import (
    Change,
    ChangeKind,
    Counts,
    Figures,
    Found,
    Health,
    NodeEntry,
    Position,
    Roster,
    StoreLost,
    StoreRefused,
    Taken,
    Writer,
)
from kvdir.store.layout import Picture, Visible, probes_of, split
from kvdir.store.library import SCHEMA, Library
from kvdir.store.records import (
    ServerInfo,
    changed_roster,
    epoch_bytes,
    holder_records,
    node_entries,
    number_bytes,
    number_of,
    pack_numbers,
    position,
)
from kvdir.store.reply import Argument
from kvdir.store.rounds import ROUND_BLOCKS, Op, ops_of, rounds
from kvdir.store.servers import Lane, Request, Servers
from kvdir.store.slots import key_slot, meta_tag, shard_tags
from kvdir.store.url import Kind, StoreUrl

_SHARDS = {Kind.SINGLE: 4, Kind.SENTINEL: 4, Kind.CLUSTER: 64}
"""More spread over more masters; one server gains nothing from them."""
_NONCES = 1 << 20


class RedisBlockStore:
    """See the module docstring; the contract is kvdir.store.base.BlockStore."""

    def __init__(self, url: StoreUrl) -> None:
        self.url = url
        self.figures = Figures()
        self._library = Library()
        self._servers = Servers(url, self._library, self.figures)
        self._meta = meta_tag(url.prefix) + b":m"
        self._meta_slot = key_slot(self._meta)
        self._id = ""
        self._shard_keys: tuple[bytes, ...] = ()
        self._shard_slots: tuple[int, ...] = ()
        self._keys = open_index().keys
        self._roster = Roster(0, {})
        self._roster_lock = asyncio.Lock()
        self._visible = Visible({})
        self._sweep_from = 0

    @property
    def store_id(self) -> int:
        return int(self._id or "0", 16)

    async def open(self, *, deadline_s: float) -> None:
        with self._call(deadline_s) as deadline:
            await self._servers.start(deadline=deadline)
            if self._servers.gaps:
                raise StoreRefused(f"{self.url}: {self._servers.gaps}")
            for where, info in (await self._infos(deadline)).items():
                _check(where, info, self.url.kind)
            await self._make(deadline)

    async def _make(self, deadline: float) -> None:
        seed, shards = secrets.randbits(63), self.url.shards or _SHARDS[self.url.kind]
        call = self._library.call("make", self._meta, SCHEMA, f"{secrets.randbits(63) | 1:016x}", seed, shards)
        (reply,) = await self._servers.run([Request(self._meta_slot, call)], deadline=deadline, lane=Lane.WRITE)
        schema, store_id, seed_found, shards_found = (value.decode() for value in reply)
        if schema != str(SCHEMA):
            what = f"schema version {schema}" if schema.isdigit() else "something that is not ours"
            raise StoreRefused(
                f"{self.url}: key {self._meta.decode()} holds {what}, and this release speaks version {SCHEMA}: use the "
                "release that wrote it, another prefix (…?prefix=name), or delete the keys of this prefix"
            )
        self._id = store_id
        tags = shard_tags(self.url.prefix, int(shards_found))
        self._shard_keys = tuple(tag + b":s" for tag in tags)
        self._shard_slots = tuple(key_slot(tag) for tag in tags)
        self._keys = open_index(seed=int(seed_found)).keys
        self._set_roster(Roster(0, {}))

    async def close(self) -> None:
        await self._servers.close()

    # -- nodes -----------------------------------------------------------------------------------------------------------

    async def take(self, node: str, epoch: int, *, deadline_s: float) -> Taken:
        low = b"0"
        with self._call(deadline_s) as deadline:
            while True:
                reply = await self._meta_call("take", deadline, node, epoch_bytes(epoch), low, secrets.randbelow(_NONCES))
                token, seq, record, *holders = reply
                fences = [
                    Request(slot, self._library.call("fence", key, self._id, node, token))
                    for key, slot in zip(self._shard_keys, self._shard_slots, strict=True)
                ]
                stands = await self._servers.run(fences, deadline=deadline, lane=Lane.WRITE)
                low = max(stands, key=int)
                if low == token:
                    writer = Writer(node, epoch, int(token))
                    return Taken(writer, position(epoch, seq), record, tuple(holder_records(holders)))

    async def save(
        self, writer: Writer, *, position: Position | None = None, record: bytes | None = None, deadline_s: float
    ) -> None:
        if position is not None and position.epoch != writer.epoch:
            raise ValueError(f"position of epoch {position.epoch:#x}, but the writer is of epoch {writer.epoch:#x}")
        seq = -1 if position is None else position.seq
        given = (0, b"") if record is None else (1, record)
        with self._call(deadline_s) as deadline:
            await self._own_call("save", writer, deadline, seq, *given)

    async def nodes(self, *, deadline_s: float) -> tuple[NodeEntry, ...]:
        with self._call(deadline_s) as deadline:
            return node_entries(await self._meta_read("nodes", deadline))

    async def forget(self, node: str, token: int, *, deadline_s: float) -> bool:
        with self._call(deadline_s) as deadline:
            return bool(await self._meta_call("forget", deadline, node, token, secrets.randbelow(_NONCES)))

    # -- holders ---------------------------------------------------------------------------------------------------------

    async def create(
        self, writer: Writer, parts: Sequence[tuple[bytes, int]], *, visible: bool, deadline_s: float
    ) -> tuple[int, ...]:
        numbers = tuple(secrets.randbelow(2**32 - 1) + 1 for _ in parts)
        arguments: list[Argument] = [secrets.randbelow(_NONCES), int(visible)]
        for number, (digest, tier) in zip(numbers, parts, strict=True):
            arguments += [number_bytes(number), tier, digest]
        with self._call(deadline_s) as deadline:
            await self._change_roster("create", writer, deadline, *arguments)
        return numbers

    async def swap(self, writer: Writer, *, show: Collection[int] = (), drop: Collection[int] = (), deadline_s: float) -> None:
        nonce = secrets.randbelow(_NONCES)
        with self._call(deadline_s) as deadline:
            await self._change_roster("swap", writer, deadline, nonce, pack_numbers(show), pack_numbers(drop))

    async def _change_roster(self, function: str, writer: Writer, deadline: float, *arguments: Argument) -> None:
        writer.changes += 1
        number = writer.changes
        await self._own_call(function, writer, deadline, *arguments)
        writer.changes_acknowledged = number

    async def roster(self, *, deadline_s: float) -> Roster:
        with self._call(deadline_s) as deadline:
            return await self._newest_roster(deadline)

    async def _newest_roster(self, deadline: float) -> Roster:
        async with self._roster_lock:  # one after the other: replies out of order would take the roster back
            known = self._roster
            reply = await self._meta_read("roster", deadline, known.version)
            if int(reply[0]) != known.version:
                self._set_roster(changed_roster(known, reply))
            return self._roster

    def _set_roster(self, roster: Roster) -> None:
        self._roster = roster
        self._visible = Visible(roster.holders)

    # -- blocks ----------------------------------------------------------------------------------------------------------

    async def write(self, writer: Writer, changes: Sequence[Change], *, deadline_s: float) -> tuple[int, ...]:
        changed = [0] * len(changes)
        queues: dict[int, list[Op]] = {}
        for index, change in enumerate(changes):
            for part in split(self._keys(change.packed, change.width, scope=change.scope), len(self._shard_keys)):
                queues.setdefault(part.shard, []).extend(ops_of(index, change, part.tails))
        with self._call(deadline_s) as deadline:
            for ops in rounds(queues) if queues else [dict.fromkeys(writer.acknowledged, ())]:
                await self._write_round(writer, ops, changed, deadline)
        return tuple(changed)

    async def _write_round(
        self, writer: Writer, by_shard: Mapping[int, Sequence[Op]], changed: list[int], deadline: float
    ) -> None:
        writer.writes += 1
        number = writer.writes
        requests = [
            self._write_request(shard, ops, writer.node, writer.token, number, writer.acknowledged.get(shard, 0))
            for shard, ops in by_shard.items()
        ]
        replies = await self._servers.run(requests, deadline=deadline, lane=Lane.WRITE)
        for (shard, ops), reply in zip(by_shard.items(), replies, strict=True):
            writer.acknowledged[shard] = number
            for op, blocks in zip(ops, reply, strict=True):
                changed[op.change] += blocks

    def _write_request(self, shard: int, ops: Sequence[Op], *writer: Argument) -> Request:
        function = "write" if any(op.sign == b"+" for op in ops) else "erase"
        arguments = [argument for op in ops for argument in op.arguments]
        call = self._library.call(function, self._shard_keys[shard], self._id, *writer, *arguments)
        return Request(self._shard_slots[shard], call)

    async def retract(self, holder: int, packed: Packed, width: int, *, scope: int, deadline_s: float) -> int:
        change = Change(ChangeKind.REMOVE, holder, scope, packed, width)
        requests = [
            self._write_request(part.shard, ops_of(0, change, part.tails), "", 0, 0, 0)
            for whole in split(self._keys(packed, width, scope=scope), len(self._shard_keys))
            for part in whole.cut(ROUND_BLOCKS)
        ]
        with self._call(deadline_s) as deadline:
            replies = await self._servers.run(requests, deadline=deadline, lane=Lane.WRITE)
        return sum(sum(reply) for reply in replies)

    async def lookup(self, packed: Packed, width: int, *, scope: int, prefix: bool = False, deadline_s: float) -> Found:
        keys = self._keys(packed, width, scope=scope)
        asked = len(keys) // 8
        picture = Picture(asked)
        with self._call(deadline_s) as deadline:
            probes = probes_of(asked) if prefix else np.arange(asked)
            lost = await self._look(picture, keys, probes, deadline)
            if len(probes) < asked:
                lost += await self._look(picture, keys, picture.open_strides(probes), deadline)
        return Found(*picture.answer(prefix=prefix), self._roster, lost)

    async def _look(self, picture: Picture, keys: bytes, at: NDArray[np.intp], deadline: float) -> int:
        """Looks at some positions, and at the roster's version; returns how many buckets were missing."""
        parts = [part for whole in split(keys, len(self._shard_keys), at) for part in whole.cut(ROUND_BLOCKS)]
        requests = [
            Request(
                self._shard_slots[part.shard], self._library.read("lookup", self._shard_keys[part.shard], self._id, part.tails)
            )
            for part in parts
        ]
        requests.append(Request(self._meta_slot, ("HMGET", self._meta, "id", "version")))
        *answers, newest = await self._servers.run(requests, deadline=deadline, lane=Lane.READ)
        await self._catch_up(newest, deadline)
        missing = 0
        for part, answer in zip(parts, answers, strict=True):
            gone, ids, *sets = answer
            missing += gone
            if ids:
                picture.add(part, ids, sets, self._visible)
        return missing if self._roster.version else 0

    async def _catch_up(self, newest: Any, deadline: float) -> None:
        """Makes the roster at least as new as what (store id, version) says."""
        store_id, version = newest
        if store_id != self._id.encode():
            raise StoreLost(f"{self.url}: the store is gone or was made anew: open it again")
        if int(version) != self._roster.version:
            await self._newest_roster(deadline)

    async def counts(self, holders: Collection[int], *, deadline_s: float) -> Counts:
        wanted = tuple(holders)
        packed = pack_numbers(wanted)
        with self._call(deadline_s) as deadline:
            replies = await self._every_shard("counts", deadline, packed)
            roster = await self._newest_roster(deadline)
        blocks = {holder: sum(reply[at] for reply in replies) for at, holder in enumerate(wanted, 1)}
        return Counts(blocks, sum(reply[0] for reply in replies) if roster.version else 0)

    # -- upkeep ----------------------------------------------------------------------------------------------------------

    async def put_namespace(self, digest: bytes, record: bytes, *, deadline_s: float) -> None:
        with self._call(deadline_s) as deadline:
            await self._meta_call("put_namespace", deadline, digest, record)

    async def namespaces(self, *, deadline_s: float) -> dict[bytes, bytes]:
        with self._call(deadline_s) as deadline:
            reply = await self._meta_read("namespaces", deadline)
        return dict(zip(reply[::2], reply[1::2], strict=True))

    async def sweep(self, max_buckets: int, *, deadline_s: float) -> int:
        with self._call(deadline_s) as deadline:
            work = await self._unlisted(deadline)
            for shard in sorted(work, key=lambda shard: (shard - self._sweep_from) % len(self._shard_keys)):
                self._sweep_from = shard
                if freed := await self._sweep_shard(shard, *work[shard], max_buckets, deadline):
                    return freed
        return 0

    async def _sweep_shard(self, shard: int, dead: bytes, nodes: Sequence[bytes], max_buckets: int, deadline: float) -> int:
        """Steps until one frees something, or none can: a pass that was under way has ended, and a whole one after it."""
        call = self._library.call("sweep", self._shard_keys[shard], self._id, dead, max_buckets, *nodes)
        ends = 0
        while True:
            reply = await self._servers.run([Request(self._shard_slots[shard], call)], deadline=deadline, lane=Lane.WRITE)
            ((freed, cursor),) = reply
            ends += cursor == 0
            if freed or not dead or ends == 2:
                return int(freed)

    async def _unlisted(self, deadline: float) -> dict[int, tuple[bytes, list[bytes]]]:
        """Per shard the dead holders and the nodes that nobody knows any more, if it has such.

        The order matters: what is in a shard was listed before it came there, so what the later roster lacks is dead.
        """
        present = await self._every_shard("present", deadline)
        listed = (await self._newest_roster(deadline)).holders
        known = {entry.node.encode() for entry in node_entries(await self._meta_read("nodes", deadline))}
        work = {}
        for shard, (holders, *nodes) in enumerate(present):
            numbers = (holders[at : at + 4] for at in range(0, len(holders), 4))
            dead = b"".join(number for number in numbers if number_of(number) not in listed)
            gone = [node for node in nodes if node not in known]
            if dead or gone:
                work[shard] = (dead, gone)
        return work

    async def health(self, *, deadline_s: float) -> Health:
        with self._call(deadline_s) as deadline:
            infos = await self._infos(deadline)
        bounds = [info.max_bytes for info in infos.values()]
        return Health(
            evicts=any(info.evicts for info in infos.values()),
            evicted=sum(info.evicted for info in infos.values()),
            used_bytes=sum(info.used_bytes for info in infos.values()),
            max_bytes=sum(bounds) if all(bounds) else 0,
            servers=tuple(f"{where} {info.version}" for where, info in infos.items()),
        )

    # -- calls -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self, deadline_s: float) -> Iterator[float]:
        """Counts a call of the port; gives its deadline by the loop's clock."""
        self.figures.calls += 1
        self.figures.pending += 1
        try:
            yield asyncio.get_running_loop().time() + deadline_s
        except BaseException:
            self.figures.failures += 1
            raise
        finally:
            self.figures.pending -= 1

    async def _infos(self, deadline: float) -> dict[str, ServerInfo]:
        replies = await self._servers.everywhere(("INFO",), deadline=deadline)
        return {
            f"{host}:{port}": ServerInfo.parse(reply) for (host, port), reply in replies.items() if isinstance(reply, bytes)
        }

    async def _meta_call(self, function: str, deadline: float, *arguments: Argument) -> Any:
        return await self._meta_run(self._library.call(function, self._meta, self._id, *arguments), deadline, Lane.WRITE)

    async def _own_call(self, function: str, writer: Writer, deadline: float, *arguments: Argument) -> None:
        """What only the node's writer may do; finds out whether the record went back behind what it has confirmed."""
        who = writer.node, writer.token, writer.changes, writer.changes_acknowledged
        await self._meta_call(function, deadline, *who, *arguments)

    async def _meta_read(self, function: str, deadline: float, *arguments: Argument) -> Any:
        return await self._meta_run(self._library.read(function, self._meta, self._id, *arguments), deadline, Lane.READ)

    async def _meta_run(self, command: tuple[Argument, ...], deadline: float, lane: Lane) -> Any:
        (reply,) = await self._servers.run([Request(self._meta_slot, command)], deadline=deadline, lane=lane)
        return reply

    async def _every_shard(self, function: str, deadline: float, *arguments: Argument) -> list[Any]:
        requests = [
            Request(slot, self._library.read(function, key, self._id, *arguments))
            for key, slot in zip(self._shard_keys, self._shard_slots, strict=True)
        ]
        return await self._servers.run(requests, deadline=deadline, lane=Lane.READ)


def _check(where: str, info: ServerInfo, kind: Kind) -> None:
    """Raises StoreRefused for a server that will not do.

    Behind Sentinels or in a cluster a replica is soon a master or known as none: there READONLY and MOVED are followed.
    """
    if not info.has_functions:
        raise StoreRefused(f"{where} is {info.version}: kvdir needs functions, which Redis 7.0 and Valkey 7.2 have")
    if info.is_replica and kind is Kind.SINGLE:
        raise StoreRefused(f"{where} is a read-only replica of {info.master}: name the master, or use redis+sentinel://")
