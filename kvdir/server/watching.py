"""The feed of a coordinator while somebody watches, and who does. Log and watchers: core/feed.py, core/watcher.py.

Rules: a coordinator that nobody watches has no feed, which costs nothing; the first watcher begins it, and it ends KEEP_S
after the last one went, so that one that comes back soon goes on where it was. Watchers are bounded in number; each is
bounded in memory by its credit. What changed is told LINGER_S later, and a little more with every watcher, so that a message
is worth its price. Everything here runs on the coordinator's loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdir.core.feed import Feed
from kvdir.core.feed_items import Start, Welcome
from kvdir.core.policy import ALL, Grant
from kvdir.core.sight import Digests, Sight
from kvdir.core.watcher import MIN_CREDIT_BYTES, Watcher
from kvdir.errors import InvalidInput, Overloaded, TooLarge, Unavailable
from kvdir.obs.watch_metrics import WatchFigures, WatchMetrics
from kvdir.rpc.caller import Caller
from kvdir.rpc.watch_codec import encode_item, encode_response

if TYPE_CHECKING:
    from kvdir.core.directory import Directory
    from kvdir.server.config import CoordinatorConfig

BEAT_S = 0.1
BEAT_WATCHERS = 64
KEEP_S = 60.0
LINGER_S, LINGER_MORE_S, LINGER_LIMIT_S = 0.004, 0.0005, 0.5  # so messages take the same share of a core, however many watch
DRAINING = "this coordinator is going down: watch another one, or come back"


class WatchCall:
    """One call: its watcher, and how its writer is woken."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.wake = asyncio.Event()


class Watching:
    """See the module docstring. seed: of the directory's index. now: monotonic seconds."""

    def __init__(self, directory: Directory, config: CoordinatorConfig, *, seed: int, name: str) -> None:
        self.figures = WatchFigures()
        self.calls: set[WatchCall] = set()
        self.feed: Feed | None = None
        self._directory = directory
        self._config = config
        self._seed = seed
        self._name = name
        self._idle_s = 0.0
        self._draining = False

    def now_s(self) -> float:
        return time.monotonic()

    def open(self, start: Start, tenants: Grant = ALL) -> WatchCall:
        """A watcher comes. tenants: whose namespaces it may see; of others it hears nothing, as if there were none. Raises
        Unavailable, Overloaded beyond max_watchers, InvalidInput for a start that cannot work.
        """
        if self._draining:
            raise Unavailable(DRAINING)
        if len(self.calls) >= self._config.max_watchers:
            self.figures.refused += 1
            raise Overloaded(f"{self._config.max_watchers} watchers are here already (max_watchers): watch another coordinator")
        if start.credit_bytes < MIN_CREDIT_BYTES:
            raise InvalidInput(f"a watcher grants at least {MIN_CREDIT_BYTES} bytes to begin with, not {start.credit_bytes}")
        if len(start.digests) > self._config.max_namespaces:
            raise TooLarge(
                f"{len(start.digests)} namespaces, max_namespaces is {self._config.max_namespaces}: none watches all"
            )
        now_s, config = self.now_s(), self._config
        feed = self.feed or self._begin(now_s)
        tag = _tag(tenants)
        digests = start.digests if tenants.every else Sight(tenants, start.digests, feed.tenant_of)
        start = replace(start, log_id=start.log_id ^ tag)
        welcome = Welcome(
            coordinator=self._name,
            log_id=feed.log_id ^ tag,
            seed=self._seed,
            blocks=self._blocks(digests),
            beat_interval_s=BEAT_S * (1 + len(self.calls) // BEAT_WATCHERS),
            stale_after_s=config.stale_after_s,
            expire_after_s=config.expire_after_s,
        )
        stall_s = config.watch_stall_s
        watcher = Watcher(
            feed, self._directory.index, start, welcome, encode_response, digests=digests, stall_s=stall_s, now_s=now_s
        )
        call = WatchCall(watcher)
        self.calls.add(call)
        self.figures.opened += 1
        self.figures.snapshots += watcher.snapshot
        self.figures.resumed += not watcher.snapshot
        return call

    def end(self, call: WatchCall, who: Caller) -> None:
        """The caller's right has changed: what it was told may be more, or less, than it may see now."""
        call.watcher.end(who.ended, begin_anew=True)
        call.wake.set()

    def close(self, call: WatchCall) -> None:
        """The call is over, for whatever reason."""
        self.calls.discard(call)
        self.figures.cut_off += call.watcher.cut_off
        self._idle_s = self.now_s()

    def next(self, call: WatchCall) -> bytes:
        """What to write to it now; empty: nothing, until it is woken."""
        message = call.watcher.next(
            warming=self._directory.warming, incomplete=self._directory.holders.partial > 0, now_s=self.now_s()
        )
        self.figures.sent_bytes += len(message)
        self.figures.messages += bool(message)
        return message

    def credit(self, call: WatchCall, total_bytes: int) -> None:
        call.watcher.credit(total_bytes, now_s=self.now_s())
        if call.watcher.behind:
            call.wake.set()

    def tick(self) -> None:
        """Time has passed: beats, watchers that are too slow, and the end of a feed that nobody watches."""
        if self.feed is None:
            return
        now_s = self.now_s()
        self.feed.tick(now_s)
        for call in self.calls:
            call.watcher.judge(now_s)
            if call.watcher.ended is not None or call.watcher.beat_due(now_s):
                call.wake.set()
        if not self.calls and now_s - self._idle_s > KEEP_S:
            self._directory.remove_mirror(self.feed)
            self.feed = None

    def drain(self) -> None:
        """Ends every call, with the reason; new ones are refused."""
        self._draining = True
        for call in self.calls:
            call.watcher.end(DRAINING)
            call.wake.set()

    def refresh(self, metrics: WatchMetrics) -> None:
        """Puts aside what the next scrape shows."""
        now_s = self.now_s()
        behind_s = max((call.watcher.waited_s(now_s) for call in self.calls), default=0.0)
        log_bytes = self.feed.log_bytes if self.feed else 0
        metrics.refresh(self.figures, watchers=len(self.calls), behind_s=behind_s, log_bytes=log_bytes)

    def _blocks(self, digests: Digests) -> int:
        """How many blocks a snapshot of these namespaces has at most; of all of them, exactly."""
        blocks = self._directory.index.stats().blocks
        if not digests:
            return blocks
        named = sum(holder.blocks for holder in self._directory.holders if holder.namespace.digest in digests)
        return min(named, blocks)

    def _begin(self, now_s: float) -> Feed:
        feed = self.feed = Feed(
            secrets.randbits(64) or 1, encode_item, limit_bytes=self._config.watch_log_bytes, now_s=now_s, grown=self._grown
        )
        self._directory.add_mirror(feed, now_s=now_s)
        return feed

    def _grown(self) -> None:
        linger_s = min(LINGER_S + LINGER_MORE_S * len(self.calls), LINGER_LIMIT_S)
        asyncio.get_running_loop().call_later(linger_s, self._flush)

    def _flush(self) -> None:
        if self.feed is not None:
            self.feed.settled(self.now_s())
        for call in self.calls:
            call.wake.set()


def _tag(tenants: Grant) -> int:
    """What makes the same log another one for watchers who see other parts of it: none goes on where it saw less."""
    if tenants.every:
        return 0
    return int.from_bytes(hashlib.blake2b(",".join(sorted(tenants.names)).encode(), digest_size=8).digest())
