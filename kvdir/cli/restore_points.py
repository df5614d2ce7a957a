"""`kvdir restore-points`: where a prompt of a hybrid model can be resumed, and which of its state groups holds it back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdir.cli.output import emit, output_option, table
from kvdir.cli.query import asked_fingerprints, client_options, namespace_digest
from kvdir.errors import UnknownNamespace

if TYPE_CHECKING:
    from kvdir.client.sync import Client
    from kvdir.core.restore_points import RestorePoints
    from kvdir.core.state_lookup import StateLookup
    from kvdir.namespace import Namespace

WHERE = "all nodes together"


@click.command("restore-points")
@click.argument("namespace")
@click.argument("fingerprints", nargs=-1)
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Packed fingerprints, as bytes. Several times, one for each state group, if their blocks differ in size.",
)
@click.option("--width", type=click.Choice(["8", "16", "32"]), default="32", show_default=True, help="Of those in --file.")
@click.option("--prompt-tokens", type=click.IntRange(1), help="Where the prompt ends: its last token is left to be computed.")
@output_option
@client_options
def restore_points(
    client: Client,
    namespace: str,
    fingerprints: tuple[str, ...],
    files: tuple[Path, ...],
    width: str,
    prompt_tokens: int | None,
    output: str,
) -> None:
    """Where a prompt can be resumed, with all nodes together and with each alone (docs/state.md). NAMESPACE is the digest of
    one of the model's parts, in hex, or enough of its beginning: its other state groups and ranks are asked for as well.
    FINGERPRINTS are those of the prompt's blocks from its start, in hex.

    \b
    Examples:
      kvdir restore-points 3f2a --file prompt.fps --prompt-tokens 4096
      kvdir restore-points 3f2a --file full.fps --file recurrent.fps
      kvdir restore-points 3f2a 0011223344556677 8899aabbccddeeff --output json
    """
    from kvdir.client.state import lookup_state

    asked = [asked_fingerprints(fingerprints, file, int(width)) for file in files or (None,)]
    model = _model_of(client, namespace_digest(client, namespace))
    found = lookup_state(client, model, asked if len(files) > 1 else asked[0], prompt_tokens=prompt_tokens)
    emit(_document(found), lambda: _view(found), output=output)


def _model_of(client: Client, digest: bytes) -> Namespace:
    """The namespace of this digest. In place of a part that is the same on all ranks (MLA) one of its siblings that names the
    ranks, or those of the other groups would not be found.
    """
    from kvdir.namespace import Namespace

    known = [Namespace.from_canonical(view.canonical_json) for view in client.status().namespaces]
    asked = next((item for item in known if item.digest == digest), None)
    if asked is None:
        raise UnknownNamespace(f"nobody has announced namespace {digest.hex()[:16]}; `kvdir status` lists them")
    siblings = [item for item in known if item.model == asked.model and asked in item.parts()]
    return max(siblings, key=lambda item: len(item.family()), default=asked)


def _document(found: StateLookup) -> dict[str, Any]:
    return {
        "best_tokens": found.points.best_tokens,
        "points": found.points.points.tolist(),
        "groups": _groups(found.points),
        "nodes": [
            {
                "node": trust.node,
                "state": trust.state.name.lower(),
                "age_s": round(trust.age_s, 3),
                "best_tokens": found.at(trust.node).best_tokens,
                "groups": _groups(found.at(trust.node)),
            }
            for trust in found.nodes
        ],
        "reasons": list(found.reasons),
        "warming": found.warming,
        "incomplete": found.incomplete,
    }


def _groups(points: RestorePoints) -> list[dict[str, Any]]:
    return [
        {
            "kind": hits.kind,
            "held_blocks": hits.held_blocks,
            "prefix_tokens": hits.prefix_tokens,
            "reach_tokens": hits.reach_tokens,
            "missing_blocks": hits.missing_blocks,
        }
        for hits in points.partial
    ]


def _view(found: StateLookup) -> object:
    rows = [_row(WHERE, found.points), *(_row(trust.node, found.at(trust.node)) for trust in found.nodes)]
    kinds = [f"{number} {hits.kind} #" for number, hits in enumerate(found.points.partial)]
    caption = "per group: how far it alone would reach, and its blocks"
    caption += ", coordinator is warming up" if found.warming else ""
    caption += ", misses may be evicted entries" if found.incomplete else ""
    caption += "".join(f"; {reason}" for reason in found.reasons)
    return table(["where", "resume at #", *kinds], rows, caption=caption)


def _row(where: str, points: RestorePoints) -> tuple[object, ...]:
    groups = (f"{hits.reach_tokens:,} ({hits.held_blocks:,})" for hits in points.partial)
    return (where, f"{points.best_tokens:,}", *groups)
