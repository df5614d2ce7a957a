"""Random lives of one stream over a shared store: lost batches, writes that stop half way, coordinators that take over from
each other, and a store that forgets its last writes. In the end the store holds what the owner holds, and nobody ever called
the stream whole while it did not.
"""

from __future__ import annotations

import random
from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdir.core.event import Batch, Event, Heartbeat, HeartbeatFigures, OwnerCount, SnapshotChunk
from kvdir.core.namespaces import Announced, NamespaceTable
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.repair import Ask, RepairPolicy
from kvdir.core.sender import StreamSender
from kvdir.core.shared_stream import TRAIL_S, SharedStream
from kvdir.core.snapshot import Intake, snapshot_chunks
from kvdir.core.store_steps import Held, Step, Write
from kvdir.core.stream import StreamCursor
from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState, Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE

DIGEST = EXAMPLE_NAMESPACE.digest
KEY = (DIGEST, int(Tier.CPU))
NAMESPACES = NamespaceTable(limit=1)
NAMESPACES.announce(Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes))
BLOCKS = [bytes([number]) * 16 for number in range(12)]
HEARTBEAT_S = 0.5


class World:
    """One owner, a store that is a set of blocks per holder, and the coordinator that has the stream now."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.held: set[bytes] = set()
        self.outbox = OwnerOutbox(max_events=rng.choice([8, 10_000]))
        self.sender = StreamSender(self.outbox, max_batch_events=3)
        self.chunks: deque[SnapshotChunk] = deque()
        self.store: dict[int, set[bytes]] = {}
        self.visible: set[int] = set()
        self.before: deque[tuple[float, dict[int, set[bytes]], set[int]]] = deque()
        self.position: int | None = None
        self.numbers = 0
        self.forgot = False
        self.stream = self._take()

    # -- owner -----------------------------------------------------------------------------------------------------------

    def change(self) -> None:
        block = self.rng.choice(BLOCKS)
        stored = block not in self.held
        self.held ^= {block}
        event = Event.stored if stored else Event.removed
        self.outbox.append(event(Tier.CPU, DIGEST, Fingerprints(block, 16)))

    # -- coordinator -----------------------------------------------------------------------------------------------------

    def _take(self) -> SharedStream:
        """Another coordinator takes the stream over, as SharedCoordinator.hello does."""
        stream = SharedStream("n", 7, StreamCursor(RepairPolicy(idle_s=0.5), now_s=self.now_s), Counter())
        stream.namespaces[DIGEST] = NAMESPACES.require(DIGEST)
        for number in list(self.store):
            if number not in self.visible:
                del self.store[number]
        for number in self.visible:
            stream.holders[KEY] = Held(number, stream.namespaces[DIGEST], int(Tier.CPU), len(self.store[number]))
        hello_seq = self.outbox.last_seq
        resume_seq = stream.open(hello_seq, position=self.position, now_s=self.now_s)
        self.chunks.clear()
        if not self.sender.opened(resume_seq=resume_seq, hello_seq=hello_seq, credit=1000):
            stream.cursor.replay_unavailable(now_s=self.now_s)
        return stream

    def take_over(self) -> None:
        self.stream = self._take()

    def deliver(self, *, lose: float = 0.0, fail: float = 0.0) -> None:
        """The next message arrives, or is lost; its write may stop half way, after which the call is over."""
        if self.chunks:
            self._chunk(self.chunks.popleft())
            return
        batch = self.sender.next_batch()
        if batch is None or self.rng.random() < lose:
            return
        steps = self.stream.plan([batch], now_s=self.now_s)
        if self.rng.random() < fail:
            self._do(steps[: self.rng.randint(0, len(steps))], self.stream.holders, show=True)
            self.take_over()
            return
        self._do(steps, self.stream.holders, show=True)
        self.stream.commit([batch], now_s=self.now_s)
        self.sender.ack(self.stream.cursor.top_seq)

    def _chunk(self, chunk: SnapshotChunk) -> None:
        stream = self.stream
        verdict = stream.chunk(chunk, now_s=self.now_s)
        if verdict is Intake.IGNORE:
            return
        self._do(stream.entries(chunk, now_s=self.now_s), stream.fresh, show=False)
        if verdict is Intake.COMPLETE:
            self.visible = {held.number for held in stream.fresh.values()}
            stream.swapped(now_s=self.now_s)

    def _do(self, steps: list[Step], holders: dict[tuple[bytes, int], Held], *, show: bool) -> None:
        for step in steps:
            assert isinstance(step, Write)
            if step.key not in holders:
                if not step.stored:
                    continue
                self.numbers += 1
                self.store[self.numbers] = set()
                holders[step.key] = Held(self.numbers, NAMESPACES.require(DIGEST), step.key[1])
                if show:
                    self.visible.add(self.numbers)
            held = holders[step.key]
            content = self.store[held.number]
            blocks = {step.packed[at : at + step.width] for at in range(0, len(step.packed), step.width)}
            changed = len(blocks - content) if step.stored else len(blocks & content)
            self.store[held.number] = content | blocks if step.stored else content - blocks
            self.stream.changed(step, held, changed)

    # -- time ------------------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Half a second: the owner's heartbeat, the coordinator's deadlines, a save."""
        self.now_s += HEARTBEAT_S
        stream = self.stream
        counts = (OwnerCount(DIGEST, int(Tier.CPU), len(self.held)),) if self.sender.caught_up else None
        if stream.heartbeat(Heartbeat(self.sender.position, HeartbeatFigures(counts=counts)), now_s=self.now_s):
            stream.counted({number: len(blocks) for number, blocks in self.store.items()}, now_s=self.now_s)
        match stream.tick(now_s=self.now_s, stale_after_s=60, may_snapshot=True):
            case Ask.REPLAY:
                if not self.sender.replay(stream.cursor.next_seq):
                    stream.cursor.replay_unavailable(now_s=self.now_s)
            case Ask.SNAPSHOT:
                at_seq = self.outbox.last_seq
                self.sender.snapshot_taken(at_seq)
                entries = [Event.stored(Tier.CPU, DIGEST, Fingerprints(block, 16)) for block in sorted(self.held)]
                self.chunks = deque(snapshot_chunks(stream.snapshot_id, at_seq, entries, max_blocks=4))
        for number in stream.doomed:
            self.store.pop(number, None)
        stream.doomed = []
        self.position = stream.position(now_s=self.now_s)
        self.before.append((self.now_s, {number: set(blocks) for number, blocks in self.store.items()}, set(self.visible)))

    def forget(self) -> None:
        """A fail-over: what the store took lately is gone, and whoever writes notices; the position is as it was saved."""
        recent = [item for item in self.before if item[0] > self.now_s - TRAIL_S / 2]
        if recent:
            _, self.store, self.visible = self.rng.choice(recent)
            self.store = {number: set(blocks) for number, blocks in self.store.items()}
            self.before.clear()
        self.take_over()

    @property
    def answered(self) -> set[bytes]:
        return set().union(*(self.store[number] for number in self.visible if number in self.store))

    def check(self) -> None:
        whole = self.stream.cursor.state is StreamState.SYNCED and self.sender.caught_up and not self.chunks
        if whole and self.stream.cursor.applied_seq == self.outbox.last_seq:
            assert self.answered == self.held, "called whole, and is not"


STEPS = ["change", "change", "deliver", "deliver", "deliver", "lose", "fail", "beat", "take over", "forget"]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.sampled_from(STEPS), max_size=80))
def test_store_holds_what_the_owner_holds_after_any_history(seed: int, steps: list[str]):
    world = World(random.Random(seed))
    for step in steps:
        match step:
            case "change":
                world.change()
            case "deliver":
                world.deliver()
            case "lose":
                world.deliver(lose=1.0)
            case "fail":
                world.deliver(fail=1.0)
            case "beat":
                world.beat()
            case "take over":
                world.take_over()
            case "forget":
                world.forget()
        world.check()
    for _ in range(120):
        for _ in range(8):
            world.deliver()
            world.check()
        world.beat()
    assert world.stream.cursor.state is StreamState.SYNCED
    assert world.stream.cursor.applied_seq == world.outbox.last_seq
    assert world.answered == world.held


def test_batches_in_flight_are_planned_as_if_the_ones_before_were_taken():
    """Several batches travel as one group: what a later one repeats of an earlier one is left out."""
    world = World(random.Random(0))
    event = Event.stored(Tier.CPU, DIGEST, Fingerprints(BLOCKS[0], 16))
    other = Event.stored(Tier.CPU, DIGEST, Fingerprints(BLOCKS[1], 16))
    group = [Batch(1, (event,)), Batch(1, (event, other)), Batch(2, (other,))]
    (step,) = world.stream.plan(group, now_s=0.0)
    assert isinstance(step, Write)
    assert step.packed == BLOCKS[0] + BLOCKS[1]
    world.stream.commit(group, now_s=0.0)
    assert (world.stream.cursor.applied_seq, world.stream.cursor.duplicates) == (2, 2)
