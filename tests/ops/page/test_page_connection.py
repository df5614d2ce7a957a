"""The page when its coordinator has nothing to show, goes away, and comes back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from urllib.parse import urlsplit

from playwright.sync_api import Page, expect

from kvdir.testing.page_fleet import FleetSource, page_server

Look = Callable[..., Page]
expect.set_options(timeout=60_000)


def test_it_says_what_to_do_and_comes_back_by_itself_after_a_restart(look: Look) -> None:
    with ExitStack() as first:
        url = first.enter_context(page_server(FleetSource(0, life="first"), interval_s=0.2))
        page = look(url, quiet=False)  # a browser reports every refused connection
        expect(page.locator("#fleet-hint")).to_contain_text("peer-agent serve --coordinators")
        for words in ("#log-list", "#transfers-body", "#namespaces-body", "#explain-recent"):
            expect(page.locator(words)).not_to_be_empty()
        expect(page.locator("#card-nodes")).to_contain_text("none yet")
        expect(page.locator("#live-words")).to_have_text("live")
        first.close()
        expect(page.locator("#notices")).to_contain_text("Connection lost")
        expect(page.locator("#notices")).to_contain_text("as of")
        assert "old" in (page.locator("#main").get_attribute("class") or "")
    with page_server(FleetSource(0, life="second"), interval_s=0.2, port=urlsplit(url).port or 0):
        expect(page.locator("#live-words")).to_have_text("live")
        expect(page.locator("#notices")).not_to_contain_text("Connection lost")
        expect(page.locator("#log-list")).to_contain_text("restarted")


def test_a_tab_that_nobody_sees_hears_nothing(look: Look) -> None:
    with page_server(FleetSource(0), interval_s=0.2) as url:
        page = look(url)
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
