"""Draws the trace of one load as an SVG, from the spans that a coordinator and two agents really sent.

    python bench/trace_picture.py docs/trace.svg

A cluster in this process, over real gRPC. Of LOADS loads the one that took least is drawn: by then the reader has connected to
the owner, and the machine was least busy with other things.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from kvdir.obs import trace
from kvdir.obs.spans import Kind, span
from kvdir.obs.trace import TraceContext
from kvdir.obs.tracing import open_tracing
from kvdir.testing.span_collector import Received, SpanCollector, children
from kvdir.testing.wait import eventually
from peer_agent.testing.cluster import local_cluster, sample_namespace

LOADS, BLOCKS, BLOCK_BYTES = 8, 64, 256 << 10
WIDTH, ROW, LABEL, TOP, MARGIN = 960, 26, 330, 44, 16
COLOURS = {"engine": "#8250df", "reader": "#0969da", "coordinator": "#1a7f37", "owner": "#bc4c00"}
SHOWN = ("kvdir.blocks", "kvdir.hits", "kvdir.present", "kvdir.source", "kvdir.bytes")


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, SpanCollector() as collector:
        spans = asyncio.run(loaded(Path(directory), collector))
    path.write_text(drawing(spans))
    for item in in_order(spans):
        print(f"{'  ' * item[0]}{item[1].name} ({role(item[1])}) {(item[1].end_ns - item[1].start_ns) / 1e6:.2f} ms")


async def loaded(directory: Path, collector: SpanCollector) -> list[Received]:
    """The spans of the fastest load: the engine's own, the agents', the coordinator's."""
    namespace = sample_namespace(block_bytes=BLOCK_BYTES)
    engine_side = open_tracing(collector.url, 0.0, service="engine", instance="engine", version="")
    settings = {"otlp_endpoint": collector.url, "arena_bytes": 256 << 20, "transports": ("tcp",), "directory_timeout_s": 5.0}
    async with local_cluster(directory, namespace=namespace, coordinator=False, **settings) as cluster:
        await cluster.start_coordinator(otlp_endpoint=collector.url, name="coordinator")
        for node in ("owner", "reader"):
            await cluster.start_agent(node)
        owner, reader = await cluster.engine("owner"), await cluster.engine("reader")
        took: dict[str, int] = {}
        for number in range(LOADS):
            wanted = cluster.blocks.chain(BLOCKS, root=str(number))
            await owner.store(wanted, cluster.blocks.data(wanted), deadline_s=20)
            await cluster.wait_known("owner")
            room = cluster.blocks.room(wanted)
            context = TraceContext(secrets.token_hex(16), "", True, recorder=engine_side.exporter)
            with trace.within(context), span("request: load", Kind.INTERNAL):
                result = await reader.load(wanted, into=room, deadline_s=20)
            assert result.hits == BLOCKS, result
            took[context.trace_id] = result.timings.total_us
    await asyncio.to_thread(engine_side.close, grace_s=5.0)
    best = min(took, key=took.__getitem__)
    await eventually(lambda: {role(item) for item in collector.trace(best)} == set(COLOURS), what="all spans")
    return collector.trace(best)


def role(item: Received) -> str:
    return str(item.resource["service.instance.id"])


def in_order(spans: Sequence[Received], parent: str = "", depth: int = 0) -> list[tuple[int, Received]]:
    """(depth, span), each before what it called."""
    tree = children(spans)
    out: list[tuple[int, Received]] = []
    for item in tree[parent]:
        out += [(depth, item), *in_order(spans, item.span_id, depth + 1)]
    return out


def drawing(spans: Sequence[Received]) -> str:
    """One row a span: its name in the colour of who did it, its bar, how long it took and what it says."""
    rows = in_order(spans)
    began = min(item.start_ns for item in spans)
    total = max(item.end_ns for item in spans) - began
    room = WIDTH - LABEL - MARGIN
    height = TOP + ROW * len(rows) + MARGIN + 18
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="24" font-size="14" font-weight="600" fill="#1f2328">One load of {BLOCKS} blocks, '
        f"{BLOCKS * BLOCK_BYTES >> 20} MiB, that another node has: {total / 1e6:.1f} ms</text>",
    ]
    for part in range(5):
        x, anchor = LABEL + room * part / 4, "end" if part == 4 else "middle"
        out += [
            f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height - 26}" stroke="#d8dee4"/>',
            f'<text x="{x:.1f}" y="{height - 10}" fill="#59636e" text-anchor="{anchor}">{total * part / 4e6:.1f} ms</text>',
        ]
    for number, (depth, item) in enumerate(rows):
        y = TOP + ROW * number
        colour = COLOURS[role(item)]
        left = LABEL + room * (item.start_ns - began) / total
        wide = max(2.0, room * (item.end_ns - item.start_ns) / total)
        note = _note(item)
        inside = wide > 6 * len(note) + 12
        at, anchor, ink = (left + 6, "start", "#ffffff") if inside else (left + wide + 6, "start", "#59636e")
        if not inside and at + 6.2 * len(note) > WIDTH:
            at, anchor = left - 6, "end"
        out += [
            f'<text x="{MARGIN + 14 * depth}" y="{y + 15}" fill="{colour}" font-weight="600">{escape(role(item))}'
            f'<tspan fill="#1f2328" font-weight="400"> {escape(_short(item.name))}</tspan></text>',
            f'<rect x="{left:.1f}" y="{y + 3}" width="{wide:.1f}" height="16" rx="3" fill="{colour}"/>',
            f'<text x="{at:.1f}" y="{y + 15}" fill="{ink}" font-size="11" text-anchor="{anchor}">{escape(note)}</text>',
        ]
    return "\n".join([*out, "</svg>", ""])


def _note(item: Received) -> str:
    """ "1.32 ms; blocks 64, hits 64" """
    said = ", ".join(f"{key.removeprefix('kvdir.')} {_shown(item.attributes[key])}" for key in SHOWN if key in item.attributes)
    return f"{(item.end_ns - item.start_ns) / 1e6:.2f} ms{'; ' + said if said else ''}"


def _short(name: str) -> str:
    """Without the package."""
    return name.rpartition(".")[2] if "/" in name else name


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
