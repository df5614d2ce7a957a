"""`kvdir explain`: why did these blocks hit or miss? Asks the directory who is said to have them, and then those owners.

A command of `kvdir` (entry point group "kvdir.commands"), kept here because it speaks to agents. It reads nothing and changes
nothing: what it locks, it unlocks at once, and the lease is short in case it cannot.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdir.cli.main import AskingCommand
from kvdir.cli.output import CommandFailed, emit, output_option, stack, table
from kvdir.cli.query import client_options
from kvdir.cli.request import request_options
from kvdir.errors import InvalidInput, KvdirError, StaleEpoch
from kvdir.obs import trace

if TYPE_CHECKING:
    from kvdir.client.sync import Client
    from kvdir.core.answer import Lookup
    from kvdir.fingerprint import Fingerprints
    from kvdir.location import NodeTrust
    from kvdir.namespace import Namespace
    from kvdir.rpc.tls import Dialer

LEASE_MS = 1_000
OTHERS = 64
"""Nodes that are asked although nobody named them."""
_RECORD = struct.Struct("<QQQII")  # LockResponse.blocks: offset, generation, checksum, length, state


@dataclass(frozen=True, slots=True)
class Owner:
    """What an owner says now. present: one flag per position; None when it did not answer, and `words` says why."""

    trust: NodeTrust
    present: tuple[bool, ...] | None
    words: str


@dataclass(frozen=True, slots=True)
class Explained:
    """verdict: hit (an owner has it), stale (named, absent), unclaimed (not named, but there), miss, or unknown."""

    verdict: str
    words: str


@click.command(cls=AskingCommand, short_help="Why these blocks hit or miss, block by block.")
@click.argument("namespace")
@click.argument("fingerprints", nargs=-1)
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Packed fingerprints, as bytes.")
@click.option("--width", type=click.Choice(["8", "16", "32"]), default="32", show_default=True, help="Of those in --file.")
@request_options
@output_option
@client_options
def explain(client: Client, namespace: str, fingerprints: tuple[str, ...], file: Path | None, width: str, output: str) -> None:
    """Why these blocks hit or miss: per block, who claims it, how far that is trusted, and what the owner says now.

    NAMESPACE is a digest in hex, the beginning of one, or a namespace file as agents read it; if nobody serves it, the
    differences from what is served are told in words (exit code 1).

    \b
    Examples:
      kvdir explain 3f2a 0011223344556677 8899aabbccddeeff
      kvdir explain namespace.toml --file prompt.fps
    """
    from kvdir.fingerprint import Fingerprints

    if bool(fingerprints) == bool(file):
        raise click.UsageError("give fingerprints in hex, or --file, not both")
    digest = _namespace(client, namespace, output)
    try:
        asked = Fingerprints(file.read_bytes(), int(width)) if file else Fingerprints.of(list(map(bytes.fromhex, fingerprints)))
    except ValueError as error:
        raise InvalidInput(f"fingerprints: {error}") from error
    answer = client.lookup(digest, asked)
    owners = ask_owners(client, answer, digest, asked)
    claims = claims_of(answer)
    explained = [judge(position, claims.get(position, {}), owners) for position in range(len(asked))]
    emit(
        _document(answer, asked, claims, owners, explained),
        lambda: _view(answer, asked, claims, owners, explained),
        output=output,
    )


# -- namespaces ------------------------------------------------------------------------------------------------------------


def _namespace(client: Client, text: str, output: str) -> bytes:
    """The digest, if somebody serves it; else says why nobody does."""
    from kvdir.namespace import Namespace
    from peer_agent.server.namespaces import read_namespaces

    known = {view.digest: Namespace.from_canonical(view.canonical_json.encode()) for view in client.status().namespaces}
    mine: Namespace | None = None
    if Path(text).is_file():
        (served,) = read_namespaces((text,))
        mine = served.namespace
        digest = mine.digest
    else:
        matching = [digest for digest in known if digest.hex().startswith(text.lower())]
        if len(matching) > 1:
            raise InvalidInput(f"{len(matching)} namespaces begin with {text!r}; `kvdir status` lists them")
        digest = matching[0] if matching else b""
    if digest in known:
        return digest
    differences = namespace_differences(mine, known)
    document = {"namespace": digest.hex() or text, "known": False, "served": differences}
    rows = [(item["namespace"], words) for item in differences for words in item["differences"] or ["?"]]
    emit(document, lambda: table(["served here", "how it differs"], rows), output=output)
    raise CommandFailed(f"nobody serves namespace {text}: every block misses, whoever has it under another namespace")


def namespace_differences(mine: Namespace | None, known: dict[bytes, Namespace]) -> list[dict[str, Any]]:
    """Each known namespace and how it differs from mine, the most alike first."""
    from kvdir.namespace import Namespace

    out = [
        {
            "namespace": other.short,
            "differences": Namespace.diff(mine, other)
            if mine is not None
            else ["give the namespace file instead of a digest, to see which fields differ"],
        }
        for other in known.values()
    ]
    return sorted(out, key=lambda item: len(item["differences"]))


# -- owners ----------------------------------------------------------------------------------------------------------------


def ask_owners(client: Client, answer: Lookup, digest: bytes, asked: Fingerprints) -> list[Owner]:
    """Those named, in the order of answer.nodes; then the other live nodes, which may have what nobody claims."""
    from concurrent.futures import ThreadPoolExecutor

    carried = trace.metadata()  # of this thread; those of the pool have none
    named = {trust.node for trust in answer.nodes}
    others = [view.trust for view in client.nodes() if view.trust.node not in named and view.trust.state.name != "FENCED"]
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(
            pool.map(
                lambda trust: ask_owner(trust, digest, asked, client.dialer, metadata=carried),
                [*answer.nodes, *others[:OTHERS]],
            )
        )


def ask_owner(
    trust: NodeTrust,
    digest: bytes,
    asked: Fingerprints,
    dialer: Dialer,
    *,
    metadata: trace.Metadata | None = None,
    timeout_s: float = 2.0,
) -> Owner:
    """What the node itself says about the whole list, also of blocks nobody claimed for it."""
    import grpc

    from kvdir.rpc.channel import client_options as channel_options
    from kvdir.rpc.lookup_codec import encode_fingerprints
    from kvdir.rpc.status import from_rpc_error
    from peer_agent.v1 import peer_pb2, peer_pb2_grpc

    if not trust.peer_address:
        return Owner(trust, None, "it told no address")
    with dialer.blocking(trust.peer_address, options=channel_options()) as channel:
        stub = peer_pb2_grpc.PeerStub(channel)
        request = peer_pb2.LockRequest(
            namespace_digest=digest,
            fingerprints=encode_fingerprints(asked),
            lease_ms=LEASE_MS,
            expected_epoch=trust.epoch,
            reader="kvdir explain",
        )
        try:
            response = stub.Lock(request, timeout=timeout_s, metadata=metadata)
            if response.lock:
                stub.Unlock(peer_pb2.UnlockRequest(locks=[response.lock]), timeout=timeout_s)
        except grpc.RpcError as error:
            return Owner(trust, None, _words(from_rpc_error(error, target=trust.peer_address)))
    states = tuple(bool(state) for *_, state in _RECORD.iter_unpack(response.blocks))
    if len(states) != len(asked):
        return Owner(trust, None, f"it answered for {len(states)} of {len(asked)} blocks")
    return Owner(trust, states, "")


def _words(error: KvdirError) -> str:
    return "it restarted since: another epoch answers there" if isinstance(error, StaleEpoch) else str(error)


def claims_of(answer: Lookup) -> dict[int, dict[int, list[str]]]:
    """Position -> index into answer.nodes -> names of tiers."""
    out: dict[int, dict[int, list[str]]] = {}
    for run in answer:
        claims: dict[int, list[str]] = {}
        for node, tier in run.holders:
            claims.setdefault(node, []).append(tier.name.lower())
        out.update(dict.fromkeys(range(run.start, run.start + run.count), claims))
    return out


def judge(position: int, claims: dict[int, list[str]], owners: list[Owner]) -> Explained:
    """Why one block would be hit or missed now."""
    having = [owner for owner in owners if owner.present is not None and owner.present[position]]
    claiming = [owners[node] for node in claims]
    silent = [owner for owner in claiming if owner.present is None]
    if any(owner in claiming for owner in having):
        return Explained("hit", f"{_names(having)} {_verb(having, 'has', 'have')} it")
    if having:
        named = f"; {_names(claiming)} {_verb(claiming, 'was', 'were')} named" if claiming else ""
        has = f"{_names(having)} {_verb(having, 'has it, but is', 'have it, but are')} not named for it"
        return Explained("unclaimed", f"{has}: the event was lost or is late{named}")
    if silent:
        return Explained("unknown", "; ".join(f"{owner.trust.node} was named, and {owner.words}" for owner in silent))
    if claiming:
        lacks = _verb(claiming, "was named and does", "were named and do")
        return Explained("stale", f"{_names(claiming)} {lacks} not have it: evicted since, or the removal was lost")
    return Explained("miss", "nobody is named for it, and no owner that was asked has it")


def _verb(owners: list[Owner], one: str, several: str) -> str:
    return one if len(owners) == 1 else several


def _names(owners: list[Owner]) -> str:
    return " and ".join(owner.trust.node for owner in owners)


# -- showing ---------------------------------------------------------------------------------------------------------------


def _document(
    answer: Lookup,
    asked: Fingerprints,
    claims: dict[int, dict[int, list[str]]],
    owners: list[Owner],
    explained: list[Explained],
) -> dict[str, Any]:
    return {
        "asked": len(asked),
        "warming": answer.warming,
        "trace_id": trace.trace_id(),
        "blocks": [
            {
                "position": position,
                "fingerprint": fingerprint.hex(),
                "verdict": explained[position].verdict,
                "words": explained[position].words,
                "claims": {owners[node].trust.node: tiers for node, tiers in claims.get(position, {}).items()},
                "owners": {
                    owner.trust.node: "present" if owner.present[position] else "absent"
                    for owner in owners
                    if owner.present is not None
                },
            }
            for position, fingerprint in enumerate(asked)
        ],
        "nodes": [
            {
                "node": owner.trust.node,
                "state": owner.trust.state.name.lower(),
                "reason": owner.trust.reason,
                "age_s": round(owner.trust.age_s, 3),
                "answered": owner.present is not None,
                "words": owner.words,
            }
            for owner in owners
        ],
    }


def _view(
    answer: Lookup,
    asked: Fingerprints,
    claims: dict[int, dict[int, list[str]]],
    owners: list[Owner],
    explained: list[Explained],
) -> object:
    blocks = [
        (
            position,
            fingerprint.hex()[:16],
            explained[position].verdict,
            " ".join(f"{owners[node].trust.node}/{'+'.join(tiers)}" for node, tiers in claims.get(position, {}).items()) or "-",
            explained[position].words,
        )
        for position, fingerprint in enumerate(asked)
    ]
    nodes = [
        (
            owner.trust.node,
            owner.trust.state.name.lower(),
            f"{owner.trust.age_s:.1f} s",
            "yes" if owner.present is not None else "no",
            owner.words or owner.trust.reason,
        )
        for owner in owners
    ]
    remarks = ["the coordinator is warming: nodes may be missing from this"] if answer.warming else []
    if trace_id := trace.trace_id():
        remarks.append(f"trace {trace_id}")
    return stack(
        table(["# #", "fingerprint", "verdict", "claimed by", "why"], blocks, caption="; ".join(remarks)),
        table(["node", "state", "heard #", "answered", "remarks"], nodes),
    )
