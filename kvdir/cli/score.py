"""`kvdir score`: how much of a prompt each instance has, as a router would hear it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from kvdir.cli.output import emit, output_option, table
from kvdir.cli.query import asked_fingerprints, client_options, namespace_digest, tier_name
from kvdir.errors import InvalidInput

if TYPE_CHECKING:
    from kvdir.client.sync import Client
    from kvdir.core.score import InstanceScore, ScorePart, Scores


@click.command()
@click.argument("namespace", default="")
@click.argument("fingerprints", nargs=-1)
@click.option("--model", default="", help="Instead of NAMESPACE: in every namespace of this model, from --tokens.")
@click.option("--tokens", type=click.File(), help="The prompt's token ids: a JSON array, or separated by spaces; - for stdin.")
@click.option("--adapter", default="none", show_default=True, help="Name of the LoRA adapter, with --model; none: without one.")
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Packed fingerprints, as bytes.")
@click.option("--width", type=click.Choice(["8", "16", "32"]), default="32", show_default=True, help="Of those in --file.")
@click.option(
    "--min-trust",
    type=click.Choice(["any", "not-stale", "synced"]),
    default="any",
    show_default=True,
    help="Leave out nodes that are trusted less.",
)
@click.option(
    "--max-instances", type=click.IntRange(0), default=0, help="At most so many, the best ones; 0: the coordinator chooses."
)
@output_option
@client_options
def score(
    client: Client,
    namespace: str,
    fingerprints: tuple[str, ...],
    file: Path | None,
    width: str,
    model: str,
    tokens: TextIO | None,
    adapter: str,
    min_trust: str,
    max_instances: int,
    output: str,
) -> None:
    """How much of a prompt each instance has, best first. NAMESPACE is its digest in hex, or enough of its beginning;
    FINGERPRINTS are those of the prompt's blocks from its start, in hex. With --model and --tokens they are computed.

    \b
    Examples:
      kvdir score 3f2a --file prompt.fps
      kvdir score --model llama --tokens prompt.json
      kvdir score 3f2a 0011223344556677 8899aabbccddeeff --min-trust synced
    """
    from kvdir.core.score import ScorePart
    from kvdir.location import MinTrust

    if bool(model) != bool(tokens) or bool(model) == bool(namespace):
        raise click.UsageError("give NAMESPACE with fingerprints, or --model with --tokens")
    skipped: Mapping[str, str] = {}
    if tokens is not None:
        parts, skipped = _named(client, model, adapter, tokens.read())
    else:
        parts = (ScorePart.of(namespace_digest(client, namespace), asked_fingerprints(fingerprints, file, int(width))),)
    scores = client.score(parts, min_trust=MinTrust[min_trust.upper().replace("-", "_")], max_instances=max_instances)
    document = {
        "warming": scores.warming,
        "incomplete": scores.incomplete,
        "nodes_below_trust": scores.below_trust,
        "skipped_namespaces": dict(skipped),
        "instances": [_document(item, scores) for item in scores.instances],
    }
    rows = [_row(item, scores) for item in scores.instances]
    caption = "" if rows else "no instance has any of it"
    caption += ", coordinator is warming up" if scores.warming else ""
    caption += f", {scores.below_trust} nodes left out" if scores.below_trust else ""
    caption += "".join(f", {name} was not asked: {why}" for name, why in skipped.items())
    heads = ["instance", "score #", "matched tokens #", "of those in", "ranks", "rests on"]
    emit(document, lambda: table(heads, rows, caption=caption.lstrip(", ")), output=output)


def _named(client: Client, model: str, adapter: str, text: str) -> tuple[tuple[ScorePart, ...], Mapping[str, str]]:
    """The prompt's names in the coordinator's namespaces; and why some were left out."""
    from kvdir.engines.events import NO_ADAPTER, adapter_of
    from kvdir.errors import UnknownNamespace
    from kvdir.hashing.tokens import as_tokens
    from kvdir.namespace import Namespace
    from kvdir.server.prompt_names import Scope, by_tokens, names

    try:
        tokens = as_tokens([int(part) for part in text.strip().strip("[]").replace(",", " ").split()])
    except ValueError:
        raise InvalidInput("--tokens: write token ids, as [1, 2, 3] or 1 2 3") from None
    adapter = adapter_of(None if adapter == NO_ADAPTER else adapter)
    scope = Scope(model=model, adapter=adapter)
    known = [Namespace.from_canonical(view.canonical_json) for view in client.status().namespaces]
    named = names(filter(scope.holds, known), by_tokens(tokens, adapter=adapter))
    if not named.parts:
        models = ", ".join(sorted({space.model for space in known})) or "none yet"
        why = "; ".join(f"{name}: {words}" for name, words in named.skipped.items())
        raise UnknownNamespace(why or f"no namespace of model {model!r} and adapter {adapter!r} is known; models: {models}")
    return named.parts, named.skipped


def _document(item: InstanceScore, scores: Scores) -> dict[str, Any]:
    return {
        "instance": item.instance,
        "score": item.score,
        "matched_tokens": item.matched_tokens,
        "tiers": {tier_name(tier): tokens for tier, tokens in item.tiers},
        "ranks": [{"dp_rank": rank.dp_rank, "tokens": rank.tokens} for rank in item.ranks],
        "nodes": [
            {"node": trust.node, "state": trust.state.name.lower(), "reason": trust.reason, "age_s": round(trust.age_s, 3)}
            for trust in (scores.nodes[number] for number in item.nodes)
        ],
    }


def _row(item: InstanceScore, scores: Scores) -> tuple[object, ...]:
    return (
        item.instance,
        f"{item.score:,.1f}",
        f"{item.matched_tokens:,}",
        " ".join(f"{tokens:,} {tier_name(tier)}" for tier, tokens in item.tiers),
        " ".join(f"{rank.dp_rank}:{rank.tokens}" for rank in item.ranks),
        " ".join(f"{trust.node} ({trust.state.name.lower()})" for trust in (scores.nodes[number] for number in item.nodes)),
    )
