"""`peer-agent explain`: loads blocks as an engine does, and tells who was asked, who served what, what was left, and why.

It is a real load (the blocks are here afterwards), with the prefill rate that an engine would tell. `kvdir explain` asks the
directory and the owners about single blocks instead, and moves nothing. Owns: the command and its tables; the reasons come from
the agent (peer_agent/server/explaining.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdir.cli.output import emit, facts, output_option, stack, table
from kvdir.cli.request import request_options
from kvdir.config import show_bytes
from kvdir.errors import InvalidInput, TooLarge, Unavailable

if TYPE_CHECKING:
    from kvdir.fingerprint import Fingerprints

MAX_BYTES = 1 << 30
"""Of memory for the blocks of one call."""

Story = Mapping[str, Any]


@click.command()
@click.argument("namespace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("fingerprints", nargs=-1)
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Packed fingerprints, as bytes.")
@click.option("--width", type=click.Choice(["8", "16", "32"]), default="32", show_default=True, help="Of those in --file.")
@click.option("--agent", default="", metavar="ADDRESS", help="Where engines attach. Empty: the agent named after this host.")
@click.option("--deadline-s", type=click.FloatRange(min=0.001), default=1.0, show_default=True, help="As an engine's load.")
@click.option(
    "--prefill-tokens-per-s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="What recomputing costs; 0: as the agent's namespace file says, else every hit is worth fetching.",
)
@request_options
@output_option
def explain(
    namespace: Path,
    fingerprints: tuple[str, ...],
    file: Path | None,
    width: str,
    agent: str,
    deadline_s: float,
    prefill_tokens_per_s: float,
    output: str,
) -> None:
    """Load these blocks through an agent and tell why it went as it did.

    NAMESPACE is the namespace file as the agent reads it.

    \b
    Examples:
      peer-agent explain llama.toml 0011223344556677 8899aabbccddeeff --agent unix:/dev/shm/kvdir-node1.sock
      peer-agent explain llama.toml --file prompt.fps --prefill-tokens-per-s 8000 --output json
    """
    from peer_agent.server.config import AgentConfig

    if bool(fingerprints) == bool(file):
        raise click.UsageError("give fingerprints in hex, or --file, not both")
    wanted = _fingerprints(fingerprints, file, int(width))
    address = agent or AgentConfig().engine_address
    document = _load(address, namespace, wanted, deadline_s=deadline_s, prefill_tokens_per_s=prefill_tokens_per_s)
    emit(document, lambda: explanation_view(document), output=output)


def _fingerprints(given: Sequence[str], file: Path | None, width: int) -> Fingerprints:
    from kvdir.fingerprint import Fingerprints

    try:
        return Fingerprints(file.read_bytes(), width) if file else Fingerprints.of(list(map(bytes.fromhex, given)))
    except ValueError as error:
        raise InvalidInput(f"fingerprints: {error}") from error


def _load(address: str, file: Path, wanted: Fingerprints, *, deadline_s: float, prefill_tokens_per_s: float) -> dict[str, Any]:
    import numpy as np

    from peer_agent.client.engine import connect
    from peer_agent.core.effects import LoadStatus
    from peer_agent.server.namespaces import read_namespaces

    (served,) = read_namespaces((str(file),))
    needed = len(wanted) * served.namespace.block_bytes
    if needed > MAX_BYTES:
        raise TooLarge(f"{len(wanted)} blocks are {show_bytes(needed)}, more than {show_bytes(MAX_BYTES)}: ask for fewer")
    with connect(
        address, namespace=served.namespace, engine="peer-agent explain", prefill_tokens_per_s=prefill_tokens_per_s
    ) as engine:
        result = engine.load(wanted, into=np.empty(needed, np.uint8), deadline_s=deadline_s, explain=True)
    if result.explanation is None:
        raise Unavailable(f"{address}: the load was not answered by its deadline: {result.reason or 'no reason given'}")
    return {
        "statuses": [LoadStatus(status).name.lower() for status in result.statuses],
        "total_us": result.timings.total_us,
        "copy_us": result.timings.copy_us,
        **result.explanation,
    }


def explanation_view(document: Mapping[str, Any]) -> object:
    """Tables for people. document: the command's own, or LoadResult.explanation."""
    head = {
        "blocks": ", ".join(f"{count} {status}" for status, count in document["blocks"].items()) or "none",
        "predicted": _ms(document["predicted_us"]),
        "trace": document["trace_id"] or "none",
        "took": _ms(document["took_us"]),
        "of that, the directory": _ms(document["lookup_us"]) if document["directory_reached"] else "not asked, or no answer",
        "prefill": f"{document['prefill_tokens_per_s']:,.0f} tokens/s" if document["prefill_tokens_per_s"] else "not known",
        "net gain": _ms(document["net_gain_us"]) if document["prefill_tokens_per_s"] else "not known",
    }
    nominees = [_nominee(story) for story in document["nominees"]]
    reads = [_read(story) for story in document["reads"]]
    return stack(
        facts(head),
        table(
            ["node", "state", "plane", "claims #", "holds #", "served #", "to first byte #", "GB/s #", "answer #", "why"],
            nominees,
            title="who was asked",
        ),
        table(["# #", "node", "blocks", "size #", "began #", "predicted #", "took #", "outcome"], reads, title="who was read"),
    )


def _nominee(story: Story) -> tuple[object, ...]:
    why = f"{story['verdict']}; {story['remark']}" if story["remark"] else story["verdict"]
    return (
        story["node"],
        story["state"],
        story["plane"] or "-",
        story["claims"],
        story["holds"],
        story["served"],
        _ms(story["first_byte_us"]),
        f"{story['bytes_per_s'] / 1e9:.2f}",
        _ms(story["answer_us"]),
        why,
    )


def _read(story: Story) -> tuple[object, ...]:
    hedge = "" if story["hedges"] is None else f" (hedge of {story['hedges']})"
    runs = [f"{first}-{first + count - 1}" if count > 1 else str(first) for first, count in story["runs"]]
    shown = ", ".join(runs[:6]) + (f", and {len(runs) - 6} more" if len(runs) > 6 else "")
    return (
        story["number"],
        f"{story['node']}{hedge}",
        shown,
        show_bytes(story["size_bytes"]),
        _ms(story["began_us"]),
        _ms(story["predicted_us"]),
        _ms(story["took_us"]),
        ", ".join(f"{count} {outcome}" for outcome, count in story["outcome"].items()) or "under way",
    )


def _ms(microseconds: int | None) -> str:
    return "-" if microseconds is None else f"{microseconds / 1e3:,.1f} ms"
