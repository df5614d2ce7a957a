"""Commands that ask a running coordinator: nodes, trust, lookup, dump, status, reconcile. Only reconcile causes work.

Every figure that is folded from a lossy stream is shown with its trust: `1,024` is trusted, `~1,024` is not.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from kvdir.cli.output import CommandFailed, Exit, emit, emit_items, facts, output_option, stack, table
from kvdir.cli.tls import tls_options
from kvdir.config import show_bytes
from kvdir.errors import InvalidInput

if TYPE_CHECKING:
    from kvdir.client.sync import Client
    from kvdir.core.answer import Lookup, LookupMode
    from kvdir.core.trust import Cumulative
    from kvdir.core.views import DumpPart, HoldingView, NamespaceView, NodeView, StatusView
    from kvdir.fingerprint import Fingerprints
    from kvdir.location import MinTrust
    from kvdir.rpc.certificates import TlsFiles

F = TypeVar("F", bound=Callable[..., Any])


def client_options(function: F) -> F:
    """--coordinator, --timeout-s and the options of TLS; the command gets a connected `client` first."""

    @click.option(
        "--coordinator",
        default="127.0.0.1:7400",
        show_default=True,
        metavar="HOST:PORT",
        help="Coordinator to ask; several with commas, the first that answers is taken. Also dns:///name:port, k8s:///service.namespace:port.",
    )
    @click.option("--timeout-s", default=5.0, show_default=True, help="Longest wait for the answer.")
    @tls_options
    @functools.wraps(function)
    def command(*args: Any, coordinator: str, timeout_s: float, tls: TlsFiles | None, **params: Any) -> Any:
        from kvdir.client.sync import Client

        with Client(coordinator, deadline_s=timeout_s, connect_timeout_s=min(1.0, timeout_s), tls=tls) as client:
            return function(client, *args, **params)

    return command  # type: ignore[return-value]


# -- nodes ---------------------------------------------------------------------------------------------------------------


@click.command()
@output_option
@client_options
def nodes(client: Client, output: str) -> None:
    """The nodes, what they hold, and how far that is trusted (~ marks figures that are not).

    \b
    Examples:
      kvdir nodes
      kvdir nodes --coordinator 10.0.0.5:7400 --output json
    """
    views = client.nodes()
    emit([_node_document(view) for view in views], lambda: _nodes_view(views), output=output)


def _node_document(view: NodeView) -> dict[str, Any]:
    return {
        "node": view.trust.node,
        "epoch": f"{view.trust.epoch:016x}",
        "state": view.trust.state.name.lower(),
        "reason": view.trust.reason,
        "age_s": round(view.trust.age_s, 3),
        "confirmed": round(view.trust.confirmed, 4),
        "missing_events": view.trust.missing_events,
        "missed_events": view.missed_events,
        "peer_address": view.trust.peer_address,
        "last_seq": view.last_seq,
        "announced_seq": view.announced_seq,
        "gaps": view.gaps,
        "replays": view.replays,
        "sketches": view.sketches,
        "snapshots": view.snapshots,
        "used_bytes": view.used_bytes.value,
        "capacity_bytes": view.capacity_bytes.value,
        "dropped_events": view.dropped_events,
        "untrusted_s": round(view.untrusted_s, 3),
        "namespaces": [digest.hex() for digest in view.namespaces],
        "holdings": [holding_document(holding) for holding in view.holdings],
    }


def holding_document(holding: HoldingView) -> dict[str, Any]:
    now_s, since_s = time.monotonic(), holding.blocks.untrusted_since_s
    return {
        "namespace": holding.namespace_digest.hex(),
        "tier": tier_name(holding.tier),
        "blocks": holding.blocks.value,
        "bytes": holding.bytes.value,
        "trusted": holding.blocks.trusted,
        "reason": holding.blocks.reason,
        "as_of_age_s": round(max(0.0, now_s - holding.blocks.as_of_s), 3),
        "untrusted_for_s": None if since_s is None else round(now_s - since_s, 3),
        "owner_blocks": holding.owner_blocks,
        "owner_at_seq": holding.owner_at_seq,
    }


def _nodes_view(views: tuple[NodeView, ...]) -> object:
    rows = [
        (
            view.trust.node,
            view.trust.state.name.lower(),
            f"{view.trust.age_s:.1f} s",
            " ".join(f"{figure(holding.blocks)} {tier_name(holding.tier)}" for holding in view.holdings) or "0",
            f"{show_bytes(view.used_bytes.value)} / {show_bytes(view.capacity_bytes.value)}",
            view.announced_seq - view.last_seq,
            view.gaps,
            view.trust.peer_address,
            view.trust.reason,
        )
        for view in views
    ]
    heads = ["node", "state", "heard #", "blocks #", "used / capacity #", "lag #", "gaps #", "agent", "reason"]
    return table(heads, rows, caption="" if rows else "no node has said hello yet")


# -- lookup, dump --------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("namespace")
@click.argument("fingerprints", nargs=-1)
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Packed fingerprints, as bytes.")
@click.option("--width", type=click.Choice(["8", "16", "32"]), default="32", show_default=True, help="Of those in --file.")
@click.option("--prefix", is_flag=True, help="Only the run from the first block on (chained fingerprints).")
@click.option(
    "--min-trust",
    type=click.Choice(["any", "not-stale", "synced"]),
    default="any",
    show_default=True,
    help="Leave out nodes that are trusted less.",
)
@click.option("--region", default="", metavar="PATH", help="Ask this replica in shared memory, and no coordinator.")
@output_option
@client_options
def lookup(
    client: Client,
    namespace: str,
    fingerprints: tuple[str, ...],
    file: Path | None,
    width: str,
    prefix: bool,
    min_trust: str,
    region: str,
    output: str,
) -> None:
    """Who holds these blocks. NAMESPACE is its digest in hex, or enough of its beginning; FINGERPRINTS are in hex.

    \b
    Examples:
      kvdir lookup 3f2a 0011223344556677 8899aabbccddeeff
      kvdir lookup 3f2a --file prompt.fps --width 16
    """
    from kvdir.core.answer import LookupMode
    from kvdir.location import MinTrust

    asked = asked_fingerprints(fingerprints, file, int(width))
    mode, wanted = LookupMode.PREFIX if prefix else LookupMode.SPARSE, MinTrust[min_trust.upper().replace("-", "_")]
    if region:
        answer = _lookup_in_region(region, namespace, asked, mode=mode, min_trust=wanted)
    else:
        answer = client.lookup(namespace_digest(client, namespace), asked, mode=mode, min_trust=wanted)
    runs = [
        (run.start, run.count, [f"{answer.nodes[node].node}/{tier.name.lower()}" for node, tier in run.holders])
        for run in answer
    ]
    document = {
        "asked": answer.asked,
        "hits": answer.hits,
        "source": answer.source,
        "lag_s": round(answer.lag_s, 4),
        "incomplete": answer.incomplete,
        "warming": answer.warming,
        "nodes_below_trust": answer.below_trust,
        "runs": [{"start": start, "count": count, "holders": holders} for start, count, holders in runs],
        "nodes": [
            {
                "node": node.node,
                "state": node.state.name.lower(),
                "age_s": round(node.age_s, 3),
                "confirmed": round(node.confirmed, 4),
                "peer_address": node.peer_address,
            }
            for node in answer.nodes
        ],
    }
    rows = [(f"{start}..{start + count - 1}", count, " ".join(holders)) for start, count, holders in runs]
    caption = f"{answer.hits} of {answer.asked} blocks" + (", coordinator is warming up" if answer.warming else "")
    caption += f", {answer.below_trust} nodes left out" if answer.below_trust else ""
    caption += f", at most {answer.lag_s:.3f} s behind" if answer.lag_s else ""
    caption += ", misses may be evicted entries" if answer.incomplete else ""
    emit(document, lambda: table(["positions", "blocks #", "holders"], rows, caption=caption), output=output)


def _lookup_in_region(path: str, namespace: str, asked: Fingerprints, *, mode: LookupMode, min_trust: MinTrust) -> Lookup:
    from kvdir.cli.replica import read_region
    from kvdir.client.replica_reader import ReplicaReader

    known = [item.digest for item in read_region(path).namespaces]
    answer = ReplicaReader(path).lookup(
        _matching(known, namespace, lister=f"kvdir replica {path}"), asked, mode=mode, min_trust=min_trust
    )
    if answer.source == "none":
        raise CommandFailed(answer.reason, exit=Exit.UNREACHABLE, slug="unavailable")
    return answer


@click.command()
@click.option("--namespace", default="", help="Only this one; digest in hex, or enough of its beginning.")
@click.option("--node", default="", help="Only what this node holds.")
@click.option("--limit", default=0, help="Stop after so many blocks; 0: all of them.")
@output_option
@client_options
def dump(client: Client, namespace: str, node: str, limit: int, output: str) -> None:
    """Stream the whole directory: one line, or one element of `blocks`, per block.

    Blocks are shown by the 64-bit key that the index keeps of them, not by fingerprint.
    """
    digest = namespace_digest(client, namespace) if namespace else b""
    blocks = _blocks(client.dump(namespace_digest=digest, node=node), limit)
    emit_items(blocks, key="blocks", line=lambda block: f"{block['key']}  {' '.join(block['holders'])}", output=output)


def _blocks(parts: Iterator[DumpPart], limit: int) -> Iterator[dict[str, Any]]:
    shown = 0
    for part in parts:
        names = [
            [f"{part.nodes[value >> 8]}/{tier_name(value & 0xFF)}" for value in memoryview(packed).cast("I")]
            for packed in part.holder_sets
        ]
        for key, number in zip(memoryview(part.keys).cast("Q"), memoryview(part.sets).cast("I"), strict=True):
            yield {"key": f"{key:016x}", "holders": names[number]}
            shown += 1
            if shown == limit:
                return


# -- status, reconcile ---------------------------------------------------------------------------------------------------


@click.command()
@output_option
@client_options
def status(client: Client, output: str) -> None:
    """The coordinator in one screen."""
    view = client.status()
    document = msgspec.to_builtins(view)
    document["namespaces"] = [_namespace_document(item) for item in view.namespaces]
    emit(document, lambda: _status_view(view), output=output)


def _namespace_document(item: NamespaceView) -> dict[str, Any]:
    fields = msgspec.json.decode(item.canonical_json)
    return {
        "digest": item.digest.hex(),
        "block_bytes": item.block_bytes,
        "block_tokens": item.block_tokens,
        "model": fields.get("model", ""),
    }


def _status_view(view: StatusView) -> object:
    rejected = ", ".join(f"{count:,} {reason}" for reason, count in sorted(view.events_rejected.items()))
    head = {
        "coordinator": f"{view.coordinator}, version {view.version}, up {view.uptime_s:,.0f} s",
        "state": _state_words(view),
        "store": view.store,
        "streams": f"{view.streams_synced} of {view.streams_total} synced",
        "blocks": f"{view.blocks:,} in {show_bytes(view.index_bytes)}{_bound_words(view)}",
        "lookups": f"{view.lookups:,} for {view.lookup_blocks:,} blocks, {view.lookup_hits:,} found",
        "events": f"{view.events_applied:,} applied, {rejected or 'none'} rejected",
        "stale reports": f"{view.stale_reports:,}, {view.stale_reports_ignored:,} of them ignored",
    }
    rows = [
        (item["digest"][:16], item["model"], item["block_tokens"], show_bytes(item["block_bytes"]))
        for item in map(_namespace_document, view.namespaces)
    ]
    return stack(facts(head), table(["namespace", "model", "tokens a block #", "bytes a block #"], rows))


def _bound_words(view: StatusView) -> str:
    if not view.max_index_bytes:
        return ""
    return f" of at most {show_bytes(view.max_index_bytes)}; {view.evicted_blocks:,} evicted, unknown since"


def _state_words(view: StatusView) -> str:
    if view.store_fault:
        return f"the store is away: {view.store_fault}"
    hints = f"; {view.restored_blocks:,} blocks are hints from a checkpoint" if view.restored_blocks else ""
    if view.warming:
        return f"warming: some node has not restated what it holds{hints}"
    return ("ready, but partial: some live node has not restated what it holds" if view.partial else "ready") + hints


@click.command()
@click.argument("node")
@output_option
@client_options
def reconcile(client: Client, node: str, output: str) -> None:
    """Have NODE restate what it holds, and wait until that was applied. Exit code 1 if it was not in time."""
    outcome = client.reconcile(node)
    state = outcome.trust.state.name.lower()
    document = {"node": node, "done": outcome.done, "state": state, "reason": outcome.trust.reason, "blocks": outcome.blocks}
    rows = {"node": node, "restated": "yes" if outcome.done else "no", "state": state, "blocks": f"{outcome.blocks:,}"}
    emit(document, lambda: facts(rows), output=output)
    if not outcome.done:
        raise CommandFailed(f"{node} did not restate in time: {outcome.trust.reason or state}; is its agent running?")


# -- small things --------------------------------------------------------------------------------------------------------


def tier_name(tier: int) -> str:
    """ "cpu", or the number of a tier that this release does not know."""
    from kvdir.location import Tier

    return Tier(tier).name.lower() if tier in set(Tier) else str(tier)


def figure(value: Cumulative) -> str:
    """With its trust: "1,024", or "~1,024" when it is not trusted."""
    return f"{'' if value.trusted else '~'}{value.value:,}"


def asked_fingerprints(texts: tuple[str, ...], file: Path | None, width: int) -> Fingerprints:
    """From the command line: in hex, or packed in a file with this width."""
    from kvdir.fingerprint import Fingerprints

    if bool(texts) == bool(file):
        raise click.UsageError("give fingerprints in hex, or --file, not both")
    return Fingerprints(file.read_bytes(), width) if file else Fingerprints.of([_hex(text) for text in texts])


def _hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is not hexadecimal") from None


def namespace_digest(client: Client, text: str) -> bytes:
    """From a whole digest or an unambiguous beginning of one that the coordinator knows."""
    if len(text) == 64:
        return _hex(text)
    return _matching([item.digest for item in client.status().namespaces], text, lister="kvdir status")


def _matching(digests: Iterable[bytes], text: str, *, lister: str) -> bytes:
    """The only one that begins with `text` in hex."""
    known = [digest for digest in digests if digest.hex().startswith(text.lower())]
    if len(known) != 1:
        raise InvalidInput(f"{len(known)} namespaces begin with {text!r}; `{lister}` lists them")
    return known[0]
