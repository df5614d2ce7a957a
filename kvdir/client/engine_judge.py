"""Looks at what an engine says, and at who says nothing, for what people should know: set-ups that work and never hit.

Rules: every finding says what was seen, what it means, and what to set; token ids are looked at once, at the door, and not
kept. Does not: change what is taken, or whether it is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from kvdir.client.engine_findings import FindingKind, Findings
from kvdir.client.engine_options import EngineOptions
from kvdir.client.engine_sources import EngineSource, switch_on
from kvdir.engines import DecodedBatch, Door, Reason, Stored, told_scheme

BlockSizes = Mapping[str, Collection[int]]
"""In tokens, by model."""
_OF_A_LIFE = (
    FindingKind.LOST, FindingKind.REJECTED, FindingKind.PROBE, FindingKind.BLOCK_SIZE, FindingKind.ADAPTER, FindingKind.SALT,
    FindingKind.RANK, FindingKind.FENCED,
)  # fmt: skip


class Judge:
    """Of one stream. expected: block sizes by model, of what else is served on this node. mismatch: of this life, in words."""

    def __init__(
        self, engine: EngineOptions, source: EngineSource, findings: Findings, *, expected: Callable[[], BlockSizes]
    ) -> None:
        self._engine = engine
        self._source = source
        self._findings = findings
        self._expected = expected
        self.begin()

    def begin(self) -> None:
        """A new life, which may be set up otherwise: nothing is known of what it says."""
        self._findings.gone(*_OF_A_LIFE)
        self.door = Door(self._fits)
        self.mismatch = ""

    def look(self, batch: DecodedBatch, now_s: float) -> None:
        """At a batch that was decoded."""
        if batch.mismatch:
            self.mismatch = batch.mismatch
            self._findings.found(FindingKind.PROBE, batch.mismatch, now_s=now_s)
        rank = self._source.rank
        if rank is not None and batch.dp_rank is not None and batch.dp_rank != rank:
            words = (
                f"{self._source.endpoint} is that of rank {batch.dp_rank}, not of rank {rank}: give each rank its own endpoint"
            )
            self._findings.found(FindingKind.RANK, words, now_s=now_s)
        expected = self._expected()
        for event in batch.events:
            if isinstance(event, Stored):
                self._look_at_stored(event, expected.get(event.model or self._source.model, ()), now_s)

    def _look_at_stored(self, event: Stored, expected: Collection[int], now_s: float) -> None:
        if expected and event.block_tokens and event.block_tokens not in expected:
            sizes = " or ".join(str(size) for size in sorted(expected))
            words = (
                f"the engine has blocks of {event.block_tokens} tokens, the namespace served here for the same model "
                f"{sizes}: no block of one is one of the other; start the engine with --block-size {sizes}, or "
                f"serve a namespace with block_tokens = {event.block_tokens}"
            )
            self._findings.found(FindingKind.BLOCK_SIZE, words, now_s=now_s)
        if self._engine.salted and not event.parent and not event.salted and event.packed:
            words = (
                "a sequence came without a cache salt although salted=required: any tenant can find out that it is cached; "
                "let the gateway set cache_salt in every request"
            )
            self._findings.found(FindingKind.SALT, words, now_s=now_s)

    def rejected(self, rejected: Mapping[Reason, int], now_s: float) -> None:
        """These events were not taken."""
        for reason, count in rejected.items():
            kind = FindingKind.ADAPTER if reason is Reason.LORA_WITHOUT_NAME else FindingKind.REJECTED
            self._findings.found(kind, reason.words, now_s=now_s, count=count)

    def _fits(self, tokens: Sequence[int], block_tokens: int, first_hash: bytes) -> str:
        """The door's question: whether the engine hashes as we were told. Nothing of the tokens is kept."""
        from kvdir.hashing import explain_mismatch

        scheme = told_scheme(self._engine.hash_scheme, len(first_hash))
        seed, model = self._engine.hash_seed, self._source.model
        return explain_mismatch(
            first_hash, scheme=scheme, seed=seed, block_tokens=block_tokens, tokens=np.asarray(tokens), model=model
        )

    def fenced(self, reason: str, now_s: float) -> None:
        """Somebody else publishes under this name."""
        words = f"{reason}. Give every engine a name of its own on its node (name=), or stop the other agent that follows it"
        self._findings.found(FindingKind.FENCED, words, now_s=now_s)

    def nobody(self) -> str:
        """In words: the subscription has no other end."""
        source = self._source
        if source.bind:
            return f"no engine has connected to {source.endpoint}: its endpoint must be this address, without '*'"
        fix = switch_on(self._engine.dialect)
        return f"nobody serves {source.endpoint}: is the engine running, with its events on? If not, {fix}"

    def silent(self) -> str:
        """In words: it has, and nothing comes."""
        topic = f", with topic {self._source.topic!r}" if self._source.topic else ""
        return (
            f"connected to {self._source.endpoint} for {self._engine.quiet_s:g} s and no event came: the engine has had no "
            f"request, or this is not its event endpoint, or events are off ({switch_on(self._engine.dialect)}{topic})"
        )
