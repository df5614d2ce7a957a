"""Lookups of a model whose state is kept in groups: one question a group and rank, one answer in legal restore points.

    found = lookup_state(directory, namespace, fingerprints, prompt_tokens=len(tokens))
    found.points.best_tokens, found.at("node1").best_tokens, found.points.partial

Works with whatever answers lookups: `kvdir.connect`, `kvdir.attach` (from a replica, without a call), and, awaited, the aio
client. One deadline for all of it. What nobody answered, or knows, counts as not there, with the reason. Restore rule and
drawing: docs/state.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Protocol

from kvdir.client.replica_reader import nobody
from kvdir.core.answer import Lookup
from kvdir.core.state_lookup import Question, StateLookup, fold, questions
from kvdir.errors import InvalidInput, KvdirError, TooLarge
from kvdir.fingerprint import Fingerprints
from kvdir.location import MinTrust
from kvdir.namespace import Namespace

DEADLINE_S = 2.0


class Directory(Protocol):
    """kvdir.client.sync.Client, kvdir.client.attached.Attached."""

    def lookup(
        self, namespace_digest: bytes, fingerprints: Fingerprints, /, *, min_trust: MinTrust, deadline_s: float | None
    ) -> Lookup: ...


class AsyncDirectory(Protocol):
    """kvdir.client.aio.DirectoryClient."""

    def lookup(
        self, namespace_digest: bytes, fingerprints: Fingerprints, /, *, min_trust: MinTrust, deadline_s: float | None
    ) -> Awaitable[Lookup]: ...


def lookup_state(
    directory: Directory,
    namespace: Namespace,
    fingerprints: Fingerprints | Sequence[Fingerprints],
    *,
    prompt_tokens: int | None = None,
    can_trim: bool = True,
    min_trust: MinTrust = MinTrust.ANY,
    deadline_s: float = DEADLINE_S,
) -> StateLookup:
    """fingerprints: a list for each state group, or one for all of one block size; see core.state_lookup.questions.

    prompt_tokens: where the prompt ends, so that its last token is left to be computed; None: not known. can_trim: whether
    the engine can resume inside a block. Raises InvalidInput and TooLarge, nothing else.
    """
    asked, until_s = questions(namespace, fingerprints), time.monotonic() + deadline_s
    answers = []
    for question in asked:
        try:
            left_s = max(0.001, until_s - time.monotonic())
            answer = directory.lookup(question.namespace.digest, question.fingerprints, min_trust=min_trust, deadline_s=left_s)
        except KvdirError as error:
            answer = _unanswered(question, error)
        answers.append(answer)
    return fold(asked, answers, namespace, prompt_tokens=prompt_tokens, can_trim=can_trim)


async def lookup_state_async(
    directory: AsyncDirectory,
    namespace: Namespace,
    fingerprints: Fingerprints | Sequence[Fingerprints],
    *,
    prompt_tokens: int | None = None,
    can_trim: bool = True,
    min_trust: MinTrust = MinTrust.ANY,
    deadline_s: float = DEADLINE_S,
) -> StateLookup:
    """As `lookup_state`; all questions are under way at once."""
    asked = questions(namespace, fingerprints)

    async def ask(question: Question) -> Lookup:
        try:
            return await directory.lookup(
                question.namespace.digest, question.fingerprints, min_trust=min_trust, deadline_s=deadline_s
            )
        except KvdirError as error:
            return _unanswered(question, error)

    outcomes = await asyncio.gather(*map(ask, asked), return_exceptions=True)  # nobody is left behind when one raises
    answers = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        answers.append(outcome)
    return fold(asked, answers, namespace, prompt_tokens=prompt_tokens, can_trim=can_trim)


def _unanswered(question: Question, error: KvdirError) -> Lookup:
    """Raises what is the caller's own mistake."""
    if isinstance(error, InvalidInput | TooLarge):
        raise error
    return nobody(len(question.fingerprints), str(error))
