"""DNS rebinding: names that are not ours are told apart from addresses and localhost."""

from __future__ import annotations

import pytest

from kvdir.server.host_header import host_fault, name_of


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
