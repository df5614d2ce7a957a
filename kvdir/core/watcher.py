"""The coordinator's side of one Watch call: what to say next, how much, and when to stop. Pure; the shell writes it out.

Order of what is said: welcome; the roster; then, over and over, the log as far as there is credit and, whenever that is all
there is, the next page of the snapshot. Beats come in between. What the watcher was sent is therefore always the truth as of
some position, and behind the end of the snapshot all of it (walk.py argues why).

Bounds: nothing but beats is said beyond the credit, which is capped at MAX_AHEAD_BYTES whatever was granted; so a watcher that
does not read costs its credit and a message. It ends, with the reason, when
- its position has left the log: it was too slow, and begins anew;
- something waits for it and it grants nothing for `stall_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdir.core.feed import Feed
from kvdir.core.feed_items import Beat, End, Response, Start, Welcome
from kvdir.core.sight import Digests
from kvdir.core.walk import PAGE_BLOCKS, Walk

if TYPE_CHECKING:
    from kvdir.index import BlockIndex

MESSAGE_BYTES = 256 * 2**10
"""Of one message, about; also the least credit that is worth using."""
MIN_CREDIT_BYTES = 2**20
MAX_AHEAD_BYTES = 32 * 2**20


class Watcher:
    """welcome: as it will be said, but for `snapshot`, which depends on the start. encode: a response without items.
    message_bytes: about as much goes into one message; more than any item has. page_blocks: at most, of one page. digests: what
    it hears of, where that is not what it named.

    behind: whether something waits for it. ended: why it ends, once it does; said_end: once that was said, too.
    """

    def __init__(
        self,
        feed: Feed,
        index: BlockIndex,
        start: Start,
        welcome: Welcome,
        encode: Callable[[Response], bytes],
        *,
        digests: Digests | None = None,
        stall_s: float,
        now_s: float,
        message_bytes: int = MESSAGE_BYTES,
        page_blocks: int = PAGE_BLOCKS,
    ) -> None:
        self.name = start.watcher
        self.sent_bytes = 0
        self.ended: End | None = None
        self.cut_off = False
        self.said_end = False
        self._feed = feed
        self._encode = encode
        self._digests = start.digests if digests is None else digests
        self._beat_s = welcome.beat_interval_s
        self._stall_s = stall_s
        self._message_bytes = message_bytes
        self._credit_bytes = 0
        self._heard_credit_bytes = 0
        self._began_s = now_s
        self._credit_s = now_s
        self._beat_due_s = now_s
        head = feed.head
        resumes = start.log_id == feed.log_id and start.position > 0 and feed.reaches(start.position)
        self.position = start.position if resumes else head
        self._walk = None if resumes else Walk(feed, index, self._digests, now_s=now_s, page_blocks=page_blocks)
        self.snapshot = not resumes
        self._first: bytes = encode(Response(welcome=replace(welcome, snapshot=self.snapshot)))
        self.credit(start.credit_bytes, now_s=now_s)

    @property
    def behind(self) -> bool:
        return bool(self._first) or self._walk is not None or self.position < self._feed.head

    def waited_s(self, now_s: float) -> float:
        """How long at most the oldest item that it was not sent has waited; the roster waits since the watch began."""
        if self._walk is not None and self._walk.has_roster:
            return now_s - self._began_s
        return self._feed.waited_s(self.position, now_s)

    def credit(self, total_bytes: int, *, now_s: float) -> None:
        """The watcher takes so many bytes in all. Less than before: ignored."""
        if total_bytes > self._heard_credit_bytes:
            self._heard_credit_bytes = total_bytes
            self._credit_bytes = min(total_bytes, self.sent_bytes + MAX_AHEAD_BYTES)
            self._credit_s = now_s

    def beat_due(self, now_s: float) -> bool:
        return now_s >= self._beat_due_s

    def end(self, reason: str, *, begin_anew: bool = False) -> None:
        """The last word, from outside; the first such word counts."""
        if self.ended is None:
            self.ended = End(reason, begin_anew)

    def judge(self, now_s: float) -> None:
        """Time has passed: is it too slow? Also while a message to it is being written."""
        if self.ended is not None:
            return
        if not self._feed.reaches(self.position):
            self.cut_off = True
            self.end("too slow: what comes next for you has left the log (watch_log_bytes); begin anew", begin_anew=True)
        elif now_s - self._credit_s > self._stall_s and self._room() < self._message_bytes and self.behind:
            self.cut_off = True
            self.end(f"no credit for {self._stall_s:g} s although something waits for you; come back when you can read")

    def next(self, *, warming: bool, incomplete: bool, now_s: float) -> bytes:
        """The next message, empty when there is nothing to say now. Behind one with the end there is none."""
        head = self._feed.head  # everything told so far is in the log from here on, whatever that lets go of
        self.judge(now_s)
        if self.ended is not None:
            self.said_end = True
            return self._encode(Response(end=self.ended))
        parts = [self._first] if self._first else []
        self._first = b""
        room = min(self._room(), self._message_bytes)
        if room == self._message_bytes:
            parts += self._contents(room, now_s)
        if self.beat_due(now_s):
            self._beat_due_s = now_s + self._beat_s
            beat = Beat(head, self.waited_s(now_s), warming, incomplete, self._heard_credit_bytes)
            parts.append(self._encode(Response(beat=beat)))
        message = b"".join(parts)
        self.sent_bytes += len(message)
        return message

    def _room(self) -> int:
        return self._credit_bytes - self.sent_bytes

    def _contents(self, room: int, now_s: float) -> list[bytes]:
        if self._walk is not None and self._walk.has_roster:
            return [self._walk.roster(room)]
        taken = self._feed.take(self.position, room, self._digests)
        assert taken is not None, "judge lets nobody come here who has fallen off"
        parts = [taken.data] if taken.data else []
        moved, self.position = taken.position != self.position, taken.position
        if self._walk is not None and self.position == self._feed.head:
            page = self._walk.page(room - len(taken.data), now_s=now_s)
            if page is not None:
                parts.append(self._feed.encode(page))
            if self._walk.done:
                self._walk, moved = None, True
        if moved:
            parts.append(self._encode(Response(position=self.position)))
        return parts
