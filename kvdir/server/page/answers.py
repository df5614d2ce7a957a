"""Answers to what the page asks: a node in full, who holds pasted blocks, what became of a request. On HTTP threads.

Each asks the coordinator's loop for values, for ANSWER_S at most, and makes the document here. Raises KvdirError with words
for people.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import msgspec

from kvdir.core.views import NamespaceView
from kvdir.core.who_holds import WhoHolds
from kvdir.errors import DeadlineExceeded, InvalidInput, Unavailable
from kvdir.server.page.copies import PageSource
from kvdir.server.page.document import explained, node_document, recent_document
from kvdir.server.page.question import Question, read_question

T = TypeVar("T")

ANSWER_S = 3.0
MAX_NAMESPACES = 64
"""So many are tried for blocks of which nobody says the namespace."""


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """Body of an explanation's request. namespace: digest in hexadecimal, or ""."""

    text: str
    namespace: str = ""


class Answers:
    """See the module docstring."""

    def __init__(self, source: PageSource, loop: asyncio.AbstractEventLoop) -> None:
        self._source = source
        self._loop = loop

    def node(self, name: str) -> dict[str, Any]:
        """Everything about one node. InvalidInput when there is none of that name."""
        return self._wait(self._node(name))

    def explain(self, body: bytes) -> dict[str, Any]:
        """{"lookups": [...]} of who holds the blocks, a namespace each, or {"request": ...} of a lookup that had this name."""
        try:
            asked = msgspec.json.decode(body, type=Asked)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"not a question: {error}") from error
        return self._wait(self._explain(read_question(asked.text), asked.namespace))

    async def _node(self, name: str) -> dict[str, Any]:
        copy = await self._source.copy()
        view = next((view for view in copy.nodes if view.trust.node == name), None)
        if view is None:
            raise InvalidInput(f"no node {name[:100]!r} is known here (any more)")
        story, now_s = await self._source.story(name)
        return node_document(view, copy, story, now_s=now_s)

    async def _explain(self, question: Question, namespace: str) -> dict[str, Any]:
        copy, fingerprints = await self._source.copy(), question.fingerprints
        found = self._source.lookup(question.name)
        if found is not None:
            return {"request": recent_document(found, now_s=copy.now_s)}
        if fingerprints is None:
            raise InvalidInput(
                f"{question.name!r} is no fingerprint, and no recent lookup had it as request id or trace id: the newest few "
                "hundred are remembered that this process answered itself (replicas and lookup workers tell it of none)"
            )
        known = {view.digest: view for view in copy.status.namespaces}
        if namespace:
            wanted = [digest for digest in known if digest.hex().startswith(namespace.lower())]
            if len(wanted) != 1:
                raise InvalidInput(f"{len(wanted)} namespaces that are announced here begin with {namespace[:64]!r}")
        else:
            wanted = list(known)[:MAX_NAMESPACES]
        if not wanted:
            raise InvalidInput("no namespace is announced here yet: there is nothing to look up in")
        answers = []
        for digest in wanted:
            answers.append(await self._source.explain(digest, fingerprints))
            await asyncio.sleep(0)  # others have their turn
        return {"lookups": _told(answers, known), "tried": len(wanted), "known": len(known)}

    def _wait(self, question: Coroutine[Any, Any, T]) -> T:
        try:
            asked = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError as error:
            question.close()
            raise Unavailable("this coordinator is going down") from error
        try:
            return asked.result(ANSWER_S)
        except (TimeoutError, CancelledError) as error:
            raise DeadlineExceeded(f"the coordinator did not answer within {ANSWER_S:g} s") from error
        finally:
            asked.cancel()


def _told(answers: list[WhoHolds], known: dict[bytes, NamespaceView]) -> list[dict[str, Any]]:
    """Those in which somebody has some of the blocks, most first; if nobody has, all that were tried."""
    found = sorted((answer for answer in answers if answer.claims), key=lambda answer: -answer.hits)
    return [explained(answer, known.get(answer.namespace_digest)) for answer in found or answers]
