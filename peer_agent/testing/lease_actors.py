"""Who reads and writes an owner's memory in the lease models. Scripts are cut wherever somebody else may come in between.

    Writer    reserve | first half | second half | commit         an engine: own session, lease, presence lock
    Fetcher   reserve | first half | second half | commit         the agent's read from a peer; late: quarantine, settle
    Reader    lock | first half | second half, verify | unlock     an engine, or a peer over tcp or shm
    Clock     tick ...        Evictor   evict or discard        Restart   a new life of the agent on the same path

Every step is what one process does without the others: a call that the owner serves, or one memcpy. After its last step an
actor forgets what it knew, so that states that differ only in that are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from peer_agent.core.inventory import AGENT, PEERS
from peer_agent.testing.lease_world import Memory, Violation, World


@dataclass(slots=True, kw_only=True)
class Actor:
    """Somebody with a script. number: given by World.add."""

    number: int = 0
    at: int = 0

    @property
    def script(self) -> tuple[Callable[[World], object], ...]:
        raise NotImplementedError

    @property
    def done(self) -> bool:
        return self.at >= len(self.script)

    def step(self, world: World) -> None:
        act = self.script[self.at]
        self.at += 1
        act(world)
        if self.done:
            self.forget()

    def forget(self) -> None:
        """Of what it knew, nothing matters any more: states that differ only in that are equal."""


@dataclass(slots=True, kw_only=True)
class Writer(Actor):
    """An engine that stores blocks. vanishes: it is lost after its first half, and its late write comes nevertheless."""

    blocks: tuple[int, ...]
    lease_s: float = 2.0
    vanishes: bool = False
    gives_up: bool = False
    reservation: int = 0
    granted: dict[int, int] = field(default_factory=dict)
    memory: Memory | None = None

    @property
    def script(self) -> tuple[Callable[[World], object], ...]:
        if self.vanishes:
            return (self.reserve, self.write_first, self.vanish, self.write_second, self.stop)
        return (self.reserve, self.write_first, self.write_second, self.end)

    @property
    def session(self) -> int:
        return self.number

    def forget(self) -> None:
        self.reservation, self.granted, self.memory = 0, {}, None

    def reserve(self, world: World) -> None:
        world.open_session(self.session)
        self.memory = world.memory
        self.reservation, self.granted = world.reserve(self.blocks, session=self.session, lease_s=self.lease_s)

    def write_first(self, world: World) -> None:
        self._write(world, 0)

    def write_second(self, world: World) -> None:
        self._write(world, 1)

    def _write(self, world: World, half: int) -> None:
        assert self.memory is not None
        for slot, block in self.granted.items():
            world.write(self.memory, slot, half, block)

    def end(self, world: World) -> None:
        if not self._in_this_life(world):
            return
        if self.gives_up:
            world.abort(self.reservation, session=self.session)
        else:
            world.commit(self.reservation, session=self.session)
        world.end_session(self.session, writing=False)

    def vanish(self, world: World) -> None:
        if self._in_this_life(world):
            world.end_session(self.session, writing=True)

    def stop(self, world: World) -> None:
        if self._in_this_life(world):
            world.settle_session(self.session)

    def _in_this_life(self, world: World) -> bool:
        return self.memory is world.memory


@dataclass(slots=True, kw_only=True)
class Fetcher(Actor):
    """The agent reads blocks from a peer. late: the deadline comes first, and the transfer goes on writing for a while.

    hedges: the number of another Fetcher, whose blocks it reads from a second peer while that one has not ended.
    """

    blocks: tuple[int, ...]
    late: bool = False
    hedges: int = 0
    reservation: int = 0
    granted: dict[int, int] = field(default_factory=dict)
    memory: Memory | None = None

    @property
    def script(self) -> tuple[Callable[[World], object], ...]:
        if self.late:
            return (self.reserve, self.write_first, self.give_up, self.write_second, self.settle)
        return (self.reserve, self.write_first, self.write_second, self.commit)

    def forget(self) -> None:
        self.reservation, self.granted, self.memory = 0, {}, None

    def reserve(self, world: World) -> None:
        self.memory = world.memory
        first = world.actors[self.hedges - 1] if self.hedges else self
        twin_of = first.reservation if isinstance(first, Fetcher) and first.memory is world.memory else 0
        if not self.hedges or world.inventory.is_open(twin_of):
            self.reservation, self.granted = world.reserve(self.blocks, session=AGENT, lease_s=1.0, twin_of=twin_of)

    def write_first(self, world: World) -> None:
        self._write(world, 0)

    def write_second(self, world: World) -> None:
        self._write(world, 1)

    def _write(self, world: World, half: int) -> None:
        if self.memory is world.memory:  # the agent's transfers end with the agent
            for slot, block in self.granted.items():
                world.write(world.memory, slot, half, block)

    def commit(self, world: World) -> None:
        """What arrived, then the rest is given back, as fetch.py does it."""
        if self.memory is world.memory:
            world.commit(self.reservation, session=AGENT)
            world.abort(self.reservation, session=AGENT)

    def give_up(self, world: World) -> None:
        if self.memory is world.memory:
            world.quarantine(self.reservation)

    def settle(self, world: World) -> None:
        if self.memory is world.memory:
            world.settle(self.reservation)


@dataclass(slots=True, kw_only=True)
class Reader(Actor):
    """Somebody who reads blocks under a lock. plane: "tcp" or "shm" for a peer; "engine" reads as shm does, in its session."""

    blocks: tuple[int, ...]
    plane: str = "tcp"
    lease_s: float = 2.0
    lock: int = 0
    found: dict[int, tuple[int, int]] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    mapped: Memory | None = None
    epoch: int = 0

    @property
    def script(self) -> tuple[Callable[[World], object], ...]:
        return (self.take, self.copy_first, self.copy_second, self.give_back)

    @property
    def session(self) -> int:
        return self.number if self.plane == "engine" else PEERS

    def forget(self) -> None:
        self.lock, self.found, self.copies, self.mapped, self.epoch = 0, {}, {}, None, 0

    def take(self, world: World) -> None:
        if self.session != PEERS:
            world.open_session(self.session)
        self.mapped, self.epoch = world.memory, world.memory.epoch
        self.lock, self.found = world.lock(self.blocks, session=self.session, lease_s=self.lease_s)

    def copy_first(self, world: World) -> None:
        """Header, grant and first half of each block; what is refused is not copied."""
        memory = self._reached(world)
        for block, (slot, generation) in self.found.items():
            refused = self.plane == "tcp" and not world.serves(self.lock, slot)
            if memory is None or refused or (memory.generations[slot], memory.names[slot]) != (generation, block):
                continue
            self.copies[block] = memory.halves[slot][0]
            self.mapped = memory

    def copy_second(self, world: World) -> None:
        """The second half, and the generation again: OK or torn."""
        memory = self.mapped
        assert memory is not None
        if self.plane == "tcp" and memory is not world.memory:
            return  # the connection went with the owner
        for block, first in self.copies.items():
            slot, generation = self.found[block]
            second = memory.halves[slot][1]
            if world.rules.readers_look_again and memory.generations[slot] != generation:
                continue
            if (first, second) != (block, block):
                raise Violation(f"a read of block {block} by {self.plane} was accepted with bytes of {first} and {second}")
            world.accepted += 1

    def give_back(self, world: World) -> None:
        """Late or not; after a restart the number means nothing to the owner."""
        if self.session == PEERS:
            world.unlock(self.lock, session=PEERS)
        elif world.inventory.is_attached(self.session):
            world.unlock(self.lock, session=self.session)
            world.end_session(self.session, writing=False)

    def _reached(self, world: World) -> Memory | None:
        """Whose memory a copy that begins now would come from; None: refused."""
        memory = world.memory if self.plane == "tcp" else self.mapped
        return memory if memory is not None and memory.epoch == self.epoch else None


@dataclass(slots=True, kw_only=True)
class Clock(Actor):
    """Time passes, in ticks."""

    ticks_s: tuple[float, ...] = (1.0, 1.0, 1.0)

    @property
    def script(self) -> tuple[Callable[[World], object], ...]:
        return tuple((lambda world, step_s=step_s: world.tick(step_s)) for step_s in self.ticks_s)


@dataclass(slots=True, kw_only=True)
class Evictor(Actor):
    """Somebody wants blocks gone: a quota (`discards` empty), or a verification that failed."""

    discards: tuple[int, ...] = ()

    @property
    def script(self) -> tuple[Callable[[World], object], ...]:
        return ((lambda world: world.discard(self.discards)) if self.discards else (lambda world: world.evict(1)),)


@dataclass(slots=True, kw_only=True)
class Restart(Actor):
    @property
    def script(self) -> tuple[Callable[[World], object], ...]:
        return (World.restart,)
