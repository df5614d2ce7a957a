"""The stream world with a replica behind its coordinator: log, watcher and replica are the real ones, and so are the bytes.

Messages wait between the two ends until they are delivered, credit likewise; calls break, with or without their position; the
replica's clock is another one altogether. What must hold at every moment, delivered or not:
- the replica never claims to be more current than it is: what it says it holds as of a moment, it holds;
- no node looks as if it had been heard later than the coordinator heard it;
and when everything was delivered, lookups of both say the same, trust included (`same`).
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from kvdir.core.directory import Directory
from kvdir.core.feed import Feed
from kvdir.core.feed_items import Start, Welcome
from kvdir.core.region_directory import RegionDirectory
from kvdir.core.region_roster import RegionRoster
from kvdir.core.replica import CreditLine, ReplicaState
from kvdir.core.roster import Beat as BeatRecord
from kvdir.core.watcher import MIN_CREDIT_BYTES, Watcher
from kvdir.errors import UnknownNamespace
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, Tier
from kvdir.rpc.watch_codec import decode_response, encode_item, encode_response
from kvdir.testing.fake_region import FakeReader, FakeRegion
from kvdir.testing.stream_owner import DIGEST, TIERS, UNIVERSE
from kvdir.testing.stream_world import KINDS, MISHAPS, NODES, World

SKEW_S = -777.0
"""What the replica's clock is ahead of the coordinator's."""

Answer = dict[tuple[bytes, str, int], NodeTrust]
"""(block, node, tier) -> the node's trust, without its age"""


def random_move(world: World, rng: random.Random) -> None:
    """One thing that happens to nodes, network or coordinator."""
    node = rng.choice(NODES)
    match rng.randrange(6):
        case 0:
            world.mishap(rng.choice(MISHAPS), node, rng.randrange(6))
        case 1:
            world.tick(rng.choice([0.05, 0.6, 30.0]), lose_requests=rng.random() < 0.2)
        case 2:
            lies = rng.random() < 0.2
            world.reader_finds_nothing(node, rng.choice(TIERS), rng.choice(UNIVERSE), lies=lies, later=False)
        case _:
            for _ in range(rng.randrange(5)):
                picks = frozenset(rng.sample(UNIVERSE, rng.randrange(1, 3)))
                world.owners[node].change(rng.choice(KINDS), rng.choice(TIERS), picks)
            world.send(node, [rng.random() < 0.3 for _ in range(rng.randrange(6))], heartbeat=rng.random() < 0.5)
            world.deliver(node, rng.randrange(20), twice=rng.random() < 0.1)


class FeedWorld(World):
    """See the module docstring. log_bytes: of the coordinator's log; small ones cut the replica off. message_bytes: small ones
    make many of what would be one, so that more can happen in between.
    """

    def __init__(self, ring_events: int, *, log_bytes: int, message_bytes: int = 1_000, sketches: bool = True) -> None:
        self.log_bytes = log_bytes
        self.message_bytes = message_bytes
        self.logs = 0
        self.cut_offs = self.resumes = self.snapshots = 0
        self.watcher: Watcher | None = None
        super().__init__(ring_events, sketches=sketches)

    def _new_directory(self) -> Directory:
        directory = super()._new_directory()
        self.logs += 1
        self.feed = Feed(self.logs, encode_item, limit_bytes=self.log_bytes, now_s=self.now_s)
        directory.add_mirror(self.feed, now_s=self.now_s)
        self.heads = [(self.now_s, 0)]
        self.hang_up()
        if self.logs == 1:
            self.replica: ReplicaState | None = None
        return directory

    # -- moves -----------------------------------------------------------------------------------------------------------

    def corrupt(self, node: str, blocks: list[bytes], tier: Tier = Tier.CPU) -> None:
        super().corrupt(node, blocks, tier)
        stream = self.directory.nodes[node].stream
        if stream is not None:
            stream.untold = True  # no input did this, so nobody else says that another share is confirmed now

    @property
    def replica_now_s(self) -> float:
        return self.now_s + SKEW_S

    def hang_up(self) -> None:
        """The call breaks; what was under way is lost."""
        self.watcher = None
        self.messages: deque[bytes] = deque()
        self.credits: deque[int] = deque()

    def call(self, *, anew: bool = False) -> None:
        """The replica watches, from where it was unless anew."""
        self.hang_up()
        replica = self.replica
        resume = replica is not None and replica.complete and not anew
        log_id, position = (replica.welcome.log_id, replica.position) if resume and replica else (0, 0)
        start = Start("replica", log_id, position, frozenset(), MIN_CREDIT_BYTES)
        welcome = Welcome(
            coordinator="c",
            log_id=self.feed.log_id,
            seed=1,
            blocks=0,
            beat_interval_s=0.1,
            stale_after_s=5.0,
            expire_after_s=20.0,
        )
        index = self.directory.index
        self.watcher = Watcher(
            self.feed, index, start, welcome, encode_response,
            stall_s=60.0, now_s=self.now_s, message_bytes=self.message_bytes, page_blocks=1,
        )  # fmt: skip
        self.credit = CreditLine(MIN_CREDIT_BYTES, now_s=self.replica_now_s)

    def say(self) -> None:
        """The coordinator writes its next message."""
        if self.watcher is None:
            return
        self.feed.tick(self.now_s)
        message = self.watcher.next(
            warming=self.directory.warming, incomplete=self.directory.holders.partial > 0, now_s=self.now_s
        )
        if message:
            self.messages.append(message)
        if self.watcher.ended is not None:
            self.watcher = None

    def hear(self, count: int = 1) -> None:
        """The replica takes messages, as many as have come."""
        for _ in range(min(count, len(self.messages))):
            self._hear(self.messages.popleft())

    def hear_credit(self) -> None:
        """The coordinator hears the oldest credit under way."""
        if self.credits and self.watcher is not None:
            self.watcher.credit(self.credits.popleft(), now_s=self.now_s)

    def catch_up(self) -> None:
        """Until the replica was told and has taken everything."""
        self.tick(0.05)
        for _ in range(200):
            if self.watcher is None:
                self.call()
            self.say()
            self.hear(10)
            self.hear_credit()
            if self.replica is not None and self.replica.complete and self.replica.position == self.feed.head:
                return
        raise AssertionError("the replica does not catch up")

    def _hear(self, message: bytes) -> None:
        response, now_s = decode_response(message), self.replica_now_s
        self.credit.received(len(message))
        if response.welcome is not None:
            if response.welcome.snapshot:
                self.snapshots += 1
                self.region = FakeRegion(seed=response.welcome.seed)
                roster = RegionRoster(self.region)
                started_s = self.credit.sent_s(0)
                self.replica = ReplicaState(self.region.index, roster, response.welcome, started_s=started_s)
            else:
                self.resumes += 1
        self.cut_offs += response.end is not None
        replica = self.replica
        if replica is None:
            assert response.end is not None, "it says something before the welcome"
            return
        for item in response.items:
            replica.apply(item, now_s)
        if response.position:
            replica.reached(response.position)
        if response.beat is not None:
            replica.beat(response.beat, self.credit)
            self.credits.append(self.credit.grant(now_s=now_s))

    # -- what must hold --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        self.heads.append((self.now_s, self.feed.head))
        replica = self.replica
        if replica is None or not replica.complete or replica.welcome.log_id != self.feed.log_id:
            return
        claimed_s = replica.as_of_s - SKEW_S
        assert claimed_s <= self.now_s
        told = max((head for at_s, head in self.heads if at_s < claimed_s - 1e-6), default=0)
        assert replica.position >= told, f"it claims {claimed_s} and is at {replica.position} of {told}"
        for trust, _ in RegionDirectory(FakeReader(self.region)).nodes(self._beat(), self._now_ns()):
            known = self.directory.nodes.get(trust.node)
            if known is not None and known.stream is not None and known.stream.epoch == trust.epoch:
                silent_s = self.now_s - known.stream.cursor.last_heard_s
                assert trust.age_s >= silent_s - 0.002, f"{trust} was last heard {silent_s} s ago"

    def same(self) -> None:
        """Both answer alike, now that everything was delivered."""
        here, there = self._answer_here(), self._answer_there()
        assert here == there, f"here {here}\nthere {there}"

    def _answer_here(self) -> Answer:
        try:
            answer = self.directory.lookup(DIGEST, Fingerprints.of(UNIVERSE), now_s=self.now_s)
        except UnknownNamespace:
            return {}
        return _by_block(answer)

    def _answer_there(self) -> Answer:
        region, now_ns = RegionDirectory(FakeReader(self.region)), self._now_ns()
        scope = region.scope(DIGEST, now_ns)
        if scope is None:
            return {}
        answer, torn = region.lookup(scope, Fingerprints.of(UNIVERSE), beat=self._beat(), now_ns=now_ns)
        assert not torn
        return _by_block(answer)

    def _beat(self) -> BeatRecord:
        assert self.replica is not None
        return BeatRecord(beat_ns=self._now_ns(), as_of_ns=0, stale_after_s=0.0, expire_after_s=0.0)

    def _now_ns(self) -> int:
        return round(self.replica_now_s * 1e9)


def _by_block(answer: Any) -> Answer:
    out = {}
    for run in answer:
        for node, tier in run.holders:
            trust = answer.nodes[node]
            # What is confirmed may be a percent off.
            said = (trust.node, trust.epoch, trust.state, trust.reason, 0.0, trust.missing_events, trust.peer_address)
            for at in range(run.start, run.start + run.count):
                out[UNIVERSE[at], trust.node, int(tier)] = NodeTrust(*said, confirmed=float(round(trust.confirmed)))
    return out
