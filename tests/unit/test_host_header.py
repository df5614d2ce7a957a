"""DNS rebinding: names that are not ours are told apart from addresses and localhost."""

from __future__ import annotations

import pytest

from kvdir.server.host_header import foreign_page, host_fault, name_of


@pytest.mark.parametrize(
    "header", ["127.0.0.1:7401", "127.0.0.1", "localhost:7402", "LOCALHOST", "[::1]:7401", "10.0.0.5:80", "localhost."]
)
def test_addresses_and_localhost_are_let_in(header: str) -> None:
    assert host_fault(header) == ""


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "evil.example",
        "evil.example:7401",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "[::1",
        "[::1]x",
        "a:b",
        "[::1]:",
    ],
)
def test_other_names_and_nonsense_are_refused_with_words(header: str | None) -> None:
    assert host_fault(header)


def test_a_name_is_let_in_when_it_is_ours() -> None:
    assert host_fault("Indexer.kvdir.svc:7404", names={"indexer.kvdir.svc"}) == ""


@pytest.mark.parametrize(("header", "name"), [("a.b:1", "a.b"), ("[2001:db8::1]:5", "2001:db8::1"), ("a:", ""), (":5", "")])
def test_name_of_a_header(header: str, name: str) -> None:
    assert name_of(header) == name


@pytest.mark.parametrize(
    ("headers", "loopback", "refused"),
    [
        ({"host": "127.0.0.1:7404"}, True, False),
        ({}, True, False),
        ({"host": "evil.example:7404"}, True, True),
        ({"host": "coordinator.svc:7404"}, False, False),
        ({"host": "127.0.0.1:7404", "origin": "http://127.0.0.1:7404"}, True, False),
        ({"host": "127.0.0.1:7404", "origin": "https://evil.example"}, True, True),
        ({"host": "coordinator.svc:7404", "origin": "null"}, False, True),
    ],
)
def test_a_foreign_page_is_refused_when_it_asks_an_api(headers: dict[str, str], loopback: bool, refused: bool) -> None:
    assert bool(foreign_page(headers, loopback=loopback)) is refused
