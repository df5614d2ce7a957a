"""Capacity planning: what the configured bytes really hold, per namespace, before any memory is taken.

Pure: numbers in, numbers or refusals out. `peer-agent serve --dry-run` and the agent's start print the plan; `Arena.create`
takes `ArenaPlan.size_classes`. A share that holds no slot is a refusal: an agent that starts and stores nothing would lie
about what was configured.

Does not: look at free shared memory (arena.py does, when it takes it), hand out slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvdir.errors import ConfigError
from peer_agent.memory.layout import (
    ALIGN_BYTES,
    HEADER_BYTES,
    MAX_CLASSES,
    SUPERBLOCK_BYTES,
    SizeClass,
    lay_out,
    stride_bytes,
)

MAX_BLOCK_BYTES = (1 << 32) - 1
MAX_SPARE_SLOTS = 1 << 21
"""Of one namespace that an engine brings: the agent's own memory for a slot is 120 bytes and more, whatever the block is."""


@dataclass(frozen=True, slots=True)
class ClassRequest:
    """One namespace's wish. share: its part of the arena, relative to the other shares."""

    namespace_digest: bytes  # 32 bytes
    name: str  # for people
    block_bytes: int
    block_tokens: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class ClassPlan:
    """What one size class holds. granted = payload + header + padding + lost bytes."""

    request: ClassRequest
    size_class: SizeClass
    granted_bytes: int
    header_bytes: int
    padding_bytes: int
    lost_bytes: int

    @property
    def slots(self) -> int:
        return self.size_class.slots

    @property
    def blocks(self) -> int:
        """Blocks that fit at once; one per slot."""
        return self.size_class.slots

    @property
    def tokens(self) -> int:
        return self.slots * self.request.block_tokens

    @property
    def payload_bytes(self) -> int:
        return self.slots * self.request.block_bytes


@dataclass(frozen=True, slots=True)
class Spare:
    """Memory for namespaces that engines bring along: so much for each, and for so many. 0: none is accepted."""

    each_bytes: int = 0
    namespaces: int = 0

    @property
    def total_bytes(self) -> int:
        return self.each_bytes // ALIGN_BYTES * ALIGN_BYTES * self.namespaces

    def slots(self, block_bytes: int) -> int:
        """Blocks that one namespace gets, MAX_SPARE_SLOTS at most; 0 when not even one fits."""
        return min(MAX_SPARE_SLOTS, self.each_bytes // ALIGN_BYTES * ALIGN_BYTES // stride_bytes(block_bytes))


NO_SPARE = Spare()


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """total = superblock + all granted bytes + rounding + spare; arena_bytes is what the file will really take."""

    total_bytes: int
    arena_bytes: int
    classes: tuple[ClassPlan, ...]
    spare: Spare = NO_SPARE

    @property
    def size_classes(self) -> tuple[SizeClass, ...]:
        return tuple(plan.size_class for plan in self.classes)

    @property
    def payload_bytes(self) -> int:
        return sum(plan.payload_bytes for plan in self.classes)

    @property
    def overhead_bytes(self) -> int:
        """Configured bytes that hold no payload: superblock, headers, padding, remainders. The spare part is neither."""
        return self.total_bytes - self.spare.total_bytes - self.payload_bytes


def plan_classes(total_bytes: int, requests: Sequence[ClassRequest], spare: Spare = NO_SPARE) -> ArenaPlan:
    """Divides `total_bytes` by share; `spare` comes on top, and is all there is without requests.

    Raises ConfigError with every fault at once.
    """
    faults = _faults(requests, spare)
    if faults:
        raise ConfigError(faults)
    if not requests:
        only_bytes = SUPERBLOCK_BYTES + spare.total_bytes
        return ArenaPlan(only_bytes, only_bytes, (), spare)
    usable = total_bytes - SUPERBLOCK_BYTES
    all_shares = sum(request.share for request in requests)
    granted = [max(0, int(usable * (request.share / all_shares))) for request in requests]
    faults = [
        _too_small(request, got, total_bytes, all_shares)
        for request, got in zip(requests, granted, strict=True)
        if got < stride_bytes(request.block_bytes)
    ]
    if faults:
        raise ConfigError(faults)
    wanted = [
        SizeClass(request.namespace_digest, request.block_bytes, got // stride_bytes(request.block_bytes))
        for request, got in zip(requests, granted, strict=True)
    ]
    placed, arena_bytes = lay_out(wanted, spare_bytes=spare.total_bytes)
    plans = tuple(_plan(*row) for row in zip(requests, placed, granted, strict=True))
    return ArenaPlan(total_bytes + spare.total_bytes, arena_bytes, plans, spare)


def _plan(request: ClassRequest, size_class: SizeClass, granted: int) -> ClassPlan:
    padding = size_class.stride - HEADER_BYTES - request.block_bytes
    return ClassPlan(
        request=request,
        size_class=size_class,
        granted_bytes=granted,
        header_bytes=size_class.slots * HEADER_BYTES,
        padding_bytes=size_class.slots * padding,
        lost_bytes=granted - size_class.slots * size_class.stride,
    )


def _faults(requests: Sequence[ClassRequest], spare: Spare) -> list[str]:
    if not requests and not spare.total_bytes:
        return ["no namespace is configured; an arena needs at least one, or accept_bytes for those that engines bring"]
    faults = []
    wanted = len(requests) + spare.namespaces
    if wanted > MAX_CLASSES:
        faults.append(f"{wanted} namespaces; an arena has room for {MAX_CLASSES}, run a second agent for the rest")
    seen: dict[bytes, str] = {}
    for request in requests:
        faults.extend(_faults_of(request))
        if request.namespace_digest in seen:
            faults.append(f"{request.name}: same namespace as {seen[request.namespace_digest]}; merge the two shares")
        seen.setdefault(request.namespace_digest, request.name)
    return faults


def _faults_of(request: ClassRequest) -> list[str]:
    faults = []
    if len(request.namespace_digest) != 32:
        faults.append(f"{request.name}: a namespace digest has 32 bytes, not {len(request.namespace_digest)}")
    if not 0 < request.block_bytes <= MAX_BLOCK_BYTES:
        faults.append(f"{request.name}: block_bytes is {request.block_bytes:,}; give 1 to {MAX_BLOCK_BYTES:,}")
    if request.block_tokens < 1:
        faults.append(f"{request.name}: block_tokens is {request.block_tokens}; give the engine's block size, 1 or more")
    if not 0 < request.share < float("inf"):
        faults.append(f"{request.name}: share is {request.share}; give a positive number, or remove the namespace")
    return faults


def _too_small(request: ClassRequest, granted: int, total_bytes: int, all_shares: float) -> str:
    stride = stride_bytes(request.block_bytes)
    needed = SUPERBLOCK_BYTES + int(stride * (all_shares / request.share)) + 1
    return (
        f"{request.name}: its share of {total_bytes:,} bytes is {granted:,}, less than one slot of {stride:,} bytes "
        f"({HEADER_BYTES} header + {request.block_bytes:,} block); configure at least {needed:,} bytes, or a larger share"
    )
