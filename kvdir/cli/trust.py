"""`kvdir trust`: which figures may be acted upon, of single nodes and in sum, and why others may not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from kvdir.cli.output import CommandFailed, Exit, emit, output_option, stack, table
from kvdir.cli.query import client_options, holding_document, tier_name
from kvdir.config import show_bytes

if TYPE_CHECKING:
    from kvdir.client.sync import Client
    from kvdir.core.views import HoldingView, LoadView, NodeView, SumsView, TotalView


@click.command()
@click.option("--require", is_flag=True, help="Exit with 5 unless every figure is trusted.")
@output_option
@client_options
def trust(client: Client, require: bool, output: str) -> None:
    """Which figures are trusted, since when not, and why.

    \b
    Examples:
      kvdir trust
      kvdir trust --require && ./evict-orphans.sh
    """
    views, sums = client.nodes(), client.views()
    figures = [(view, holding) for view in views for holding in view.holdings]
    doubtful = [(view, holding) for view, holding in figures if not holding.blocks.trusted]
    unsynced = [view for view in views if view.trust.state.name not in ("SYNCED", "FENCED")]
    document = {
        "views_trusted": not doubtful and not unsynced,
        "streams": {view.trust.node: view.trust.state.name.lower() for view in views},
        "confirmed": {view.trust.node: round(view.trust.confirmed, 4) for view in views},
        "figures": [{"node": view.trust.node, **holding_document(holding)} for view, holding in figures],
        "sums": [_sum_document(total) for total in sums.totals],
        "loads": [_load_document(load) for load in sums.loads],
    }
    emit(document, lambda: _trust_view(figures, unsynced, sums), output=output)
    if require and not document["views_trusted"]:
        named = ", ".join(sorted({view.trust.node for view, _ in doubtful} | {view.trust.node for view in unsynced}))
        raise CommandFailed(
            f"figures of {named} are not trusted: run `kvdir reconcile NODE`, or wait until the streams are synced",
            exit=Exit.UNTRUSTED,
            slug="untrusted",
        )


def _sum_document(total: TotalView) -> dict[str, Any]:
    return {
        "scope": total.scope.name.lower(),
        "subject": total.subject,
        "blocks": total.blocks.value,
        "bytes": total.bytes.value,
        "trusted": total.blocks.trusted,
        "reason": total.blocks.reason,
    }


def _load_document(load: LoadView) -> dict[str, Any]:
    return {
        "node": load.node,
        "used_bytes": load.used_bytes.value,
        "capacity_bytes": load.capacity_bytes.value,
        "oldest_use_ms": load.oldest_use_ms.value,
        "read_bytes_per_s": load.read_bytes_per_s.value,
        "age_s": round(max(0.0, time.monotonic() - load.used_bytes.as_of_s), 3),
    }


def _loads_table(sums: SumsView) -> object:
    """Convergent figures: usable at any time, newer ones replace older ones."""
    rows = [
        (
            load.node,
            f"{show_bytes(load.used_bytes.value)} / {show_bytes(load.capacity_bytes.value)}",
            f"{load.oldest_use_ms.value / 1000:.1f} s ago" if load.oldest_use_ms.value else "-",
            f"{show_bytes(load.read_bytes_per_s.value)}/s" if load.read_bytes_per_s.value else "-",
        )
        for load in sums.loads
    ]
    return table(["node says", "used / capacity #", "would evict, last used #", "reads from peers #"], rows)


def _sums_table(sums: SumsView) -> object:
    """Without those of single nodes, which are above."""
    rows = [
        (
            total.scope.name.lower(),
            total.subject[:16],
            f"{total.blocks.value:,}",
            show_bytes(total.bytes.value),
            "yes" if total.blocks.trusted else "no",
            total.blocks.reason,
        )
        for total in sums.totals
        if total.scope.name != "NODE" and (total.blocks.value or total.scope.name != "TIER")
    ]
    return table(["sum over", "of", "blocks #", "bytes #", "trusted", "why not"], rows)


def _trust_view(figures: list[tuple[NodeView, HoldingView]], unsynced: list[NodeView], sums: SumsView) -> object:
    rows = [
        (
            view.trust.node,
            holding.namespace_digest.hex()[:8],
            tier_name(holding.tier),
            f"{holding.blocks.value:,}",
            f"{view.trust.confirmed:.0%}",
            f"{holding.owner_blocks:,} at {holding.owner_at_seq}" if holding.owner_at_seq else "-",
            "yes" if holding.blocks.trusted else "no",
            holding.blocks.reason,
        )
        for view, holding in figures
    ]
    heads = ["node", "namespace", "tier", "blocks #", "confirmed #", "owner says #", "trusted", "why not"]
    silent = ", ".join(f"{view.trust.node} ({view.trust.reason})" for view in unsynced)
    caption = f"not synced: {silent}" if silent else "every stream is synced"
    return stack(table(heads, rows, caption=caption), _sums_table(sums), _loads_table(sums))
