"""What each step of a story does to a cluster. The name of a function is the verb, its arguments are those of the step.

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
from kvdir.testing.sim.cluster import LocalCluster
from kvdir.testing.sim.ledger import Item, by_place
from kvdir.testing.sim.network import Faults
from kvdir.testing.sim.node import Life, LocalNode, fingerprint_of
from kvdir.testing.sim.story import Step
from kvdir.v1 import events_pb2


def play(cluster: LocalCluster, step: Step) -> None:
    """Raises Violation when a promise breaks, InvalidInput for a step that does not exist or has other arguments."""
    verb = _VERBS.get(step.verb)
    if verb is None:
        raise InvalidInput(f"{step.verb!r} is no step; known: {', '.join(sorted(_VERBS))}")
    wanted = list(inspect.signature(verb).parameters)[1:]
    if len(step.args) != len(wanted):
        raise InvalidInput(f"step {str(step)!r}: {step.verb} takes {' '.join(wanted).upper()}")
    verb(cluster, *step.args)


# -- blocks ----------------------------------------------------------------------------------------------------------------


def store(cluster: LocalCluster, node: str, tier: str, namespace: str, blocks: str) -> None:
    """The node stores blocks, in one event."""
    _node(cluster, node).store(_blocks(blocks), tier=_tier(tier), namespace=_namespace(cluster, namespace))


def remove(cluster: LocalCluster, node: str, tier: str, namespace: str, blocks: str) -> None:
    """The node removes blocks, present or not, in one event."""
    _node(cluster, node).remove(_blocks(blocks), tier=_tier(tier), namespace=_namespace(cluster, namespace))


def clear(cluster: LocalCluster, node: str, tier: str, namespace: str) -> None:
    """The node clears a tier, for one namespace or for `all`."""
    chosen = None if namespace == "all" else _namespace(cluster, namespace)
    _node(cluster, node).clear(tier=_tier(tier), namespace=chosen)


def lose(cluster: LocalCluster, node: str, tier: str, namespace: str, kind: str, blocks: str) -> None:
    """The node has `stored` or `removed` blocks, and its own full queue loses the event; its number is used up."""
    _lose(cluster, node, tier, namespace, kind, blocks, known=True)


def bus(cluster: LocalCluster, node: str, tier: str, namespace: str, kind: str, blocks: str) -> None:
    """The engine has `stored` or `removed` blocks, and its bus loses the event: the agent sees the hole, not what was in it."""
    _lose(cluster, node, tier, namespace, kind, blocks, known=False)


def garbage(cluster: LocalCluster, node: str, kind: str) -> None:
    """The node says what cannot be understood: a store as an event of unknown `kind` or bad `width`; an event of an unknown
    `tier` or `namespace`; or a message with another `epoch`, with sequence number `zero`, a `chunk` that nobody asked for, or
    `nothing` in it.
    """
    life = _node(cluster, node).life
    digest, packed = cluster.digests[0], fingerprint_of(1)
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
            cluster.network.inject(life.node.name, encode_heartbeat(life.epoch ^ 1, Heartbeat(10**9, HeartbeatFigures())))
        case "zero":
            event = Event.stored(Tier.CPU, digest, Fingerprints(packed, 16))
            cluster.network.inject(life.node.name, encode_batch(life.epoch, Batch(0, (event,))))
        case "chunk":
            chunk = SnapshotChunk(1 << 40, 0, 0, (), last=True)
            cluster.network.inject(life.node.name, encode_chunk(life.epoch, chunk))
        case "nothing":
            cluster.network.inject(life.node.name, events_pb2.PublishRequest())
        case _:
            raise InvalidInput(f"no garbage of kind {kind!r}")


# -- processes -------------------------------------------------------------------------------------------------------------


def restart(cluster: LocalCluster, node: str, arena: str) -> None:
    """The agent dies and starts again at once, same name and address, with its arena `kept` or `empty`."""
    _node(cluster, node).restart(keep=arena == "kept")


def twice(cluster: LocalCluster, node: str) -> None:
    """A second agent of the same name starts while the first goes on."""
    _node(cluster, node).start_twice()


def kill(cluster: LocalCluster, node: str) -> None:
    """The agent dies, without a word."""
    _node(cluster, node).kill()


def leave(cluster: LocalCluster, node: str) -> None:
    """The agent says goodbye and ends."""
    _node(cluster, node).leave()


def clock(cluster: LocalCluster, node: str, offset_s: str) -> None:
    """The wall clock of the node is off by so much from now on."""
    _node(cluster, node).clock_offset_s = float(offset_s)


def coordinator(cluster: LocalCluster, what: str) -> None:
    """The coordinator `dies`, `vanishes` with its machine, `restarts` empty, `saves` a checkpoint, restarts `warm` from it."""
    match what:
        case "dies" | "vanishes":
            cluster.kill_coordinator(silently=what == "vanishes")
        case "restarts" | "warm":
            cluster.restart_coordinator(warm=what == "warm")
        case "saves":
            cluster.write_checkpoint()
        case _:
            raise InvalidInput(f"{what!r} is nothing that a coordinator does")


def ghost(cluster: LocalCluster, node: str) -> None:
    """An earlier life of the node, fenced by now, turns up: with its hello, its events, its heartbeat and its goodbye."""
    local = _node(cluster, node)
    for life in _fenced_lives(cluster, local)[:1]:
        cluster.network.begin_call(local.name, life.epoch, _whole_call(cluster, local, life))


def echo(cluster: LocalCluster, node: str) -> None:
    """Messages of an earlier life, fenced by now, turn up in the call of the present one."""
    local = _node(cluster, node)
    for life in _fenced_lives(cluster, local)[:1]:
        for message in _whole_call(cluster, local, life)[1:]:
            cluster.network.inject(local.name, message)


# -- network ---------------------------------------------------------------------------------------------------------------


def advance(cluster: LocalCluster, seconds: str) -> None:
    """Time passes."""
    cluster.advance(float(seconds))


def network(cluster: LocalCluster, loss: str, duplicates: str, jitter_s: str) -> None:
    """From now on so many messages are lost, come twice, are late."""
    cluster.network.faults = Faults(loss=float(loss), duplicates=float(duplicates), jitter_s=float(jitter_s))


def repeat(cluster: LocalCluster, node: str, number: str) -> None:
    """A message that came from the node in this call some time ago comes again."""
    cluster.network.repeat(_node(cluster, node).name, int(number))


def drop(cluster: LocalCluster, node: str, count: str) -> None:
    """The next events of the node are lost on the way."""
    cluster.network.drop_events(_node(cluster, node).name, count=int(count))


def cut(cluster: LocalCluster, node: str, late_s: str) -> None:
    """The agent's connection breaks; what it had sent is gone (0), or arrives so much later."""
    cluster.network.cut(_node(cluster, node).name, late_s=float(late_s))


def partition(cluster: LocalCluster, node: str) -> None:
    """Nothing gets through between the node and the coordinator."""
    cluster.network.partition(_node(cluster, node).name)


def rejoin(cluster: LocalCluster, node: str) -> None:
    """The partition of the node ends."""
    cluster.network.rejoin(_node(cluster, node).name)


# -- readers and operators -------------------------------------------------------------------------------------------------


def read(cluster: LocalCluster, namespace: str, blocks: str, delay_s: str) -> None:
    """A reader looks blocks up, asks the owners, and reports what they do not hold; the report takes so long."""
    number = _namespace(cluster, namespace)
    digest, wanted = cluster.digests[number], _blocks(blocks)
    if cluster.directory.core.namespaces.get(digest) is None:
        return
    answer = cluster.directory.lookup(wanted, namespace=number)
    absent: dict[str, set[Item]] = {}
    for run in answer:
        for at in range(run.start, run.start + run.count):
            for holder, tier in run.holders:
                absent.setdefault(answer.nodes[holder].node, set()).add(Item(digest, tier, fingerprint_of(wanted[at])))
    for name in sorted(absent):
        life = cluster.node(name).life  # who answers under that name today
        _report(cluster, life, absent[name] - life.ledger.held, float(delay_s))


def accuse(cluster: LocalCluster, node: str, tier: str, namespace: str, blocks: str, delay_s: str) -> None:
    """A reader that is wrong reports blocks of the node absent, whatever it holds."""
    digest = cluster.digests[_namespace(cluster, namespace)]
    accused = {Item(digest, _tier(tier), fingerprint_of(block)) for block in _blocks(blocks)}
    _report(cluster, _node(cluster, node).life, accused, float(delay_s))


def reconcile(cluster: LocalCluster, node: str) -> None:
    """An operator asks for an absolute statement of the node, and does not wait for it."""
    try:
        cluster.directory.core.want_snapshot(_node(cluster, node).name)
    except InvalidInput:
        return  # not known, or fenced


# -- inside ----------------------------------------------------------------------------------------------------------------


def _lose(cluster: LocalCluster, node: str, tier: str, namespace: str, kind: str, blocks: str, *, known: bool) -> None:
    stored, removed = (_blocks(blocks), []) if kind == "stored" else ([], _blocks(blocks))
    number = _namespace(cluster, namespace)
    _node(cluster, node).lose(stored=stored, removed=removed, tier=_tier(tier), namespace=number, known=known)


def _report(cluster: LocalCluster, life: Life, absent: set[Item], delay_s: float) -> None:
    for digest, tier, fingerprints in by_place(absent):
        report = StaleReport(
            life.node.name, life.epoch, life.outbox.last_seq, digest, tier, Fingerprints.of(fingerprints), "reader"
        )
        cluster.network.report_stale(report, delay_s=delay_s)


def _fenced_lives(cluster: LocalCluster, node: LocalNode) -> list[Life]:
    known = cluster.directory.core.nodes.get(node.name)
    return [life for life in node.lives if known is not None and life.epoch in known.fenced]


def _whole_call(cluster: LocalCluster, node: LocalNode, life: Life) -> list[Any]:
    hello = encode_hello(
        node=node.name, epoch=life.epoch, last_seq=life.outbox.last_seq, peer_address=node.address, started_unix_ms=0,
        namespaces=cluster.namespaces, agent_version="",
    )  # fmt: skip
    batch = life.outbox.read(1, max_events=64, max_bytes=1 << 20)
    return [
        hello,
        *([encode_batch(life.epoch, batch)] if batch else []),
        encode_heartbeat(life.epoch, Heartbeat(life.outbox.last_seq, HeartbeatFigures())),
        events_pb2.PublishRequest(goodbye=events_pb2.Goodbye(epoch=life.epoch)),
    ]


def _node(cluster: LocalCluster, number: str) -> LocalNode:
    return cluster.nodes[int(number) % len(cluster.nodes)]


def _namespace(cluster: LocalCluster, number: str) -> int:
    return int(number) % len(cluster.namespaces)


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
