"""`kvdir diff`: whether several coordinators believe the same, by digest; and which blocks they differ in."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from kvdir.cli.output import CommandFailed, emit, output_option, table
from kvdir.cli.query import tier_name
from kvdir.cli.tls import tls_options
from kvdir.errors import DeadlineExceeded, Unavailable

if TYPE_CHECKING:
    from kvdir.client.sync import Client
    from kvdir.core.diff import Row
    from kvdir.rpc.certificates import TlsFiles

_SHOWN_BLOCKS = 10
_POLL_S = 0.3  # gRPC's thread that watches a connection lets go of it within 0.2 s; earlier, a new try confuses it


@click.command()
@click.argument("coordinators", nargs=-1, required=True, metavar="COORDINATOR COORDINATOR...")
@click.option("--wait", "wait_s", default=0.0, metavar="SECONDS", help="Look again until all is equal, for so long at most.")
@click.option("--blocks", "with_blocks", is_flag=True, help="Name the blocks of differing parts, by their first 16 bytes.")
@click.option("--timeout-s", default=5.0, show_default=True, help="Longest wait for each answer.")
@tls_options
@output_option
def diff(
    coordinators: tuple[str, ...], wait_s: float, with_blocks: bool, timeout_s: float, tls: TlsFiles | None, output: str
) -> None:
    """Whether coordinators believe the same of every node, epoch, namespace and tier.

    Exit code 0 if they do, or if some are merely behind (with --wait: only if they do); 1 if two differ at one sequence
    number; 4 if one cannot be reached (with --wait: not by its end).

    \b
    Examples:
      kvdir diff 10.0.0.1:7400 10.0.0.2:7400
      kvdir diff a:7400 b:7400 c:7400 --wait 10     after a rolling restart
      kvdir diff a:7400 b:7400 --blocks             which blocks
      kvdir diff dns:///kvdir.prod.svc:7400         all that the name stands for
    """
    from kvdir.client.discovery import Discovery
    from kvdir.client.sync import Client
    from kvdir.core.diff import Verdict, compare, worst

    with Discovery(coordinators) as discovery:
        names = discovery.wait_all(timeout_s)
    if len(names) < 2:
        raise click.UsageError(f"give at least two coordinators, not {', '.join(names) or discovery.problem}")
    with ExitStack() as stack:
        clients = {name: stack.enter_context(Client(name, deadline_s=timeout_s, tls=tls)) for name in names}
        pool = stack.enter_context(ThreadPoolExecutor(len(names)))
        end_s = time.monotonic() + wait_s
        while True:
            try:
                views = dict(zip(names, pool.map(lambda client: client.digests(), clients.values()), strict=True))
            except (Unavailable, DeadlineExceeded):
                if time.monotonic() >= end_s:
                    raise
            else:
                rows = compare(views)
                verdict = worst(rows)
                if verdict is Verdict.EQUAL or time.monotonic() >= end_s:
                    break
            time.sleep(_POLL_S)
        blocks = list(_differences(clients, rows)) if with_blocks else []
    document = {
        "coordinators": [{"address": name, "name": view.coordinator} for name, view in views.items()],
        "verdict": verdict.value,
        "parts": [_document(row) for row in rows],
        **({"blocks": blocks} if with_blocks else {}),
    }
    emit(document, lambda: _view(names, rows, blocks), output=output)
    if verdict is Verdict.DIFFERENT:
        raise CommandFailed(
            "coordinators differ at one sequence number: see `words`, and `kvdir diff --wait`", slug="different"
        )
    if wait_s and verdict is not Verdict.EQUAL:
        raise CommandFailed(
            f"not equal within {wait_s:g} s: {verdict.value}; are all agents and coordinators up?", slug=verdict
        )


def _document(row: Row) -> dict[str, Any]:
    return {
        "node": row.node,
        "epoch": f"{row.epoch:016x}",
        "namespace": row.namespace_digest.hex(),
        "tier": tier_name(row.tier) if row.namespace_digest else "",
        "verdict": row.verdict.value,
        "behind": row.behind,
        "words": row.words,
        "sides": [
            side
            and {
                "blocks": side.blocks,
                "digest": side.digest.hex(),
                "applied_seq": side.applied_seq,
                "state": side.trust.state.name.lower(),
                "age_s": round(side.trust.age_s, 3),
                "reason": side.trust.reason,
            }
            for side in row.sides
        ],
    }


def _view(names: Sequence[str], rows: Sequence[Row], blocks: Sequence[dict[str, Any]]) -> object:
    from kvdir.cli.output import stack

    cells = [
        (
            row.node,
            row.namespace_digest.hex()[:8] or "-",
            tier_name(row.tier) if row.namespace_digest else "-",
            f"behind by {row.behind:,}" if row.verdict == "behind" else row.verdict.value,
            *(
                f"{side.blocks:,} at {side.applied_seq:,}, {side.trust.state.name.lower()}" if side else "-"
                for side in row.sides
            ),
            row.words,
        )
        for row in rows
        if row.verdict != "equal"
    ]
    equal = f"{len(rows) - len(cells):,} of {len(rows):,} parts are equal everywhere"
    if not cells:
        return equal
    main = table(
        ["node", "namespace", "tier", "verdict", *(f"{name} #" for name in names), "what will happen"], cells, caption=equal
    )
    if not blocks:
        return main
    shown = [(item["node"], item["tier"], item["only_in"], item["count"], _some(item["blocks"])) for item in blocks]
    return stack(main, table(["node", "tier", "only in", "blocks #", "their first 16 bytes"], shown))


def _some(blocks: Sequence[str]) -> str:
    more = len(blocks) - _SHOWN_BLOCKS
    return " ".join(blocks[:_SHOWN_BLOCKS]) + (f" and {more} more" if more > 0 else "")


def _differences(clients: dict[str, Client], rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """What each coordinator has that the first one lacks, and the other way round, part by part.

    Taken some time after the comparison, so what was behind may be equal by now. count is -1 where the difference is too
    large to decode (about 700 blocks).
    """
    from kvdir.core.diff import Verdict
    from kvdir.index import Sketch
    from kvdir.index.encoded import difference

    first, *others = clients
    for node in dict.fromkeys(row.node for row in rows if row.verdict is not Verdict.EQUAL):
        views = {name: client.digests(node=node, sketches=True) for name, client in clients.items()}
        parts = {
            name: {(part.namespace_digest, part.tier): part.encoded for item in view.streams for part in item.parts}
            for name, view in views.items()
        }
        empty = Sketch().encode()
        for digest, tier in sorted({key for known in parts.values() for key in known}):
            for other in others:
                pair = [parts[name].get((digest, tier), empty) for name in (first, other)]
                found = difference(*pair)
                for name, packed in zip((first, other), found or (None, None), strict=True):
                    if packed == b"":
                        continue
                    items = [packed[at : at + 16].hex() for at in range(0, len(packed), 16)] if packed else []
                    yield {
                        "node": node,
                        "namespace": digest.hex(),
                        "tier": tier_name(tier),
                        "only_in": name,
                        "compared_with": other if name == first else first,
                        "count": len(items) if packed is not None else -1,
                        "blocks": sorted(items),
                    }
