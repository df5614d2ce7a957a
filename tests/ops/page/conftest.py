"""A browser for the page, and things to look at: a demo with traffic, and a fleet that is not there.

Whatever a test opens is watched: a request to elsewhere, an error in the console or a dialog fails it.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from kvdir.testing.prometheus_servers import program

OPEN_S = 60.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of a module, in which every test is a plain function: as long as it is there, a loop runs in this thread."""
    with sync_playwright() as playwright:
        path = program("chromium", "chromium-browser")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def look(browser: Browser) -> Iterator[Callable[..., Page]]:
    """`look(url, width=400, color_scheme="dark")`: a window in which the first picture was drawn."""
    with contextlib.ExitStack() as stack:
        faults: list[str] = []

        def opened(url: str, *, width: int = 1440, height: int = 900, quiet: bool = True, **options: Any) -> Page:
            context = browser.new_context(viewport={"width": width, "height": height}, **options)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(1000 * OPEN_S)
            page.on("request", lambda sent: None if sent.url.startswith(url) else faults.append(f"asked for {sent.url}"))
            page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
            page.on("pageerror", lambda error: faults.append(f"error: {error}"))
            if quiet:
                page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
            page.goto(url)
            page.wait_for_selector("html[data-picture]")
            return page

        yield opened
        assert not faults


def trace_of(path: Path, *, requests: int = 40) -> Path:
    """Chats that grow and share their first block."""
    rng, lines = random.Random(3), []
    for number in range(requests):
        chat = rng.randrange(6)
        blocks = [0, *(1000 * (chat + 1) + at for at in range(4 + number // 10))]
        lines.append(
            json.dumps({"timestamp": number, "input_length": 512 * len(blocks), "output_length": 1, "hash_ids": blocks})
        )
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `kvdir demo --hold` says when it is ready. node-2 may be dead: a test kills it."""
    trace = trace_of(tmp_path_factory.mktemp("demo") / "trace.jsonl")
    options = ["--nodes", "3", "--block-bytes", "8KiB", "--blocks-per-node", "200", "--rate", "10", "--trace", str(trace)]
    command = [sys.executable, "-m", "kvdir", "demo", "--hold", "--output", "json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield {**json.loads(process.stdout.readline()), "trace": trace}
        finally:
            process.send_signal(signal.SIGTERM)
            _, words = process.communicate(timeout=60)
        assert process.returncode == 0, words
