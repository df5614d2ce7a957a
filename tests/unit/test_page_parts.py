"""The pure parts of the live page: what is pasted, what is added up, what has changed."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from kvdir.core.admission import Hello, Limits, Welcomed
from kvdir.core.answer import Lookup
from kvdir.core.directory import Directory
from kvdir.core.event import Event, Heartbeat, HeartbeatFigures, ReadFigures
from kvdir.core.namespaces import Announced
from kvdir.core.recent_lookups import MAX_NODES, RecentLookups
from kvdir.core.story import StoryEntry
from kvdir.core.who_holds import who_holds
from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch, open_index
from kvdir.location import NodeTrust, StreamState, Tier
from kvdir.server.page.copies import Changes
from kvdir.server.page.document import document, explained, story_document
from kvdir.server.page.question import MAX_FINGERPRINTS, read_question
from kvdir.server.page.rates import Rates
from kvdir.testing.page_fleet import NAMESPACE, fleet_copy

ONE, OTHER = bytes(range(32)), bytes(range(32, 64))


@pytest.mark.parametrize(
    "text",
    [
        f"{ONE.hex()} {OTHER.hex()}",
        f"0x{ONE.hex()},\n 0x{OTHER.hex().upper()}",
        f"['{ONE.hex()}', '{OTHER.hex()}']",
        f'("{base64.b64encode(ONE).decode()}", "{base64.b64encode(OTHER).decode()}")',
        f"{base64.urlsafe_b64encode(ONE).decode().rstrip('=')} {OTHER.hex()}",
    ],
)
def test_fingerprints_are_read_however_they_were_printed(text: str) -> None:
    fingerprints = read_question(text).fingerprints
    assert fingerprints is not None
    assert list(fingerprints) == [ONE, OTHER]


@pytest.mark.parametrize("width", [8, 16, 32])
def test_every_width_is_read(width: int) -> None:
    for text in (ONE[:width].hex(), base64.b64encode(ONE[:width]).decode()):
        question = read_question(text)
        assert question.fingerprints is not None
        assert question.fingerprints.packed == ONE[:width]


def test_a_word_that_is_no_fingerprint_is_the_name_of_a_request() -> None:
    assert read_question(" chatcmpl-7f0a ").name == "chatcmpl-7f0a"
    assert read_question(" chatcmpl-7f0a ").fingerprints is None
    assert read_question("0af7651916cd43dd8448eb211c80319c").name  # a trace id, or a fingerprint of 16 bytes: both are tried


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "paste fingerprints"),
        (f"{ONE.hex()} nonsense!", "nonsense!"),
        (f"{ONE.hex()} {ONE[:8].hex()}", "32 and of 8 bytes"),
        ("00" * 8 + f" {'11' * 8}" * MAX_FINGERPRINTS, f"at most {MAX_FINGERPRINTS}"),
        ("x" * 10_000, "is no fingerprint"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        read_question(text)


def test_rates_are_differences_node_by_node_and_never_across_epochs() -> None:
    rates, copy = Rates(), fleet_copy(2, now_s=100.0)
    first, other = copy.nodes
    assert rates.add(replace(copy, nodes=(replace(first, reads=ReadFigures(hit_peer=10)), other))) is None
    again = replace(first, reads=ReadFigures(hit_peer=15, read_bytes=7), trust=first.trust)
    restarted = replace(other, reads=ReadFigures(hit_peer=1000), trust=replace(other.trust, epoch=99))
    point = rates.add(replace(copy, now_s=102.0, nodes=(again, restarted)))
    assert point is not None
    assert (point.took_s, point.hit_peer, point.read_bytes) == (2.0, 5, 7)


def test_a_gap_in_watching_is_a_new_beginning() -> None:
    rates, copy = Rates(), fleet_copy(1, now_s=100.0)
    rates.add(copy)
    assert rates.add(replace(copy, now_s=200.0)) is None
    assert rates.add(replace(copy, now_s=201.0)) is not None
    assert len(rates.points) == 1


def test_sums_are_untrusted_when_a_stream_that_may_have_changed_them_is() -> None:
    copy = fleet_copy(3)
    whole = document(copy, None, number=1, viewers=1)
    assert whole["tiers"]["cpu"][0][1] == ""
    assert whole["namespaces"][0]["blocks"][1] == ""
    lost = replace(copy.nodes[1].trust, state=StreamState.GAP, reason="3 events missing")
    two = (copy.nodes[0], replace(copy.nodes[1], trust=lost, holdings=()))
    partly = document(replace(copy, nodes=two), None, number=2, viewers=1)
    for figure in (partly["tiers"]["cpu"][0], partly["namespaces"][0]["blocks"]):
        assert figure[1] == "node-001: 3 events missing"


def test_nodes_that_have_left_are_listed_and_in_no_sum() -> None:
    copy = fleet_copy(2)
    left = replace(copy.nodes[0], trust=replace(copy.nodes[0].trust, state=StreamState.FENCED))
    both, one = (document(item, None, number=1, viewers=1) for item in (copy, replace(copy, nodes=(left, copy.nodes[1]))))
    assert len(one["nodes"]) == 2
    assert one["tiers"]["cpu"][0][0] < both["tiers"]["cpu"][0][0]
    assert one["states"] == {"fenced": 1, "synced": 1}


def test_changes_between_two_looks_are_told_once() -> None:
    changes, nodes = Changes(), fleet_copy(2).nodes
    changes.seen(nodes, now_s=1.0)
    assert changes.noted == 0
    stale = replace(nodes[0], trust=replace(nodes[0].trust, state=StreamState.STALE, reason="not heard"))
    changes.seen((stale, nodes[1]), now_s=2.0)
    changes.seen((stale,), now_s=3.0)
    assert [(note.node, note.words) for note in changes.newest(9)] == [
        ("node-001", "forgotten"),
        ("node-000", "synced -> stale: not heard"),
    ]
    assert [note.node for note in changes.of_node("node-000")] == ["node-000"]


def test_recent_lookups_are_found_by_either_name_and_bounded() -> None:
    recent = RecentLookups(max_lookups=2)
    nodes = tuple(NodeTrust(f"n{number}", 1, StreamState.SYNCED, "", 0.0, 0, "") for number in range(MAX_NODES + 3))
    for number in range(3):
        answer = Lookup(b"", (), nodes, number, 5)
        recent.add(float(number), b"d" * 32, answer, request_id=f"r{number}", trace_id=f"t{number}")
    assert recent.find("r0") is None
    assert recent.find("") is None
    found = recent.find("t2")
    assert found is not None
    assert (found.request_id, found.hits, len(found.nodes), found.more) == ("r2", 2, MAX_NODES, 3)
    assert [item.hits for item in recent.newest(9)] == [2, 1]


def test_who_is_left_out_of_an_answer_and_why_is_said() -> None:
    directory, digest = Directory(open_index(), Sketch, Limits(), now_s=0.0), NAMESPACE.digest
    announced = Announced(digest, NAMESPACE.canonical().encode(), NAMESPACE.block_bytes)
    blocks = Fingerprints.of([ONE, OTHER])
    streams = {}
    for epoch, name in enumerate(("here", "silent", "lossy"), 1):
        said = directory.hello(Hello(name, epoch, 0, namespaces=(announced,)), now_s=0.0)
        assert isinstance(said, Welcomed)
        streams[name] = said.stream
    directory.batch(streams["here"], 1, [Event.stored(Tier.CPU, digest, blocks)], now_s=0.0)
    directory.batch(streams["silent"], 1, [Event.stored(Tier.CPU, digest, blocks.slice(0, 1))], now_s=0.0)
    for name in ("here", "lossy"):
        directory.heartbeat(streams[name], Heartbeat(1 if name == "here" else 3, HeartbeatFigures()), now_s=100.0)
    directory.tick(now_s=100.0)
    answer = who_holds(directory, digest, blocks, now_s=100.0)
    assert {claim.trust.node: (claim.blocks, bool(claim.left_out)) for claim in answer.claims} == {
        "here": (2, False),
        "silent": (1, True),
    }
    assert answer.hits == 2
    assert [trust.node for trust in answer.doubtful] == ["lossy"], "it may hold what it was not heard to hold"
    assert directory.counters.lookups == 0
    told = explained(answer, None)
    assert [claim["node"] for claim in told["claims"]] == ["here", "silent"]
    assert told["runs"] == [(0, 1, [0, 1]), (1, 1, [0])]


def test_no_fingerprint_is_in_what_happened() -> None:
    words = f"a reader found 2 blocks absent (2 removed): {ONE.hex()}, {OTHER.hex()[:32]}"
    entry = StoryEntry(1.0, "n", 0xD4DDFAED81C1401C, "feedback", words)
    told = story_document(entry, now_s=2.0)
    assert told["words"] == "a reader found 2 blocks absent (2 removed): 00010203…, 20212223…"
    assert told["epoch"] == "d4ddfaed81c1401c"
