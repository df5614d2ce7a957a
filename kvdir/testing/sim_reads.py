"""The read path of the replay: what a node gets from its peers, and why it did not get the rest.

The protocol of a real reader: look up, rank, ask the best node for the whole remaining list, then the next one, at most
`MAX_NOMINEES` of them. A block that was not found although some node held it is put down to one of three causes:
- unknown: the directory named no node that held it, because the event is lost or still under way;
- stale: a node that held it was named, and not asked, and a node asked before did not hold what the directory claimed;
- unasked: the same, but no claim was stale: the nominees had run out.
Does not: move time or bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvdir.core.answer import Lookup
from kvdir.core.directory import Directory
from kvdir.core.feedback import StaleReport
from kvdir.core.ranking import Nominee, rank
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from kvdir.testing.sim_node import SimNode
from kvdir.testing.sim_results import Outcome
from kvdir.testing.trace import Request

MAX_NOMINEES = 3


class PeerReads:
    """Reads of all nodes. report: takes negative feedback, and delivers it in its own time. explain: misses, which takes a look
    at every node.
    """

    def __init__(
        self,
        directory: Directory,
        nodes: Mapping[str, SimNode],
        outcome: Outcome,
        *,
        namespace_digest: bytes,
        owner_answers: bool,
        report: Callable[[StaleReport], None],
        explain: bool = True,
    ) -> None:
        self._directory = directory
        self._nodes = nodes
        self._outcome = outcome
        self._digest = namespace_digest
        self._owner_answers = owner_answers
        self._report = report
        self._explains = explain

    def read(self, reader: SimNode, request: Request, missing: Sequence[int], *, now_s: float) -> set[int]:
        """missing: positions in the request. Returns those, as places in `missing`, that some owner had."""
        wanted = request.fingerprints.select(missing)
        answer = self._directory.lookup(self._digest, wanted, now_s=now_s)
        blocks = [request.blocks[at] for at in missing]
        read = _Read(blocks, wanted, _named(answer), set(range(len(missing))))
        asked = {reader.name}
        for _ in range(MAX_NOMINEES):
            nominees = rank(answer, salt=reader.name.encode(), remaining=read.remaining, without=asked)
            if not nominees:
                break
            asked.add(nominees[0].trust.node)
            self._ask(nominees[0], read)
            if not read.remaining:
                break
        if self._explains:
            self._explain(reader, read)
        return set(range(len(missing))) - read.remaining

    def _ask(self, nominee: Nominee, read: _Read) -> None:
        """What the owner has of the list is taken; claims that it cannot meet go back to the directory."""
        owner, out = self._nodes[nominee.trust.node], self._outcome
        claims = {at for at in read.remaining if owner.name in read.named[at]}
        held = {at for at in (read.remaining if self._owner_answers else claims) if read.blocks[at] in owner.memory}
        owner.memory.touch(read.blocks[at] for at in sorted(held))
        read.remaining -= held
        absent = sorted(claims - held)
        out.probes += 1
        out.empty_probes += not held
        out.claimed_blocks += len(claims)
        out.stale_blocks += len(absent)
        if absent:
            read.met_stale = True
            fingerprints = read.wanted.select(absent)
            last_seq = owner.outbox.last_seq
            self._report(StaleReport(owner.name, nominee.trust.epoch, last_seq, self._digest, Tier.CPU, fingerprints))

    def _explain(self, reader: SimNode, read: _Read) -> None:
        out = self._outcome
        for at in read.remaining:
            block = read.blocks[at]
            holders = {node.name for node in self._nodes.values() if node is not reader and block in node.memory}
            if not holders:
                continue
            if not holders & read.named[at]:
                out.missed_unknown += 1
            elif read.met_stale:
                out.missed_stale += 1
            else:
                out.missed_unasked += 1


class _Read:
    """One read under way. named: by position, the nodes that the directory named."""

    __slots__ = ("blocks", "met_stale", "named", "remaining", "wanted")

    def __init__(self, blocks: list[int], wanted: Fingerprints, named: list[set[str]], remaining: set[int]) -> None:
        self.blocks = blocks
        self.wanted = wanted
        self.named = named
        self.remaining = remaining
        self.met_stale = False


def _named(answer: Lookup) -> list[set[str]]:
    named: list[set[str]] = [set() for _ in range(answer.asked)]
    for run in answer:
        names = {answer.nodes[node].node for node, _ in run.holders}
        for at in range(run.start, run.start + run.count):
            named[at] = names
    return named
