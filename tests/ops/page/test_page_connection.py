"""The page when its coordinator has nothing to show, goes away, and comes back."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator

from playwright.sync_api import Page, expect

Look = Callable[..., Page]
expect.set_options(timeout=60_000)


@contextlib.contextmanager
def coordinator(http: str = "127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, address of its page)"""
    command = [sys.executable, "-m", "kvdir", "serve", "--listen", "127.0.0.1:0", "--http-listen", http, "--output", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())["page"]
        finally:
            process.kill()


def test_it_says_what_to_do_and_comes_back_by_itself_after_a_restart(look: Look) -> None:
    with coordinator() as (process, address):
        page = look(f"http://{address}/", quiet=False)  # a browser reports every refused connection
        expect(page.locator("#fleet-hint")).to_contain_text("peer-agent serve --coordinators")
        for words in ("#log-list", "#transfers-body", "#namespaces-body", "#explain-recent"):
            expect(page.locator(words)).not_to_be_empty()
        expect(page.locator("#live-words")).to_have_text("live")
        process.kill()
        process.wait()
        expect(page.locator("#notices")).to_contain_text("Connection lost")
        expect(page.locator("#notices")).to_contain_text("as of")
        assert "old" in (page.locator("#main").get_attribute("class") or "")
    with coordinator(address):
        expect(page.locator("#live-words")).to_have_text("live")
        expect(page.locator("#notices")).not_to_contain_text("Connection lost")
        expect(page.locator("#log-list")).to_contain_text("restarted")


def test_a_tab_that_nobody_sees_hears_nothing(look: Look) -> None:
    with coordinator() as (_, address):
        page = look(f"http://{address}/")
        page.evaluate(
            """() => {
              Object.defineProperty(document, "hidden", {value: true, configurable: true});
              document.dispatchEvent(new Event("visibilitychange"));
            }"""
        )
        expect(page.locator("#live")).to_have_attribute("data-state", "hidden")
        page.evaluate(
            """() => {
              Object.defineProperty(document, "hidden", {value: false});
              document.dispatchEvent(new Event("visibilitychange"));
            }"""
        )
        expect(page.locator("#live")).to_have_attribute("data-state", "live")
