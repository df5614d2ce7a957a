"""`python -m deploy.monitoring.pictures` (make pictures): draws the five dashboards from a demo that runs for some minutes.

The demo loses events, and one of its agents is stopped twice for some seconds, so that panels of trouble show something.
Needs prometheus, chromium, and Pillow (extra ops-tests), which makes the files small.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from deploy.monitoring.__main__ import FILES, ROOT
from deploy.monitoring.answers import Span, answers
from deploy.monitoring.pictures.page import WIDTH, page
from deploy.monitoring.watched import Watched, watched_demo
from kvdir.testing.prometheus_servers import Prometheus, program

_STOP_S = 8.0
_RATE_S = 15.0
DEMO = ["--loss", "0.05", "--rate", "10", "--compute-ms", "5"]
NODE = "node-1"
"""Whose dashboard is drawn; the one that is stopped is another."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--seconds", type=float, default=240.0, help="how long to watch")
    parser.add_argument("demo", nargs="*", default=DEMO, help="flags of kvdir demo, after --")
    options = parser.parse_args(arguments)
    options.into.mkdir(parents=True, exist_ok=True)
    with watched_demo(*options.demo, rules=FILES / "rules.yaml") as watched:
        start_s = time.time()
        _with_trouble(watched, options.seconds)
        draw(watched.prometheus, Span(start_s=start_s, end_s=time.time(), step_s=2.0, rate_s=_RATE_S), options.into)
    return 0


def _with_trouble(watched: Watched, seconds: float) -> None:
    """Lets it run; an agent is stopped at a third and at two thirds, and goes on."""
    pid = watched.agents[2]["pid"]
    for _ in range(2):
        time.sleep(seconds / 3)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_STOP_S)
        os.kill(pid, signal.SIGCONT)
    time.sleep(seconds / 3)


def draw(prometheus: Prometheus, span: Span, into: Path) -> None:
    """One file for each dashboard of the chart."""
    for path in sorted((FILES / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        choices = {"node": NODE} if path.stem == "node" else {}
        html, height = page(dashboard, list(answers(prometheus, dashboard, span, choices)), span)
        target = into / f"dashboard-{path.stem}.png"
        _photograph(html, height, target)
        sys.stdout.write(f"{target}: {target.stat().st_size / 1024:.0f} KiB\n")


def _photograph(html: str, height: int, target: Path) -> None:
    """256 colours are enough for a page without photographs, and a third of the bytes."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "page.html").write_text(html)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{height}"]
        shot = Path(name) / "shot.png"
        subprocess.run(
            [program("chromium"), *flags, f"--screenshot={shot}", f"file://{name}/page.html"],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        with Image.open(shot) as image:
            image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
