"""What the live page costs, at the coordinator and in a browser, with so many nodes.

    .venv/bin/python bench/page.py [--nodes 200 1000] [--pictures 30] [--output json]

loop_ms: the longest turn of the coordinator's loop while a copy is made, over a real directory with as many streams.
picture_ms: the whole picture: copy, document, JSON. draw_ms: a browser's main thread for one picture, layout and paint
included; these are CPU time. heap_MiB: of the page after all pictures and a collection. The browser is the machine's chromium,
driven by playwright (extra ops-tests); without them these two are empty.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from typing import Any

import msgspec

from kvdir.cli.bench import machine, show
from kvdir.core.admission import Hello, Welcomed
from kvdir.core.directory import Directory
from kvdir.core.event import Event, Heartbeat, HeartbeatFigures, ReadFigures, ReadSource
from kvdir.core.namespaces import Announced
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch, open_index
from kvdir.location import Tier
from kvdir.obs.metrics import CoordinatorMetrics
from kvdir.server.config import CoordinatorConfig
from kvdir.server.coordinator import Coordinator
from kvdir.server.page.copies import DirectoryPage
from kvdir.server.page.document import document
from kvdir.testing.page_fleet import NAMESPACE, FleetSource, page_server

BLOCKS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--pictures", type=int, default=30)
    parser.add_argument("--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    rows = [{"nodes": nodes, **server(nodes, options.pictures), **browser(nodes, options.pictures)} for nodes in options.nodes]
    if options.output == "json":
        sys.stdout.write(msgspec.json.encode({"machine": machine(), "page": rows}).decode() + "\n")
        return
    columns = list(rows[0])
    emit_table(columns, rows)


def emit_table(columns: list[str], rows: list[dict[str, Any]]) -> None:
    lines = [columns, *([show(row[name]) for name in columns] for row in rows)]
    for line in lines:
        sys.stdout.write("".join(f"{cell:>14}" for cell in line) + "\n")


# -- the coordinator -----------------------------------------------------------------------------------------------------


def server(nodes: int, pictures: int) -> dict[str, Any]:
    source = DirectoryPage(coordinator_with(nodes))
    turns_ms, pictures_ms, size = [], [], 0
    for number in range(pictures):
        began_s = time.process_time()
        copy, longest_s = asyncio.run(copied(source))
        size = len(msgspec.json.encode(document(copy, None, number=number, viewers=1)))
        pictures_ms.append(1000 * (time.process_time() - began_s))
        turns_ms.append(1000 * longest_s)
    return {
        "loop_ms": round(median(turns_ms), 2),
        "picture_ms": round(median(pictures_ms), 1),
        "picture_KiB": size // 1024,
    }


async def copied(source: DirectoryPage) -> tuple[Any, float]:
    """A copy, and the longest time (of CPU) for which it held the loop."""
    longest_s, since_s, done = 0.0, time.process_time(), asyncio.create_task(source.copy())
    while not done.done():
        await asyncio.sleep(0)
        now_s = time.process_time()
        longest_s, since_s = max(longest_s, now_s - since_s), now_s
    return done.result(), longest_s


def coordinator_with(nodes: int) -> Coordinator:
    """Whose directory has so many streams, each with a heartbeat and some blocks."""
    config, now_s = CoordinatorConfig(), time.monotonic()
    directory = Directory(open_index(), Sketch, config.limits(), now_s=now_s)
    announced = Announced(NAMESPACE.digest, NAMESPACE.canonical().encode(), NAMESPACE.block_bytes)
    for number in range(nodes):
        said = directory.hello(Hello(f"node-{number:04d}", number + 1, 0, namespaces=(announced,)), now_s=now_s)
        assert isinstance(said, Welcomed)
        blocks = Fingerprints.chain(str(at).encode() for at in range(BLOCKS))
        directory.batch(said.stream, 1, [Event.stored(Tier.CPU, NAMESPACE.digest, blocks)], now_s=now_s)
        sources = tuple(ReadSource(f"node-{at:04d}", at, at << 20) for at in range(1, 9))
        figures = HeartbeatFigures(used_bytes=1 << 30, capacity_bytes=2 << 30, reads=ReadFigures(5, 4, 3, sources=sources))
        directory.heartbeat(said.stream, Heartbeat(1, figures), now_s=now_s)
    return Coordinator(config, directory, CoordinatorMetrics(), name="bench", version="0")


# -- the browser ---------------------------------------------------------------------------------------------------------


def browser(nodes: int, pictures: int) -> dict[str, Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        return {"draw_ms": "", "heap_MiB": ""}
    with (
        page_server(FleetSource(nodes), interval_s=0.05, busy=0.5) as url,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]) as chromium,
    ):
        page = chromium.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        page.wait_for_selector("html[data-picture]")
        protocol = page.context.new_cdp_session(page)
        protocol.send("Performance.enable", {"timeDomain": "threadTicks"})
        before, first = measured(protocol), drawn(page)
        while drawn(page) < first + pictures:
            page.wait_for_timeout(50)
        after, last = measured(protocol), drawn(page)
    draw_ms = 1000 * (after["TaskDuration"] - before["TaskDuration"]) / (last - first)
    return {"draw_ms": round(draw_ms, 1), "heap_MiB": round(after["JSHeapUsedSize"] / 2**20, 1)}


def measured(protocol: Any) -> dict[str, float]:
    protocol.send("HeapProfiler.collectGarbage")
    return {item["name"]: item["value"] for item in protocol.send("Performance.getMetrics")["metrics"]}


def drawn(page: Any) -> int:
    return int(page.evaluate("document.documentElement.dataset.picture"))


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
