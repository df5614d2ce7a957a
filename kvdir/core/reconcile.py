"""Holds what the owner says in sum against what we hold: proof that both are equal, or the exact difference, applied.

The rule. What we hold is some mixture of events, in any order (hints beyond a hole came early), with any of them lost; our
sketches are of exactly that mixture, because the index feeds them with the changes it really made. So, whatever happened,
- equal counts and digests prove that we hold the owner's set as of at_seq;
- the decoded difference leads from what we hold to that set, and afterwards the stream stands restated at at_seq,
  like after a snapshot: everything up to it is a duplicate from now on.
A statement older than something we applied (at_seq < top_seq) is left alone all the same: it would take us back, and what is
newer would have to be sent again. It can only be a latecomer of an earlier call; inside one call order is kept, and the
owner states a sum only when every event before it was sent. A sketch is decoded whole before anything is applied, and the
outcome is checked against counts and digests.

Does not: decide when to ask (repair.py does), or trust an owner further than its own stream.
Source: Eppstein, Goodrich, Uyeda, Varghese, "What's the difference?", SIGCOMM 2011. Reasons: docs/adr/0007.
"""

from __future__ import annotations

import struct
from collections import Counter

from kvdir.core.effects import RequestSketch
from kvdir.core.event import Heartbeat, OwnerCount
from kvdir.core.holders import Holder
from kvdir.core.ingest import Ingest
from kvdir.core.node import HolderKey, Stream
from kvdir.core.repair import Ask, Chance
from kvdir.core.sketches import SketchPart, SketchStatement
from kvdir.location import Tier

_TIERS = frozenset(int(tier) for tier in Tier)
_DIGEST_BYTES = 16
_ITEM_BYTES = 16
_PROMISED = slice(16, 40)  # count and digest in the header of an encoded sketch
_FIRST_FOLD = 8
_DECODED_SHARE = 0.7  # of the cells: so many differences decode nearly always (measured in `kvdir bench sketch`)


class Reconciler:
    """failures: sketches that led nowhere, by reason. repaired_blocks: differences applied. proofs: comparisons without one."""

    def __init__(self, ingest: Ingest, *, cells: int, wait_s: float) -> None:
        self._ingest = ingest
        self._wait_s = wait_s
        self._cells = cells
        self._requests = 0
        self.failures: Counter[str] = Counter()
        self.repaired_blocks = 0
        self.proofs = 0
        self.contradictions = 0

    # -- comparing -------------------------------------------------------------------------------------------------------

    def compare(self, stream: Stream, heartbeat: Heartbeat, *, now_s: float) -> None:
        """The owner's counts, and digests where it keeps them, against ours."""
        counts, cursor = heartbeat.figures.counts, stream.cursor
        if counts is None:
            return
        # Only what we know of is kept: a heartbeat can name any number of namespaces.
        keyed = (((count.namespace_digest, count.tier), count) for count in counts)
        stated = {key: count for key, count in keyed if _ours(stream, key)}
        stream.owner_counts, stream.owner_counts_seq, stream.compared = stated, heartbeat.last_seq, True
        digests = all(len(count.digest) == _DIGEST_BYTES or not count.blocks for count in counts)
        if any(count.digest for count in counts):
            stream.sketchable = digests
        if cursor.top_seq != heartbeat.last_seq:
            return
        if not digests and (not cursor.complete or cursor.applied_seq != heartbeat.last_seq):
            return
        stream.suspects = frozenset(self._differing(stream, stated))
        if not stream.suspects:
            self._agreed(stream, heartbeat.last_seq, digests=digests, now_s=now_s)
        elif cursor.applied_seq == heartbeat.last_seq:
            key = min(stream.suspects)
            surprised = cursor.complete
            self.contradictions += surprised  # once, not with every heartbeat until it is repaired
            cursor.contradicted(_words(stated.get(key), stream.holders.get(key)), now_s=now_s)
            if surprised and any(key in stream.holders and stream.holders[key].partial for key in stream.suspects):
                cursor.want_snapshot()  # its owner says what did not change: our sketch need not be one of a set (room.py)

    def _agreed(self, stream: Stream, at_seq: int, *, digests: bool, now_s: float) -> None:
        if digests:
            self._stands(stream, at_seq)
            stream.cursor.proved(at_seq, now_s=now_s)
            self.proofs += 1
            return
        # Counts alone: equal numbers are no proof of equal sets, but the end of a doubt about the number.
        for holder in stream.holders.values():
            if holder.doubt_seq <= at_seq:
                holder.doubt = ""

    def _stands(self, stream: Stream, at_seq: int) -> None:
        """Everything under the stream's holders is confirmed as of at_seq."""
        if stream.cursor.applied_seq != at_seq:
            stream.recent.forget(at_seq)
        stream.unconfirmed_blocks = 0
        stream.suspects = frozenset()
        for holder in stream.holders.values():
            holder.doubt = ""

    def _differing(self, stream: Stream, stated: dict[HolderKey, OwnerCount]) -> list[HolderKey]:
        return [
            key
            for key in stated.keys() | stream.holders.keys()
            if _comparable(stream, key) and not _equal(stated.get(key), stream.holders.get(key))
        ]

    # -- asking ----------------------------------------------------------------------------------------------------------

    def chance(self, stream: Stream, *, room: bool, now_s: float) -> Chance:
        """Whether a sketch can repair the stream as far as one knows beforehand."""
        if not stream.holders or stream.restored:
            return Chance.USELESS  # nothing to compare with: the difference is everything, and a checkpoint has no sketches
        if not stream.compared:
            # What we hold may be right (a checkpoint, an earlier call); the owner's first figures are due at once.
            return Chance.LATER if now_s - stream.opened_s < self._wait_s else Chance.USELESS
        if not stream.sketchable or _least_difference(stream) > self._cells * _DECODED_SHARE:
            return Chance.USELESS
        return Chance.NOW if room else Chance.LATER

    def ask(self, stream: Stream) -> RequestSketch:
        """As few cells as may do; after a failure all there are, and of every part."""
        self._requests += 1
        stream.sketch_id = self._requests
        parts: tuple[HolderKey, ...] = ()
        if stream.cursor.sketch_failures:
            stream.sketch_cells = self._cells
        else:
            cells, least = self._cells, _least_difference(stream)
            while cells > self._cells // _FIRST_FOLD and cells // 2 * _DECODED_SHARE >= 2 * least:
                cells //= 2
            stream.sketch_cells, parts = cells, tuple(sorted(stream.suspects))
        return RequestSketch(stream.node, stream.epoch, stream.sketch_id, stream.cursor.reason, stream.sketch_cells, parts)

    # -- applying --------------------------------------------------------------------------------------------------------

    def take(self, stream: Stream, statement: SketchStatement, *, now_s: float) -> int | None:
        """Applies the answer. Returns how many blocks differed; None if it was not asked for, or led nowhere."""
        cursor = stream.cursor
        cursor.answered(Ask.SKETCH, statement.request_id, now_s=now_s)
        if not cursor.repairing(Ask.SKETCH) or statement.request_id != stream.sketch_id:
            self.failures["unasked"] += 1
            return None
        cursor.tally(Ask.SKETCH).bytes += statement.size_bytes
        reason, changed = self._apply(stream, statement, now_s)
        if reason:
            self.failures[reason] += 1
            cursor.sketch_refused(now_s=now_s)
            return None
        self._stands(stream, statement.at_seq)
        if changed:
            stream.recent.forget(statement.at_seq)  # what came back was stored at a number that nobody knows
        self.repaired_blocks += changed
        cursor.sketch_done(statement.at_seq, now_s=now_s)
        return changed

    def _apply(self, stream: Stream, statement: SketchStatement, now_s: float) -> tuple[str, int]:
        if statement.at_seq < stream.cursor.top_seq:
            return "older-than-events", 0
        parts = {(part.namespace_digest, part.tier): part for part in statement.parts}
        if len(parts) != len(statement.parts):
            return "part-twice", 0
        differences: list[tuple[HolderKey, bytes, bytes]] = []
        for key, part in parts.items():
            if len(part.digest) != _DIGEST_BYTES:
                return "bad-digest", 0
            if not _ours(stream, key) or _equal(part, stream.holders.get(key)):
                continue
            found = self._decode(stream.holders.get(key), part, stream.sketch_cells)
            if isinstance(found, str):
                return found, 0
            differences.append((key, *found))
        changed = 0
        for key in [key for key in stream.holders if key not in parts]:
            holder = stream.holders.pop(key)
            changed += holder.claimed
            self._ingest.drop(holder)
        for key, extra, missing in differences:
            changed += (len(extra) + len(missing)) // _ITEM_BYTES
            if not self._ingest.correct(stream, key, extra, missing, now_s) or not _equal(parts[key], stream.holders[key]):
                return "contradiction", changed
        return "", changed

    def _decode(self, holder: Holder[Stream] | None, part: SketchPart, cells: int) -> tuple[bytes, bytes] | str:
        """(extra here, missing here) as packed 16-byte items, or why not."""
        if not part.encoded:
            return "part-missing"
        if part.encoded[_PROMISED] != struct.pack("<q", part.blocks & (2**63 - 1)) + part.digest:
            return "contradiction"
        ours = self._ingest.new_sketch() if holder is None else holder.sketch
        try:
            found = ours.folded(cells).difference(part.encoded)
        except ValueError:
            return "not-a-sketch"
        return "too-large" if found is None else found


def _ours(stream: Stream, key: HolderKey) -> bool:
    """Whether figures of ours are about it: other tiers and namespaces were refused, and counted, as they came."""
    return key[1] in _TIERS and key[0] in stream.namespaces


def _comparable(stream: Stream, key: HolderKey) -> bool:
    """Of a holder that lost entries there is something to compare only if its owner states digests (room.py)."""
    holder = stream.holders.get(key)
    return _ours(stream, key) and (stream.sketchable or holder is None or not holder.partial)


def _equal(stated: OwnerCount | SketchPart | None, holder: Holder[Stream] | None) -> bool:
    if holder is not None and holder.partial and holder.owner.restored:
        return False  # its sketch is of neither
    blocks = holder.claimed if holder else 0
    if stated is None:
        return blocks == 0
    if stated.blocks != blocks:
        return False
    return not stated.digest or stated.digest == (holder.sketch.digest if holder else bytes(_DIGEST_BYTES))


def _least_difference(stream: Stream) -> int:
    """By so many blocks the sets differ at least, going by the counts of the last comparison."""
    held = {key: holder.claimed for key, holder in stream.holders.items() if _ours(stream, key)}
    stated = {key: count.blocks for key, count in stream.owner_counts.items() if _ours(stream, key)}
    return max((abs(held.get(key, 0) - stated.get(key, 0)) for key in held.keys() | stated.keys()), default=0)


def _words(stated: OwnerCount | None, holder: Holder[Stream] | None) -> str:
    theirs, ours = stated.blocks if stated else 0, holder.claimed if holder else 0
    if theirs == ours:
        return f"the owner holds {theirs} blocks, and so does the directory, but others"
    return f"the owner counts {theirs} blocks where the directory has {ours}"
