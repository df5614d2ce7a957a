"""What each step of a story does, to a node or to the coordinator at whose site it is played.

The name of a function is the verb, its arguments are those of the step.

Rules: a step that does not apply in the state it meets does nothing; only arguments and the state decide, never chance. Blocks
are numbers with commas between them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from kvdir.core.event import Batch, Event, Heartbeat, HeartbeatFigures, SnapshotChunk
from kvdir.core.feedback import StaleReport
from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from kvdir.rpc.event_codec import encode_batch, encode_chunk, encode_heartbeat, encode_hello
from kvdir.testing.sim.ledger import Item, by_place
from kvdir.testing.sim.network import Faults
from kvdir.testing.sim.node import Life, LocalNode, fingerprint_of
from kvdir.testing.sim.site import Site
from kvdir.testing.sim.story import Step
from kvdir.v1 import events_pb2


def play(site: Site, step: Step) -> None:
    """Raises Violation when a promise breaks, InvalidInput for a step that does not exist or has other arguments."""
    verb = _VERBS.get(step.verb)
    if verb is None:
        raise InvalidInput(f"{step.verb!r} is no step; known: {', '.join(sorted(_VERBS))}")
    wanted = list(inspect.signature(verb).parameters)[1:]
    if len(step.args) != len(wanted):
        raise InvalidInput(f"step {str(step)!r}: {step.verb} takes {' '.join(wanted).upper()}")
    verb(site, *step.args)


# -- blocks ----------------------------------------------------------------------------------------------------------------


def store(site: Site, node: str, tier: str, namespace: str, blocks: str) -> None:
    """The node stores blocks, in one event."""
    _node(site, node).store(_blocks(blocks), tier=_tier(tier), namespace=_namespace(site, namespace))


def remove(site: Site, node: str, tier: str, namespace: str, blocks: str) -> None:
    """The node removes blocks, present or not, in one event."""
    _node(site, node).remove(_blocks(blocks), tier=_tier(tier), namespace=_namespace(site, namespace))


def clear(site: Site, node: str, tier: str, namespace: str) -> None:
    """The node clears a tier, for one namespace or for `all`."""
    chosen = None if namespace == "all" else _namespace(site, namespace)
    _node(site, node).clear(tier=_tier(tier), namespace=chosen)


def lose(site: Site, node: str, tier: str, namespace: str, kind: str, blocks: str) -> None:
    """The node has `stored` or `removed` blocks, and its own full queue loses the event; its number is used up."""
    _lose(site, node, tier, namespace, kind, blocks, known=True)


def bus(site: Site, node: str, tier: str, namespace: str, kind: str, blocks: str) -> None:
    """The engine has `stored` or `removed` blocks, and its bus loses the event: the agent sees the hole, not what was in it."""
    _lose(site, node, tier, namespace, kind, blocks, known=False)


def garbage(site: Site, node: str, kind: str) -> None:
    """The node says what cannot be understood: a store as an event of unknown `kind` or bad `width`; an event of an unknown
    `tier` or `namespace`; or a message with another `epoch`, with sequence number `zero`, a `chunk` that nobody asked for, or
    `nothing` in it.
    """
    life = _node(site, node).life
    digest, packed = site.digests[0], fingerprint_of(1)
    stored = [Item(digest, Tier.CPU, packed)]
    match kind:
        case "kind":
            life.say(Event(99, Tier.CPU, digest, packed, 16), added=stored)
        case "tier":
            life.say(Event(1, 77, digest, packed, 16))
        case "namespace":
            life.say(Event(1, Tier.CPU, b"?" * 32, packed, 16))
        case "width":
            life.say(Event(1, Tier.CPU, digest, b"12345", 5), added=stored)
        case "epoch":
            site.network.inject(life.node.name, encode_heartbeat(life.epoch ^ 1, Heartbeat(10**9, HeartbeatFigures())))
        case "zero":
            event = Event.stored(Tier.CPU, digest, Fingerprints(packed, 16))
            site.network.inject(life.node.name, encode_batch(life.epoch, Batch(0, (event,))))
        case "chunk":
            chunk = SnapshotChunk(1 << 40, 0, 0, (), last=True)
            site.network.inject(life.node.name, encode_chunk(life.epoch, chunk))
        case "nothing":
            site.network.inject(life.node.name, events_pb2.PublishRequest())
        case _:
            raise InvalidInput(f"no garbage of kind {kind!r}")


# -- processes -------------------------------------------------------------------------------------------------------------


def restart(site: Site, node: str, arena: str) -> None:
    """The agent dies and starts again at once, same name and address, with its arena `kept` or `empty`."""
    _node(site, node).restart(keep=arena == "kept")


def twice(site: Site, node: str) -> None:
    """A second agent of the same name starts while the first goes on."""
    _node(site, node).start_twice()


def kill(site: Site, node: str) -> None:
    """The agent dies, without a word."""
    _node(site, node).kill()


def leave(site: Site, node: str) -> None:
    """The agent says goodbye and ends."""
    _node(site, node).leave()


def clock(site: Site, node: str, offset_s: str) -> None:
    """The wall clock of the node is off by so much from now on."""
    _node(site, node).clock_offset_s = float(offset_s)


def coordinator(site: Site, what: str) -> None:
    """The coordinator `dies`, `vanishes` with its machine, `restarts` empty, `saves` a checkpoint, restarts `warm` from it."""
    match what:
        case "dies" | "vanishes":
            site.kill_coordinator(silently=what == "vanishes")
        case "restarts" | "warm":
            site.restart_coordinator(warm=what == "warm")
        case "saves":
            site.write_checkpoint()
        case _:
            raise InvalidInput(f"{what!r} is nothing that a coordinator does")


def ghost(site: Site, node: str) -> None:
    """An earlier life of the node, fenced by now, turns up: with its hello, its events, its heartbeat and its goodbye."""
    local = _node(site, node)
    for life in _fenced_lives(site, local)[:1]:
        site.network.begin_call(local.name, life.epoch, _whole_call(site, local, life))


def echo(site: Site, node: str) -> None:
    """Messages of an earlier life, fenced by now, turn up in the call of the present one."""
    local = _node(site, node)
    for life in _fenced_lives(site, local)[:1]:
        for message in _whole_call(site, local, life)[1:]:
            site.network.inject(local.name, message)


# -- network ---------------------------------------------------------------------------------------------------------------


def advance(site: Site, seconds: str) -> None:
    """Time passes."""
    site.advance(float(seconds))


def network(site: Site, loss: str, duplicates: str, jitter_s: str) -> None:
    """From now on so many messages are lost, come twice, are late."""
    site.network.faults = Faults(loss=float(loss), duplicates=float(duplicates), jitter_s=float(jitter_s))


def repeat(site: Site, node: str, number: str) -> None:
    """A message that came from the node in this call some time ago comes again."""
    site.network.repeat(_node(site, node).name, int(number))


def drop(site: Site, node: str, count: str) -> None:
    """The next events of the node are lost on the way."""
    site.network.drop_events(_node(site, node).name, count=int(count))


def cut(site: Site, node: str, late_s: str) -> None:
    """The agent's connection breaks; what it had sent is gone (0), or arrives so much later."""
    site.network.cut(_node(site, node).name, late_s=float(late_s))


def partition(site: Site, node: str) -> None:
    """Nothing gets through between the node and the coordinator."""
    site.network.partition(_node(site, node).name)


def rejoin(site: Site, node: str) -> None:
    """The partition of the node ends."""
    site.network.rejoin(_node(site, node).name)


# -- readers and operators -------------------------------------------------------------------------------------------------


def read(site: Site, namespace: str, blocks: str, delay_s: str) -> None:
    """A reader looks blocks up, asks the owners, and reports what they do not hold; the report takes so long."""
    number = _namespace(site, namespace)
    digest, wanted = site.digests[number], _blocks(blocks)
    if site.directory.core.namespaces.get(digest) is None:
        return
    answer = site.directory.lookup(wanted, namespace=number)
    absent: dict[str, set[Item]] = {}
    for run in answer:
        for at in range(run.start, run.start + run.count):
            for holder, tier in run.holders:
                absent.setdefault(answer.nodes[holder].node, set()).add(Item(digest, tier, fingerprint_of(wanted[at])))
    for name in sorted(absent):
        life = site.node(name).life  # who answers under that name today
        _report(site, life, absent[name] - life.ledger.held, float(delay_s))


def accuse(site: Site, node: str, tier: str, namespace: str, blocks: str, delay_s: str) -> None:
    """A reader that is wrong reports blocks of the node absent, whatever it holds."""
    digest = site.digests[_namespace(site, namespace)]
    accused = {Item(digest, _tier(tier), fingerprint_of(block)) for block in _blocks(blocks)}
    _report(site, _node(site, node).life, accused, float(delay_s))


def reconcile(site: Site, node: str) -> None:
    """An operator asks for an absolute statement of the node, and does not wait for it."""
    try:
        site.directory.core.want_snapshot(_node(site, node).name)
    except InvalidInput:
        return  # not known, or fenced


# -- inside ----------------------------------------------------------------------------------------------------------------


def _lose(site: Site, node: str, tier: str, namespace: str, kind: str, blocks: str, *, known: bool) -> None:
    stored, removed = (_blocks(blocks), []) if kind == "stored" else ([], _blocks(blocks))
    number = _namespace(site, namespace)
    _node(site, node).lose(stored=stored, removed=removed, tier=_tier(tier), namespace=number, known=known)


def _report(site: Site, life: Life, absent: set[Item], delay_s: float) -> None:
    for digest, tier, fingerprints in by_place(absent):
        report = StaleReport(
            life.node.name, life.epoch, life.outbox.last_seq, digest, tier, Fingerprints.of(fingerprints), "reader"
        )
        site.network.report_stale(report, delay_s=delay_s)


def _fenced_lives(site: Site, node: LocalNode) -> list[Life]:
    known = site.directory.core.nodes.get(node.name)
    return [life for life in node.lives if known is not None and life.epoch in known.fenced]


def _whole_call(site: Site, node: LocalNode, life: Life) -> list[Any]:
    hello = encode_hello(
        node=node.name, epoch=life.epoch, last_seq=life.outbox.last_seq, peer_address=node.address, started_unix_ms=0,
        namespaces=site.namespaces, agent_version="",
    )  # fmt: skip
    batch = life.outbox.read(1, max_events=64, max_bytes=1 << 20)
    return [
        hello,
        *([encode_batch(life.epoch, batch)] if batch else []),
        encode_heartbeat(life.epoch, Heartbeat(life.outbox.last_seq, HeartbeatFigures())),
        events_pb2.PublishRequest(goodbye=events_pb2.Goodbye(epoch=life.epoch)),
    ]


def _node(site: Site, number: str) -> LocalNode:
    return site.nodes[int(number) % len(site.nodes)]


def _namespace(site: Site, number: str) -> int:
    return int(number) % len(site.namespaces)


def _blocks(text: str) -> list[int]:
    return [int(block) for block in text.split(",")]


def _tier(name: str) -> Tier:
    return Tier[name.upper()]


_VERBS: dict[str, Callable[..., None]] = {
    verb.__name__: verb
    for verb in (
        store, remove, clear, lose, bus, garbage, restart, twice, kill, leave, clock, coordinator, ghost, echo,
        advance, network, repeat, drop, cut, partition, rejoin, read, accuse, reconcile,
    )
}  # fmt: skip
