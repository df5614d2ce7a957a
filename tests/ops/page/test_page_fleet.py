"""The page of fleets that are not there: many nodes, hostile names, narrow windows, both colours."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

from playwright.sync_api import Page, expect

from kvdir.testing.page_fleet import MODEL as MODEL_OF_FLEET
from kvdir.testing.page_fleet import FleetSource, page_server
from kvdir.testing.wait import wait_until

Look = Callable[..., Page]
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(2)>',
    "javascript:alert(3)//",
    "a" * 200,
    "host/<b onclick=alert(4)>engine",
)
MODEL = "<iframe srcdoc=x>"
READ = (
    *(".dim", ".legend li", "#fleet-map .name", "#fleet-map .word", ".card .label", "#namespaces-body th", "#live-words"),
    *("#namespaces-body td", ".matrix .cell", ".matrix th", "#explain-form button", "#theme"),
)
HEAP_BYTES = 50 * 2**20
DRAW_MS = 100
expect.set_options(timeout=60_000)


def pictures(page: Page) -> int:
    return int(page.evaluate("document.documentElement.dataset.picture"))


def wait_pictures(page: Page, count: int) -> None:
    until = pictures(page) + count
    wait_until(lambda: pictures(page) >= until, f"{count} pictures", within_s=60)


def test_names_are_text_and_never_markup(look: Look) -> None:
    with page_server(FleetSource(len(HOSTILE) + 1, names=HOSTILE, model=MODEL), interval_s=0.2) as url:
        page = look(url, width=400)
        wait_pictures(page, 3)
        assert page.evaluate("document.images.length") == 1, "the mark on top"
        assert page.evaluate("document.scripts.length") == 2
        names = page.locator("#fleet-map .name").all_inner_texts()
        assert {*HOSTILE[:-1], "host"} <= set(names)
        expect(page.locator("#fleet-map .engines").filter(has_text="<b onclick=alert(4)>engine")).to_be_visible()
        expect(page.locator("#namespaces-body td").first).to_have_text(MODEL)
        assert page.locator("iframe, svg[onload], b").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator("#fleet-map .node").filter(has_text="onerror").click()
        expect(page.locator("#node-title")).to_have_text(HOSTILE[0])
        expect(page.locator("#node-body")).to_contain_text("applied, announced")
        assert page.evaluate("document.images.length") == 1
        page.keyboard.press("Escape")
        page.locator("#fleet-map .node", has_text="no agent of this name").click()
        expect(page.locator("#node-title")).to_have_text(HOSTILE[-1])
        expect(page.locator("#node-body")).to_contain_text("applied, announced")


def test_what_has_the_focus_or_is_marked_stays_while_figures_change(look: Look) -> None:
    with page_server(FleetSource(4), interval_s=0.05) as url:
        page = look(url)
        page.locator("#transfers-body button").nth(2).focus()
        wait_pictures(page, 3)
        assert page.evaluate("document.activeElement.textContent") == "node-002"
        page.evaluate("getSelection().selectAllChildren(document.querySelector('#namespaces-body td'))")
        wait_pictures(page, 3)
        assert page.evaluate("getSelection().toString()") == MODEL_OF_FLEET
        page.evaluate("getSelection().selectAllChildren(document.body)")
        namespaces = page.locator("#namespaces-body")
        before = namespaces.inner_text()
        wait_until(lambda: namespaces.inner_text() != before, "a page that is marked as a whole goes on", within_s=60)


def test_it_is_readable_in_both_colours_at_any_width(look: Look) -> None:
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    with page_server(FleetSource(12), interval_s=0.2) as url:
        page = look(url, reduced_motion="reduce")
        for width, scheme in itertools.product((400, 1440), schemes):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            wait_pictures(page, 2)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing scrolls sideways"
            assert contrast(page, "body") > 7
            for selector in READ:
                assert contrast(page, selector) > 4.5, (selector, scheme)


def test_colours_are_chosen_here_and_kept(look: Look) -> None:
    with page_server(FleetSource(3), interval_s=0.2) as url:
        page = look(url, color_scheme="light")
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        page.reload()
        page.wait_for_selector("html[data-picture]")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_two_hundred_nodes_are_drawn_in_time_and_cost_little_memory(look: Look) -> None:
    with page_server(FleetSource(200), interval_s=0.1, busy=0.5) as url:
        page = look(url)
        expect(page.locator("#fleet-map .node")).to_have_count(200)
        protocol = page.context.new_cdp_session(page)
        protocol.send("Performance.enable")

        def measured() -> dict[str, float]:
            protocol.send("HeapProfiler.collectGarbage")
            return {item["name"]: item["value"] for item in protocol.send("Performance.getMetrics")["metrics"]}

        def drawn_in_time() -> bool:
            return float(page.evaluate("document.documentElement.dataset.drawMs")) < DRAW_MS

        wait_until(drawn_in_time, f"some picture is drawn within {DRAW_MS} ms, whatever else the machine does", within_s=60)
        wait_pictures(page, 8)
        after = measured()
        assert after["JSHeapUsedSize"] < HEAP_BYTES
        assert after["Nodes"] < 10_000, "what is not shown any more is gone"


def test_a_thousand_nodes_are_one_map_and_what_is_wrong_is_named_above_it(look: Look) -> None:
    with page_server(FleetSource(1000, seed=1), interval_s=0.2) as url:
        page = look(url)
        expect(page.locator("#fleet-map .node")).to_have_count(1000)
        expect(page.locator("#fleet-trouble button").first).to_be_visible()
        page.fill("#fleet-filter", "node-77")
        expect(page.locator("#fleet-map .node")).to_have_count(10)
        page.locator("#fleet-map .node").first.click()
        expect(page.locator("#node-title")).to_have_text("node-770")


def contrast(page: Page, selector: str) -> float:
    """WCAG 2 contrast of an element's text with what is behind it."""
    return float(
        page.evaluate(
            """selector => {
              const element = document.querySelector(selector);
              const parts = colour => [...colour.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
              const over = ([...top], under) => under.map((part, at) => top[3] * top[at] + (1 - top[3]) * part);
              const light = colour => {
                const [red, green, blue] = colour.slice(0, 3).map(part => {
                  const value = part / 255;
                  return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
                });
                return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
              };
              const layers = [];
              for (let at = element; at; at = at.parentElement) layers.push(parts(getComputedStyle(at).backgroundColor));
              const behind = layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
              const both = [light(over(parts(getComputedStyle(element).color), behind)), light(behind)];
              return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
            }""",
            selector,
        )
    )
