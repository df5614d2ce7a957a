"""A coordinator that keeps no blocks: sessions of the agents that publish to it, and answers from the store it shares.

Rules: a hello takes the stream's writer token, so whoever wrote before is fenced in the store itself, however late its writes
come; order between epochs is by registration in the store. Nobody is welcomed while the store is away: the agent's ring holds
what it has to say. One event loop, no lock; lookups and feedback are in questions.py, what a call writes is in session.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

from kvdir.core.admission import Counters, Hello, Refused, fence_words
from kvdir.core.effects import RequestReplay, RequestSnapshot
from kvdir.core.fleet import SavedNode
from kvdir.core.namespaces import Announced
from kvdir.core.policy import Grant
from kvdir.core.recent_lookups import RecentLookups
from kvdir.core.repair import Ask, new_tallies
from kvdir.core.shared_stream import SharedStream
from kvdir.core.store_steps import Held
from kvdir.core.stream import StreamCursor
from kvdir.core.views import NamespaceView, StatusView
from kvdir.errors import ConfigError, InvalidInput, Overloaded, Unavailable
from kvdir.location import StreamState
from kvdir.obs.logs import say
from kvdir.obs.store_metrics import StoreCoordinatorMetrics
from kvdir.rpc.gate import Gate
from kvdir.rpc.saved_codec import decode_saved
from kvdir.rpc.tls import ServerTls
from kvdir.server.config import CoordinatorConfig
from kvdir.server.connections import Connection, Connections
from kvdir.server.coordinator import fenced_response, repair_request
from kvdir.server.publishers import Publisher
from kvdir.server.rights import coordinator_security
from kvdir.server.shared.link import StoreLink
from kvdir.server.shared.questions import Questions
from kvdir.server.shared.session import Session
from kvdir.store.base import BlockStore, Fenced, StoreLost, StoreRefused, Taken
from kvdir.store.url import StoreUrl

log = logging.getLogger("kvdir.coordinator")


class SharedCoordinator:
    """What the services are about; the same face as server/coordinator.py to whoever runs one (server/serve.py)."""

    def __init__(self, config: CoordinatorConfig, store: BlockStore, *, name: str, version: str) -> None:
        self.config = config
        self.name = name
        self.version = version
        self.draining = False
        self.place = None
        self.tls: ServerTls | None = None
        self.on_drain: list[Callable[[], None]] = []
        self.connections = Connections()
        self.security = coordinator_security(config)
        self.metrics = StoreCoordinatorMetrics()
        self.recent = RecentLookups()
        self.security.watched_by(self.metrics.tally)
        self.rejected: Counter[str] = Counter()
        self.repairs = new_tallies()
        self.link = StoreLink(store, config, on_emptied=self._emptied)
        self.sessions: dict[str, Session] = {}
        self.questions = Questions(self.link, config, self.sessions)
        self.started_s = time.monotonic()
        self.limits = config.limits()
        self._store_words = str(StoreUrl.parse(config.store))
        self._numbers = 0
        self._applied_before = 0
        self._reported: dict[Session, StreamState] = {}
        self._reading: asyncio.Task[None] | None = None

    @property
    def counters(self) -> Counters:
        return self.questions.counters

    @property
    def gate(self) -> Gate:
        return self.security.gate

    def now_s(self) -> float:
        return time.monotonic()

    # -- life ------------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begins to read the store. Raises ConfigError when it cannot work until somebody changes something."""
        try:
            await self.link.open()
        except StoreRefused as error:
            await self.link.close()
            raise ConfigError([f"store: {error}"]) from error
        self._reading = asyncio.create_task(self.link.run(), name="store")

    async def close(self) -> None:
        """Ends what `open` began."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self.link.close()

    def drain(self) -> None:
        """Ends every stream after its last acknowledgement; agents go on at another coordinator of the store."""
        if self.draining:
            return
        self.draining = True
        for told in self.on_drain:
            told()
        for connection in self.connections:
            connection.end()

    def tick(self) -> None:
        """Time has passed: repair, staleness, acknowledgements. Raises when nobody reads the store any more."""
        if self._reading is not None and self._reading.done():
            self._reading.result()
        now_s = self.now_s()
        snapshots = sum(session.stream.cursor.repairing_snapshot for session in self.sessions.values())
        for session in list(self.sessions.values()):
            self._report(session)
            if session.ready(now_s):
                snapshots += self._attend(session, now_s, may_snapshot=snapshots < self.config.max_snapshots)
        self._warm(now_s)
        for connection in self.connections:
            connection.flush()

    def not_ready(self) -> str:
        """Why nobody should be sent here, in words; empty when all is well."""
        if self.draining:
            return "draining"
        if self.link.away:
            return f"the store is away: {self.link.away}"
        return "warming: some node has not restated what it holds since the store is new" if self.questions.warming else ""

    def remark(self) -> str:
        incomplete = "(incomplete: the store evicts blocks for want of memory)" if self.link.evicting else ""
        return " ".join(filter(None, (incomplete, self.security.remark())))

    # -- streams ---------------------------------------------------------------------------------------------------------

    async def hello(self, hello: Hello, publisher: Publisher) -> tuple[Session, int, tuple[Announced, ...]] | Refused:
        """(session, number to resume after, namespaces it may not store). publisher: who says it. Raises InvalidInput,
        Overloaded, Unavailable, and what the store raises.
        """
        if not hello.node or not hello.epoch:
            raise InvalidInput("hello needs a node name and an epoch other than 0")
        if self.link.away:
            raise Unavailable(f"the store is away: {self.link.away}")
        await self._make_room(hello.node)
        try:
            call = self.link.store.take(hello.node, hello.epoch, deadline_s=self.config.store_timeout_s)
            taken = await self.link.timed("take", call)
        except Fenced:
            return await self._newer(hello.node, hello.epoch)
        except StoreLost:
            await self.link.fresh()  # learns what became of it
            raise
        before = decode_saved(taken.record) if taken.record else None
        if before is not None and before.epoch == hello.epoch and before.left:
            return Refused(hello.epoch, f"node {hello.node} said goodbye in this epoch")
        self._end_older(hello)
        return await self._begin(hello, taken, before, publisher)

    async def _make_room(self, node: str) -> None:
        """When the table of nodes is full, those who live go before those who are gone. Raises Overloaded."""
        fleet = self.link.fleet
        if fleet.saved(node) is not None or len(fleet) < self.config.max_streams:
            return
        gone = fleet.longest_gone(self.now_s())
        if gone is None:
            raise Overloaded(f"more than {self.config.max_streams} nodes: raise max_streams")
        await self.link.forget(*gone)

    async def _begin(
        self, hello: Hello, taken: Taken, before: SavedNode | None, publisher: Publisher
    ) -> tuple[Session, int, tuple[Announced, ...]]:
        """Goes on where the coordinator before us stood, as far as it is known."""
        now_s = self.now_s()
        cursor = StreamCursor(self.limits.repair, now_s=now_s, tallies=self.repairs)
        stream = SharedStream(hello.node, hello.epoch, cursor, self.rejected)
        self._numbers += 1
        connection = Connection(stream, self._numbers, ack_every=max(1, self.config.credit_events // 8))
        session = Session(
            self.link,
            stream,
            taken.writer,
            connection,
            coordinator=self.name,
            timeout_s=self.config.store_timeout_s,
            save_every_s=self.config.heartbeat_interval_ms / 1000,
            publisher=publisher,
        )
        foreign = await session.announce(hello)
        await self._inherit(stream, taken, before, publisher.stores)
        resumable = before is not None and before.epoch == hello.epoch and before.resumable
        position = taken.position.seq if taken.position and resumable else None
        resume_seq = stream.open(hello.last_seq, position=position, now_s=self.now_s())
        newer = self.sessions.get(hello.node)
        if newer is not None and newer.token > session.token:
            raise Unavailable("another call of this stream was welcomed meanwhile")
        self.sessions[hello.node] = session
        self.link.fleet.own(stream)
        return session, resume_seq, foreign

    async def _inherit(self, stream: SharedStream, taken: Taken, before: SavedNode | None, stores: Grant) -> None:
        """The holders that the epoch has in the store already. What a snapshot had not finished is given up, and what the owner
        may not store any more.
        """
        if any(line.namespace not in stream.namespaces for line in taken.holders):
            await self.link.read_namespaces()
        for line in taken.holders:
            known = self.link.namespaces.get(line.namespace)
            if known is None or not line.visible or known.namespace.tenant not in stores:
                stream.doomed.append(line.number)
                continue
            stream.namespaces[line.namespace] = known
            stream.holders[line.namespace, line.tier] = Held(line.number, known, line.tier)
        numbers = [held.number for held in stream.holders.values()]
        if not numbers:
            return
        counts = await self.link.store.counts(numbers, deadline_s=self.config.store_timeout_s)
        for held in stream.holders.values():
            held.blocks = counts.blocks.get(held.number, 0)
        confirmed = before.view.trust.confirmed if before and before.epoch == stream.epoch else 0.0
        stream.unconfirmed_blocks = round((1 - confirmed) * sum(held.blocks for held in stream.holders.values()))

    def ended(self, session: Session) -> None:
        """Its call is over."""
        stream = session.stream
        stream.cursor.close(now_s=self.now_s())
        if self.sessions.get(stream.node) is session:
            del self.sessions[stream.node]
        saved = decode_saved(session.record) if session.record else None
        self.link.fleet.disown(stream, saved, token=session.token, saved_s=session.saved_s)
        self._reported.pop(session, None)
        self._applied_before += stream.applied
        self.counters.snapshots_applied += session.snapshots_applied

    async def overtaken(self, session: Session) -> Refused:
        """The store says that another writer has the stream. Refused: by a newer epoch; otherwise raises Unavailable."""
        self.counters.fenced += 1
        return await self._newer(session.stream.node, session.stream.epoch)

    async def _newer(self, node: str, epoch: int) -> Refused:
        await self.link.fresh()
        newer = self.link.epochs.get(node, epoch)
        if newer != epoch:
            return Refused(newer, fence_words(node, newer))
        saved = self.link.fleet.saved(node)
        raise Unavailable(
            f"coordinator {saved.coordinator if saved else '(unknown)'} shares this store and has taken over the stream of "
            f"{node}: publish to one of them at a time"
        )

    def _end_older(self, hello: Hello) -> None:
        older = self.sessions.get(hello.node)
        if older is None:
            return
        epoch = older.stream.epoch
        fenced = fenced_response(epoch, hello.epoch, fence_words(hello.node, hello.epoch)) if epoch != hello.epoch else None
        self.counters.fenced += fenced is not None
        older.connection.end(fenced)

    def _emptied(self, reason: str) -> None:
        say(log, logging.WARNING, "streams begin anew", reason=reason)
        for connection in self.connections:
            connection.end()

    def _attend(self, session: Session, now_s: float, *, may_snapshot: bool) -> bool:
        """Deadlines of one stream. Returns whether a snapshot was asked for."""
        stream, session.attended_s = session.stream, now_s
        ask = stream.tick(now_s=now_s, stale_after_s=self.config.stale_after_s, may_snapshot=may_snapshot)
        if ask is Ask.REPLAY:
            cursor = stream.cursor
            session.connection.say(repair_request(RequestReplay(stream.node, stream.epoch, cursor.next_seq, cursor.top_seq)))
        elif ask is Ask.SNAPSHOT:
            request = RequestSnapshot(stream.node, stream.epoch, stream.snapshot_id, stream.cursor.reason)
            session.connection.say(repair_request(request))
        if stream.doomed:
            session.nudge()
        return ask is Ask.SNAPSHOT

    def _report(self, session: Session) -> None:
        stream, before = session.stream, self._reported.get(session)
        after = stream.state
        if before is after:
            return
        self._reported[session] = after
        session.nudge()
        say(
            log, logging.INFO if after is StreamState.SYNCED else logging.WARNING, "stream", node=stream.node,
            epoch=f"{stream.epoch:016x}", before=before.name if before else "new", after=after.name,
            reason=stream.reason,
        )  # fmt: skip

    # -- operators -------------------------------------------------------------------------------------------------------

    @property
    def events_applied(self) -> int:
        return self._applied_before + sum(session.stream.applied for session in self.sessions.values())

    def status(self) -> StatusView:
        """The directory as a whole."""
        now_s = self.now_s()
        live = [view for view in self.link.fleet.views(now_s) if view.trust.state is not StreamState.FENCED]
        return StatusView(
            version=self.version,
            coordinator=self.name,
            uptime_s=now_s - self.started_s,
            warming=self.questions.warming,
            blocks=sum(holding.blocks.value for view in live for holding in view.holdings),
            index_bytes=self.link.health.used_bytes,
            streams_synced=sum(view.trust.state is StreamState.SYNCED for view in live),
            streams_total=len(live),
            namespaces=tuple(
                NamespaceView(known.digest, known.namespace.canonical(), known.block_bytes, known.namespace.block_tokens)
                for known in self.link.namespaces
            ),
            lookups=self.counters.lookups,
            lookup_blocks=self.counters.lookup_blocks,
            lookup_hits=self.counters.lookup_hits,
            events_applied=self.events_applied,
            events_rejected=dict(self.rejected),
            stale_reports=self.counters.stale_reports,
            stale_reports_ignored=self.counters.stale_reports_ignored,
            store=self._store_words,
            store_fault=self.link.away,
        )

    def gather_metrics(self) -> Iterator[None]:
        """Puts aside what the next scrape shows, in steps: what runs may do something else between them."""
        yield from self.metrics.gather(self)

    def _warm(self, now_s: float) -> None:
        """Until every live node has restated what it holds since the store is new to us; away from the store, too."""
        link = self.link
        if link.opened_s is None or link.away:
            self.questions.warming = True
            return
        age_s = now_s - link.opened_s
        settled = link.fleet.restated(now_s) if len(link.fleet) else age_s >= self.limits.warm_up_s
        self.questions.warming = age_s < self.limits.warm_limit_s and not settled
