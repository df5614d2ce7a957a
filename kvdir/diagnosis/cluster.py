"""Checks of a cluster, over what its coordinators say. Pure; see kvdir/diagnosis/__init__.py.

Nothing in the product compares clocks of two machines, and neither does any check but `clock`, which is for people who compare
logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvdir.core.instance import parse
from kvdir.core.views import NodeView, StatusView
from kvdir.diagnosis.finding import Finding, Verdict, in_order
from kvdir.diagnosis.namespaces import check_namespaces
from kvdir.errors import NamespaceError
from kvdir.location import StreamState, Tier
from kvdir.namespace import Namespace

FEW_BLOCKS = 100
"""Blocks that must have been asked for before no hit at all means anything."""

MANY_LIVES = 3
"""Registrations of one name within the story's reach: a restart or two is life, more is two agents that take turns."""

AHEAD_S = 2.0
"""A clock that is less ahead is not worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorFacts:
    """What one coordinator said. failure: why it did not, in words. lives: epochs of each node in its story.

    now_unix_ms: of whoever asked, when the nodes were listed.
    """

    address: str
    failure: str = ""
    status: StatusView | None = None
    nodes: tuple[NodeView, ...] = ()
    lives: Mapping[str, int] = field(default_factory=dict)
    now_unix_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """reached: addresses that were tried, with why nobody could be reached there; empty words: somebody serves it.

    greeted: nodes whose agent was asked who it is, with what was wrong with the answer; only an agent's doctor can ask.
    """

    coordinators: tuple[CoordinatorFacts, ...]
    reached: Mapping[str, str] = field(default_factory=dict)
    greeted: Mapping[str, str] = field(default_factory=dict)

    @property
    def answering(self) -> list[tuple[CoordinatorFacts, StatusView]]:
        return [(facts, facts.status) for facts in self.coordinators if facts.status is not None]

    def nodes(self) -> dict[str, NodeView]:
        """Each node as whoever heard of it last has it; without those that left."""
        out: dict[str, NodeView] = {}
        for facts in self.coordinators:
            for view in facts.nodes:
                if view.trust.state is StreamState.FENCED:
                    continue
                known = out.get(view.trust.node)
                if known is None or view.trust.age_s < known.trust.age_s:
                    out[view.trust.node] = view
        return out


def examine(facts: ClusterFacts) -> list[Finding]:
    """Every check, in the order in which people should look."""
    out = check_coordinators(facts)
    if facts.answering:
        for check in CHECKS:
            out += check(facts)
    return out


def check_coordinators(facts: ClusterFacts) -> list[Finding]:
    """coordinator: does it answer, does it have the whole picture, are releases equal."""
    out = [
        Finding(
            check="coordinator",
            verdict=Verdict.FAULT,
            subject=item.address,
            seen=item.failure,
            meaning="who publishes to it or asks it only, shares nothing",
            fix="start it (`kvdir serve`), or correct the address; is a firewall between?",
        )
        for item in facts.coordinators
        if item.failure
    ]
    for item, status in facts.answering:
        if status.store_fault:
            fault = ("its store does not answer: " + status.store_fault, "it knows nothing meanwhile", "start the store")
        elif status.warming or status.partial:
            fault = (
                "it is warming up" if status.warming else "it gave up warming without some live node",
                "blocks of nodes that have not restated what they hold are misses",
                "wait; if it stays so, see which stream is not synced, and `kvdir reconcile NODE`",
            )
        else:
            streams = f"{status.streams_synced} of {status.streams_total} streams synced"
            out.append(in_order("coordinator", f"{streams}, {status.blocks:,} blocks", subject=item.address))
            continue
        out.append(_warning("coordinator", item.address, *fault))
    versions = {status.version for _, status in facts.answering}
    if len(versions) > 1:
        told = ", ".join(f"{item.address} {status.version}" for item, status in facts.answering)
        out.append(
            _warning("coordinator", "", told, "releases differ", "fine while you upgrade; else run one release everywhere")
        )
    return out


def check_streams(facts: ClusterFacts) -> list[Finding]:
    """streams: is every node heard, at every coordinator, and are its figures trusted."""
    everybody = facts.nodes()
    if not everybody:
        words = "no agent publishes here: name this coordinator in `coordinators` of an agent"
        return [_warning("streams", "", "no node has said hello", "nothing can be found", words)]
    out: list[Finding] = []
    for item, _ in facts.answering:
        at = f" at {item.address}" if len(facts.coordinators) > 1 else ""
        views = {view.trust.node: view for view in item.nodes if view.trust.state is not StreamState.FENCED}
        out += [_untrusted(view, at) for view in views.values() if view.trust.state is not StreamState.SYNCED]
        out += [
            _warning(
                "streams", node + at, "this coordinator has not heard of it", "who asks here does not find its blocks",
                "name every coordinator in `coordinators` of every agent; is one not reached from there?",
            )
            for node in sorted(everybody.keys() - views.keys())
        ]  # fmt: skip
    return out or [in_order("streams", f"{len(everybody)} streams, all synced")]


def _untrusted(view: NodeView, at: str) -> Finding:
    trust = view.trust
    silent = trust.state is StreamState.STALE
    return Finding(
        check="streams",
        verdict=Verdict.FAULT if silent else Verdict.WARNING,
        subject=trust.node + at,
        seen=f"{trust.state.name.lower()}: {trust.reason or 'no reason given'}; heard {trust.age_s:.1f} s ago",
        meaning="its blocks are left out of answers soon" if silent else "what is known of it may be incomplete",
        fix="is its agent running, and does it reach this coordinator? `peer-agent inventory` there says"
        if silent
        else f"it repairs itself; if not within a minute: `kvdir story {trust.node}`",
    )


def check_names(facts: ClusterFacts) -> list[Finding]:
    """one name, one agent: is a name registered again and again. A fenced agent says so itself: `peer-agent doctor`."""
    out = []
    for facts_of in facts.coordinators:
        for node, lives in sorted(facts_of.lives.items()):
            if lives >= MANY_LIVES and parse(node).engine:
                out.append(
                    _warning(
                        "one name, one agent", node, f"{lives} lives of this stream within the story of {facts_of.address}",
                        "the engine restarts again and again, and what it held is forgotten each time", "see the engine's log",
                    )
                )  # fmt: skip
            elif lives >= MANY_LIVES:
                out.append(
                    Finding(
                        check="one name, one agent",
                        verdict=Verdict.FAULT,
                        subject=node,
                        seen=f"{lives} lives of this name within the story of {facts_of.address}",
                        meaning="two agents run under one name and fence each other in turns, or one restarts again and again",
                        fix="give each agent a `node` name of its own (containers on one host share its name), or see its log",
                    )
                )
    return out or [in_order("one name, one agent", "no name was taken over repeatedly")]


def check_flow(facts: ClusterFacts) -> list[Finding]:
    """events: does every stream say something."""
    if not facts.nodes():
        return []  # `streams` says so
    out = []
    nodes = facts.nodes()
    of_engines = {parse(node).node for node in nodes if parse(node).engine}
    for node, view in sorted(nodes.items()):
        if view.announced_seq or any(holding.blocks.value for holding in view.holdings):
            continue
        if node in of_engines and not view.namespaces:
            continue  # it only listens to engines, for routers: it has nothing of its own to say
        engine = parse(node).engine
        out.append(
            _warning(
                "events",
                node,
                "not one event so far",
                "nothing of it can be found, since it has announced nothing",
                "switch events on in the engine (vLLM: --kv-events-config with enable_kv_cache_events), and send a request"
                if engine
                else "does an engine attach there and store? `peer-agent doctor` on that node says",
            )
        )
    return out or [in_order("events", "every stream has announced something")]


def check_peers(facts: ClusterFacts) -> list[Finding]:
    """peers: is somebody at the addresses that agents are said to be reached at, and is it they."""
    out = []
    nodes = facts.nodes()
    hosts = {view.trust.peer_address.rpartition(":")[0] for view in nodes.values() if view.trust.peer_address}
    for node, view in sorted(nodes.items()):
        address = view.trust.peer_address
        if failure := facts.reached.get(address, "") or facts.greeted.get(node, ""):
            out.append(
                Finding(
                    check="peers",
                    verdict=Verdict.FAULT,
                    subject=node,
                    seen=f"said to be reached at {address}; from here: {failure}",
                    meaning="its blocks are found and never fetched",
                    fix="set `advertise` of that agent to an address that its peers reach, and open the port between them",
                )
            )
        elif _loopback(address) and not all(map(_loopback, hosts)):
            out.append(
                _warning(
                    "peers", node, f"it is said to be reached at {address}", "agents on other hosts reach themselves there",
                    "set `listen` and `advertise` of that agent to an address of its network",
                )
            )  # fmt: skip
    addresses = {view.trust.peer_address for view in nodes.values() if view.trust.peer_address}
    tried = len(addresses & facts.reached.keys())
    return out or [in_order("peers", f"{len(addresses)} addresses, {tried} of them tried, all reached")]


def check_identity(facts: ClusterFacts) -> list[Finding]:
    """namespaces, hash seed, block size: can nodes of one model share at all."""
    known: dict[bytes, Namespace] = {}
    for _, status in facts.answering:
        for view in status.namespaces:
            try:
                known[view.digest] = Namespace.from_canonical(view.canonical_json)
            except NamespaceError:
                continue  # of another release: `coordinator` says so
    announced = {node: [known[digest] for digest in view.namespaces if digest in known] for node, view in facts.nodes().items()}
    return check_namespaces(announced)


def check_hits(facts: ClusterFacts) -> list[Finding]:
    """lookups: is anything that is asked for ever found."""
    out = []
    for item, status in facts.answering:
        seen = f"{status.lookups:,} lookups of {status.lookup_blocks:,} blocks, {status.lookup_hits:,} found"
        if status.lookup_blocks >= FEW_BLOCKS and not status.lookup_hits and status.blocks:
            out.append(
                Finding(
                    check="lookups",
                    verdict=Verdict.FAULT,
                    subject=item.address,
                    seen=f"{seen}, although {status.blocks:,} blocks are known",
                    meaning="whoever asks computes other fingerprints than whoever stores, or asks in another namespace",
                    fix="see `hash seed`, `block size` and `namespaces`; compare one block of both sides with `kvdir explain`",
                )
            )
        elif status.stale_reports > max(FEW_BLOCKS, status.lookup_hits // 2):
            out.append(
                _warning(
                    "lookups", item.address, f"{status.stale_reports:,} reports of blocks that were not there any more",
                    "what is found is often gone: nodes evict faster than they are asked",
                    "give agents more memory (`arena_bytes`), and see `streams`",
                )
            )  # fmt: skip
        else:
            out.append(in_order("lookups", seen, subject=item.address))
    return out


def check_rejected(facts: ClusterFacts) -> list[Finding]:
    """refused events: what coordinators could not use, by reason (unknown media among them)."""
    out = [
        _warning(
            "refused events",
            item.address,
            f"{count:,} events were refused: {reason}",
            "what they said is not known here",
            "medium: name it in a tier we know; otherwise run one release everywhere",
        )
        for item, status in facts.answering
        for reason, count in sorted(status.events_rejected.items())
        if count
    ]
    return out or [in_order("refused events", "none")]


def check_readable(facts: ClusterFacts) -> list[Finding]:
    """readable: blocks that only an engine holds can be routed to, and read by nobody."""
    nodes = facts.nodes()
    told, moved = 0, 0
    for view in nodes.values():
        blocks = sum(holding.blocks.value for holding in view.holdings)
        if view.trust.peer_address:
            moved += blocks
        else:
            told += blocks
    if told and not moved:
        media = sorted({Tier(h.tier).name.lower() for view in nodes.values() for h in view.holdings if h.blocks.value})
        return [
            _warning(
                "readable",
                "",
                f"all {told:,} blocks are announced by engines only, in {', '.join(media)}; no agent holds any",
                "routers can send requests to them, and no other node can load them",
                "right if you only route. To move blocks, attach engines to agents (docs/engines/vllm.md, sglang.md)",
            )
        ]
    return [in_order("readable", f"{moved:,} blocks at agents, {told:,} announced by engines")]


def check_bound(facts: ClusterFacts) -> list[Finding]:
    """index: does the directory forget blocks that nodes still hold."""
    out = [
        _warning(
            "index", item.address, f"{status.evicted_blocks:,} entries went for max_index_bytes",
            "blocks that nodes still hold are unknown here", "raise --max-index-bytes",
        )
        for item, status in facts.answering
        if status.evicted_blocks
    ]  # fmt: skip
    return out or [in_order("index", "nothing was forgotten for want of room")]


def check_clocks(facts: ClusterFacts) -> list[Finding]:
    """clock: nothing here depends on it, people who compare logs do. Only a clock that is ahead can be seen."""
    ahead: dict[str, float] = {}
    for item in facts.coordinators:
        for view in item.nodes:
            seconds = (view.started_unix_ms - item.now_unix_ms) / 1000
            if view.started_unix_ms and seconds > AHEAD_S:
                ahead[view.trust.node] = seconds
    out = [
        _warning(
            "clock", node, f"it says it started {seconds:.0f} s from now", "its log cannot be compared with others by time",
            "run NTP or chrony there; blocks and trust do not depend on it",
        )
        for node, seconds in sorted(ahead.items())
    ]  # fmt: skip
    return out or [in_order("clock", "no node is ahead of this one")]


CHECKS: Sequence[Callable[[ClusterFacts], Iterable[Finding]]] = (
    check_streams, check_names, check_flow, check_identity, check_hits, check_peers, check_rejected, check_readable,
    check_bound, check_clocks,
)  # fmt: skip


def _warning(check: str, subject: str, seen: str, meaning: str, fix: str) -> Finding:
    return Finding(check=check, verdict=Verdict.WARNING, subject=subject, seen=seen, meaning=meaning, fix=fix)


def _loopback(address: str) -> bool:
    return address.startswith(("127.", "localhost", "[::1]"))
