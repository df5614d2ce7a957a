"""`python -m deploy.monitoring.page_picture` (make pictures): takes the picture of the live page in the README from a demo.

The demo loses events, and one of its agents is stopped before the picture, so that gaps, repairs and a node that is not heard
are in it. Needs chromium, and Pillow (extra ops-tests), which makes the file small.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from deploy.monitoring.watched import ROOT, held_demo
from kvdir.testing.prometheus_servers import program

SIZES = {"page": (1440, 1000, "light"), "page-dark": (1440, 1000, "dark"), "page-narrow": (400, 900, "light")}
DEMO = ["--loss", "0.03", "--rate", "12", "--requests", "250"]
STOPPED_S = 8.0
COLOURS = 128


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--seconds", type=float, default=150.0, help="how long the page is open before the pictures are taken")
    parser.add_argument("demo", nargs="*", default=DEMO, help="flags of kvdir demo, after --")
    options = parser.parse_args(arguments)
    options.into.mkdir(parents=True, exist_ok=True)
    with held_demo(tuple(options.demo)) as said, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program("chromium", "chromium-browser"), args=["--no-sandbox"])
        page: Any = browser.new_page()
        page.goto(said["page"])
        page.wait_for_selector("html[data-picture]")
        page.wait_for_timeout(1000 * options.seconds)
        os.kill(said["agents"][-1]["pid"], signal.SIGSTOP)
        page.wait_for_timeout(1000 * STOPPED_S)
        for name, (width, height, scheme) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            page.wait_for_timeout(1500)
            take(page, options.into / f"{name}.png")
        os.kill(said["agents"][-1]["pid"], signal.SIGCONT)
        browser.close()
    return 0


def take(page: Any, into: Path) -> None:
    """What the window shows, with few colours: a page has no more."""
    with tempfile.TemporaryDirectory() as directory:
        raw = Path(directory) / "raw.png"
        page.screenshot(path=raw)
        with Image.open(raw) as picture:
            picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(into, optimize=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
