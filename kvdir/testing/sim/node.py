"""A simulated node: what its arena holds (the truth), and the real outbox, sender and publisher in front of it.

A node has one *life* after the other, each with an epoch of its own; a process may also start twice. Blocks are given as
numbers, for which fingerprints are made up, or as Fingerprints. Nothing here knows what the coordinator believes.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvdir.client.publisher import Backoff, Publisher, PublisherIdentity
from kvdir.core.event import NO_DOUBT, Event, EvictRequest, EvictResult, HeartbeatFigures, OwnerCount
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sketches import OwnerSketches
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch
from kvdir.location import Tier
from kvdir.namespace import Namespace
from kvdir.testing.sim.ledger import Item, Ledger, by_place, count

START_UNIX_S = 1_800_000_000.0

Blocks = Fingerprints | Iterable[int]


def fingerprint_of(block: int) -> bytes:
    """The made-up 16-byte fingerprint of a block number."""
    return hashlib.blake2b(block.to_bytes(8, "little"), digest_size=16).digest()


def fingerprints_of(blocks: Blocks) -> Fingerprints:
    """As one packed list."""
    if isinstance(blocks, Fingerprints):
        return blocks
    return Fingerprints.of([fingerprint_of(block) for block in blocks])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    """What all nodes have in common.

    ring_events: size of the agent's outbox. sketch_cells: of the agent's sketches, 0 for an agent that keeps none. exact: an
    event names only what it changes. dials: connect to each coordinator, given node name and epoch. died: told when a process
    dies.
    """

    loop: asyncio.AbstractEventLoop
    dials: Sequence[Callable[[str, int], AbstractAsyncContextManager[Any]]]
    died: Callable[[str, int], None]
    now_s: Callable[[], float]
    namespaces: Sequence[Namespace]
    digests: Sequence[bytes]
    ring_events: int
    sketch_cells: int
    exact: bool
    chunk_blocks: int
    silence_s: float
    backoff: Backoff


class Life:
    """One process of a node, from its start to its end."""

    def __init__(self, node: LocalNode, epoch: int, held: Iterable[Item]) -> None:
        self.node = node
        self.epoch = epoch
        self.ledger = Ledger()
        setup = node.setup
        sketches = OwnerSketches(partial(Sketch, setup.sketch_cells)) if setup.sketch_cells else None
        self.outbox = OwnerOutbox(max_events=setup.ring_events, sketches=sketches)
        self.fences: dict[int, str] = {}
        """Why it may publish no more, by number of the coordinator that said so."""
        self.known = True
        """Whether the agent knows what it holds; not after its engine's bus has lost events, until it has asked."""
        self.doubt = NO_DOUBT
        self._unsaid: set[Item] = set()
        self._unheld: set[Item] = set()
        """What differs between the truth and what was said, since the engine lost events and cannot restate."""
        self.left_s: float | None = None
        self.died_s: float | None = None
        for digest, tier, fingerprints in by_place(held):
            self.stored(digest, tier, Fingerprints.of(fingerprints))
        identity = PublisherIdentity(node.name, epoch, node.address, node.unix_ms(), tuple(setup.namespaces))
        self.publishers = [
            Publisher(
                f"coordinator-{number}",
                identity,
                self.outbox,
                snapshot=self._snapshot,
                heartbeat=self._heartbeat,
                on_fenced=partial(self.fences.__setitem__, number),
                evict=self._evict,
                rng=random.Random(epoch + number),
                backoff=setup.backoff,
                silence_s=setup.silence_s,
                linger_s=0.0,
                chunk_blocks=setup.chunk_blocks,
                dial=partial(dial, node.name, epoch),
                doubt=lambda: self.doubt,
            )
            for number, dial in enumerate(setup.dials)
        ]
        self._tasks = [setup.loop.create_task(publisher.run()) for publisher in self.publishers]

    @property
    def alive(self) -> bool:
        """The process has neither been killed nor told to leave."""
        return self.died_s is None and self.left_s is None

    @property
    def fenced(self) -> str:
        """Why some coordinator wants to hear no more of it."""
        return next(iter(self.fences.values()), "")

    def publishing(self, coordinator: int) -> bool:
        """To that one, or trying to: a fenced process lives on, and publishes no more."""
        return self.alive and not self._tasks[coordinator].done()

    @property
    def fault(self) -> str:
        """What ended a publisher although nobody wanted it to; it must never fail."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                return f"a publisher of {self.node.name} failed: {task.exception()!r}"
        return ""

    def kill(self) -> None:
        """As SIGKILL: nothing is said."""
        self.died_s = self.node.setup.now_s()
        self.node.setup.died(self.node.name, self.epoch)
        for task in self._tasks:
            task.cancel()

    def leave(self) -> None:
        """Says goodbye, if it can."""
        self.left_s = self.node.setup.now_s()
        for publisher in self.publishers:
            publisher.leave()

    # -- changes, each with its event ------------------------------------------------------------------------------------

    def stored(self, digest: bytes, tier: Tier, fingerprints: Fingerprints) -> None:
        fingerprints = self._changing(digest, tier, fingerprints, held=False)
        self.say(Event.stored(tier, digest, fingerprints), added=items_of(digest, tier, fingerprints))

    def removed(self, digest: bytes, tier: Tier, fingerprints: Fingerprints) -> None:
        fingerprints = self._changing(digest, tier, fingerprints, held=True)
        self.say(Event.removed(tier, digest, fingerprints), removed=items_of(digest, tier, fingerprints))

    def _changing(self, digest: bytes, tier: Tier, fingerprints: Fingerprints, *, held: bool) -> Fingerprints:
        if not self.node.setup.exact:
            return fingerprints
        return fingerprints.select(
            at for at, item in enumerate(items_of(digest, tier, fingerprints)) if (item in self.believed) is held
        )

    def cleared(self, digest: bytes, tier: Tier) -> None:
        gone = [item for item in self.ledger.held if item.tier is tier and digest in (b"", item.namespace_digest)]
        self.say(Event.cleared(tier, digest), removed=gone)

    def say(self, event: Event, *, added: Iterable[Item] = (), removed: Iterable[Item] = ()) -> None:
        """A change and the event that stands for it, which need not be one that anybody understands."""
        added, removed = list(added), list(removed)
        for differing in (self._unsaid, self._unheld):
            differing.difference_update(added, removed)
        self.ledger.change(added=added, removed=removed)
        sketches, self.outbox.sketches = (
            self.outbox.sketches,
            None,
        )  # fed from the ledger: events here need not be exact changes
        self.outbox.append(event)
        self.outbox.sketches = sketches
        if self.known:
            self.restate()

    def lose(self, *, added: Iterable[Item] = (), removed: Iterable[Item] = (), known: bool = True) -> None:
        """A change whose event is lost, and its number used up. known: the agent itself knows what it holds all the same."""
        self.ledger.change(added=added, removed=removed)
        self.outbox.lose()
        self.known &= known
        if self.known:
            self.restate()

    @property
    def believed(self) -> set[Item]:
        """What the agent takes for held."""
        return (self.ledger.held - self._unsaid) | self._unheld

    def engine_lost(self, *, added: set[Item], removed: set[Item]) -> None:
        """The engine's changes were lost for good. The agent sees that some were, with the next event, of something else."""
        self.doubt = self.doubt.begun(f"the engine lost events behind {self.outbox.last_seq}")
        for publisher in self.publishers:
            publisher.doubted()
        new, gone = added - self.ledger.held, removed & self.ledger.held
        self.ledger.change(added=new, removed=gone)
        self._unsaid, self._unheld = (self._unsaid - gone) | (new - self._unheld), (self._unheld - new) | (gone - self._unsaid)
        elsewhere = Fingerprints.of([fingerprint_of(-1 & 0xFFFF)])
        self.outbox.append(Event.removed(Tier.CPU, self.node.setup.digests[0], elsewhere))
        self.restate()

    def engine_emptied(self) -> None:
        """The engine clears its cache, and says so: what was lost before does not matter any more."""
        for tier in Tier:
            self.cleared(b"", tier)
        self._unsaid, self._unheld = set(), set()
        self.restate()
        self.doubt = self.doubt.ended()

    def restate(self) -> list[Event]:
        """Everything that is held as far as the agent knows, also for the sketches."""
        held = [Event.stored(tier, digest, Fingerprints.of(items)) for digest, tier, items in by_place(self.believed)]
        if self.outbox.sketches is not None:
            self.outbox.sketches.restate(held)
        return held

    # -- what the publisher asks -----------------------------------------------------------------------------------------

    def _snapshot(self) -> tuple[int, list[Event]]:
        self.known = True
        return self.outbox.last_seq, self.restate()

    def _heartbeat(self) -> HeartbeatFigures:
        held = sorted(count(self.believed).items())
        counts = tuple(OwnerCount(digest, tier, blocks) for (digest, tier), blocks in held)
        return HeartbeatFigures(len(self.ledger.held), 1 << 30, counts if self.known else None)

    def _evict(self, request: EvictRequest) -> EvictResult:
        """Evicts in the order of fingerprints: simulated nodes know no recency. The floor holds."""
        place = (request.namespace_digest, request.tier)
        held = sorted(item for item in self.ledger.held if (item.namespace_digest, item.tier) == place)
        victims = held[: max(0, min(request.max_blocks, len(held) - request.keep_blocks))]
        if victims:
            packed = Fingerprints.of([item.fingerprint for item in victims])
            self.removed(request.namespace_digest, Tier(request.tier), packed)
        return EvictResult(request.request_id, len(victims), self.outbox.last_seq)


class LocalNode:
    """See the module docstring. `life` is the newest process; older ones that still run are in `lives`, too.

    clock_offset_s: how far the wall clock of this node is off; nothing may depend on it.
    """

    def __init__(self, name: str, address: str, setup: NodeSetup, rng: random.Random) -> None:
        self.name = name
        self.address = address
        self.setup = setup
        self.clock_offset_s = 0.0
        self._rng = rng
        self.lives: list[Life] = []
        self.restart()

    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def held(self) -> set[Item]:
        """What it holds now."""
        return self.life.ledger.held

    def unix_ms(self) -> int:
        """What its wall clock shows."""
        return int((START_UNIX_S + self.setup.now_s() + self.clock_offset_s) * 1000)

    def life_of(self, epoch: int) -> Life | None:
        return next((life for life in self.lives if life.epoch == epoch), None)

    # -- processes -------------------------------------------------------------------------------------------------------

    def restart(self, *, keep: bool = False) -> Life:
        """Kills what runs and starts anew, under the same name and address; with keep the arena has survived."""
        held = self.held if keep and self.lives else ()
        self.kill()
        return self._start(held)

    def start_twice(self) -> Life:
        """Starts a second process of the same name while the first goes on."""
        return self._start(())

    def kill(self) -> None:
        """Ends every process of the node at once."""
        for life in self.lives:
            if life.alive:
                life.kill()

    def leave(self) -> None:
        """The newest process says goodbye and ends."""
        self.life.leave()

    def _start(self, held: Iterable[Item]) -> Life:
        life = Life(self, self._rng.getrandbits(63) + 1, held)
        self.lives.append(life)
        return life

    # -- blocks ----------------------------------------------------------------------------------------------------------

    def store(self, blocks: Blocks, *, tier: Tier = Tier.CPU, namespace: int = 0) -> Fingerprints:
        """Stores blocks and says so in one event. namespace: index into the cluster's namespaces."""
        fingerprints = fingerprints_of(blocks)
        self.life.stored(self._digest(namespace), tier, fingerprints)
        return fingerprints

    def remove(self, blocks: Blocks, *, tier: Tier = Tier.CPU, namespace: int = 0) -> None:
        """Removes blocks and says so in one event; removing what is absent is said, too."""
        self.life.removed(self._digest(namespace), tier, fingerprints_of(blocks))

    def clear(self, *, tier: Tier = Tier.CPU, namespace: int | None = None) -> None:
        """Removes everything of a namespace, or of all, in one tier."""
        self.life.cleared(b"" if namespace is None else self._digest(namespace), tier)

    def lose(
        self,
        *,
        stored: Blocks = (),
        removed: Blocks = (),
        tier: Tier = Tier.CPU,
        namespace: int = 0,
        known: bool = True,
    ) -> None:
        """One change whose event is lost inside the node; its number is used up.

        known: by the agent's own full queue, so that it knows what it holds. Otherwise by the engine's bus: it does not, until
        somebody asks it for an absolute statement.
        """
        digest = self._digest(namespace)
        self.life.lose(
            added=items_of(digest, tier, fingerprints_of(stored)),
            removed=items_of(digest, tier, fingerprints_of(removed)),
            known=known,
        )

    def lose_engine_events(
        self, *, stored: Blocks = (), removed: Blocks = (), tier: Tier = Tier.CPU, namespace: int = 0
    ) -> None:
        """As `lose`, but nobody can ever say what it was: the agent is in doubt until `engine_empties`."""
        digest = self._digest(namespace)
        self.life.engine_lost(
            added=set(items_of(digest, tier, fingerprints_of(stored))),
            removed=set(items_of(digest, tier, fingerprints_of(removed))),
        )

    def engine_empties(self) -> None:
        """The engine clears its cache."""
        self.life.engine_emptied()

    def change_silently(self, *, stored: Blocks = (), removed: Blocks = (), tier: Tier = Tier.CPU, namespace: int = 0) -> None:
        """A bug: the contents change, and no number says so."""
        digest = self._digest(namespace)
        self.life.ledger.silently(
            added=items_of(digest, tier, fingerprints_of(stored)),
            removed=items_of(digest, tier, fingerprints_of(removed)),
        )
        self.life.restate()

    def _digest(self, namespace: int) -> bytes:
        return self.setup.digests[namespace]


def items_of(digest: bytes, tier: Tier, fingerprints: Fingerprints) -> list[Item]:
    """The blocks of a list, in one place."""
    return [Item(digest, tier, fingerprint) for fingerprint in fingerprints]
