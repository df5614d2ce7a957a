"""The page of a running demo: what it says is what the coordinator says, as it happens."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from kvdir.client.sync import Client
from kvdir.core.views import NodeView
from kvdir.testing.simulate import trace_namespace
from kvdir.testing.trace import read_trace
from kvdir.testing.wait import wait_until

Look = Callable[..., Page]
WITHIN_MS = 60_000
expect.set_options(timeout=WITHIN_MS)


def admin(demo: dict[str, Any]) -> dict[str, NodeView]:
    with Client(demo["coordinators"][0]["grpc"], deadline_s=30.0) as client:
        return {view.trust.node: view for view in client.nodes()}


def tile(page: Page, node: str) -> Any:
    return page.locator(f'#fleet-map .node[data-name="{node}"]')


def test_what_the_page_says_is_what_the_coordinator_says(look: Look, demo: dict[str, Any]) -> None:
    page = look(demo["page"])
    assert set(page.locator("#fleet-map .node").evaluate_all("all => all.map(one => one.dataset.name)")) == set(admin(demo))

    def agree() -> bool:
        """Figures move: at some moment between two answers of the coordinator they are equal."""
        said = tile(page, "node-0").locator(".row").nth(1).inner_text()
        view = admin(demo)["node-0"]
        return f"{sum(holding.blocks.value for holding in view.holdings):,} blocks" in said.replace("\n", " ")

    wait_until(agree, "the tile says what Admin says", within_s=60)
    expect(page.locator("#namespaces-body")).to_contain_text("trace-replay")
    expect(page.locator("#transfers-body")).to_contain_text("node-0")
    expect(page.locator("#card-lookups strong")).to_contain_text("/s")
    expect(page.locator("#log-list")).to_contain_text("registered")
    expect(page.locator("#loads canvas")).to_have_attribute("aria-label", re.compile(r"hit here [\d.]+"))


def test_a_fault_shows_as_it_happens(look: Look, demo: dict[str, Any]) -> None:
    page = look(demo["page"])
    victim = next(agent for agent in demo["agents"] if agent["node"] == "node-2")
    os.kill(victim["pid"], signal.SIGKILL)
    expect(tile(page, "node-2").locator(".word")).to_contain_text("stale")
    expect(tile(page, "node-2").locator(".reason")).not_to_be_empty()
    assert tile(page, "node-2").locator("svg.state").get_attribute("data-state") == "stale", "a shape, too, and no colour alone"
    expect(tile(page, "node-2")).to_contain_text("~")
    expect(page.locator("#log-list")).to_contain_text("node-2")
    expect(page.locator("#card-blocks strong.untrusted")).to_have_count(1)
    assert "node-2" in (page.locator("#card-blocks").get_attribute("title") or "")


def test_the_explainer_says_who_holds_pasted_blocks(look: Look, demo: dict[str, Any]) -> None:
    request = next(iter(read_trace(demo["trace"], limit=1)))
    fingerprints = request.fingerprints
    digest = trace_namespace(block_bytes=8192).digest

    def stored() -> bool:
        with Client(demo["coordinators"][0]["grpc"], deadline_s=30.0) as client:
            return client.lookup(digest, fingerprints).hits == len(fingerprints)

    wait_until(stored, "somebody holds all of it", within_s=60)
    page = look(demo["page"])
    page.fill("#explain-text", "\n".join(item.hex() for item in fingerprints))
    page.click("#explain-form button")
    answer = page.locator("#explain-answer .answer")
    expect(answer).to_contain_text(f"{len(fingerprints)} of {len(fingerprints)} blocks")
    with Client(demo["coordinators"][0]["grpc"], deadline_s=30.0) as client:
        holders = {trust.node for trust in client.lookup(digest, fingerprints).nodes}
    assert holders & set(answer.locator("button.link").all_inner_texts())
    page.fill("#explain-text", "certainly not a fingerprint")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#explain-answer .notice")).to_contain_text("is no fingerprint")


@pytest.mark.parametrize("width", [1440, 400])
def test_a_node_is_opened_and_closed_by_keyboard_alone(look: Look, demo: dict[str, Any], width: int) -> None:
    page = look(demo["page"], width=width)
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('node')"):
            break
    assert page.evaluate("document.activeElement.dataset.name") == "node-0"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.name") == "node-1"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
    page.keyboard.press("Enter")
    body = page.locator("#node-body")
    expect(body).to_contain_text("confirmed by the owner")
    expect(body).to_contain_text(f"{admin(demo)['node-1'].trust.epoch:016x}")
    expect(body).to_contain_text("trace-replay")
    assert page.url.endswith("#node=node-1")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("Escape")
    expect(page.locator("#node")).not_to_be_visible()
    assert page.evaluate("document.activeElement.dataset.name") == "node-1", "back where one was"
