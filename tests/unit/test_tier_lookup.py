"""What the tier tells vLLM's scheduler: at once from a replica, within the deadline from the agent, never twice in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvdir.client.replica_reader import nobody
from kvdir.core.answer import Lookup
from kvdir.fingerprint import Fingerprints
from kvdir.testing.wait import wait_until
from peer_agent.client.results import LookupResult
from peer_agent.connectors.vllm.tier_keys import by_group
from peer_agent.connectors.vllm.tier_lookup import Lookups, Verdict

LOOKUP_S = 0.2


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def keys(count: int, group: int = 0) -> list[bytes]:
    return [key(number, group) for number in range(count)]


@dataclass
class Session:
    """Scripted. held: fingerprints that somebody has. replica: whether the agent keeps one."""

    held: set[bytes] = field(default_factory=set)
    replica: bool = True
    lag_s: float = 0.0
    attached: bool = True
    silent: threading.Event = field(default_factory=threading.Event)
    asked: list[Fingerprints] = field(default_factory=list)
    looked: list[Fingerprints] = field(default_factory=list)
    namespace: Any = field(default_factory=lambda: SimpleNamespace(digest=b"n" * 32))

    @property
    def directory(self) -> Any:
        return SimpleNamespace(
            lookup_here=self._here, replica=SimpleNamespace(usable=self.replica, lag_s=self.lag_s, reason="")
        )

    def _here(self, digest: bytes, fingerprints: Fingerprints) -> Lookup:
        self.looked.append(fingerprints)
        if not self.replica:
            return nobody(len(fingerprints), "none")
        runs = b"".join(
            position.to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes(4)
            for position, item in enumerate(fingerprints)
            if item in self.held
        )
        return Lookup(runs, (b"",), (), len(runs) // 12, len(fingerprints), lag_s=self.lag_s, source="replica")

    def lookup(self, fingerprints: Fingerprints, /, *, deadline_s: float) -> LookupResult:
        self.asked.append(fingerprints)
        if self.silent.is_set():
            time.sleep(deadline_s)  # as a call does that nobody answers
            return LookupResult(local=bytes(len(fingerprints)), nominated=bytes(len(fingerprints)), reason="late")
        local = bytes(item in self.held for item in fingerprints)
        return LookupResult(local=local, nominated=bytes(len(local)), directory_reached=True)


@pytest.fixture
def session() -> Session:
    return Session(held={key(number)[:32] for number in (0, 1, 3)})


@pytest.fixture
def lookups(session: Session) -> Iterator[Lookups]:
    made = Lookups({0: session}, lookup_s=LOOKUP_S)
    yield made
    made.close()


def settled(lookups: Lookups, request: str, wanted: bytes, known: list[bytes]) -> Verdict:
    """The verdict, once it is no WAIT."""
    seen = [Verdict.WAIT]

    def there() -> bool:
        seen.append(lookups.look(request, wanted, known))
        return seen[-1] is not Verdict.WAIT

    wait_until(there, "a verdict")
    return seen[-1]


def test_replica_is_read_once_for_all_keys_of_a_request(session: Session, lookups: Lookups):
    known = keys(5)
    verdicts = [lookups.look("r", each, known) for each in known]
    assert verdicts == [Verdict.HIT, Verdict.HIT, Verdict.MISS, Verdict.HIT, Verdict.MISS]
    assert len(session.looked) == 1
    assert not session.asked


def test_key_is_a_miss_when_its_group_is_not_shared(lookups: Lookups):
    known = [key(0), key(0, group=1)]
    assert [lookups.look("r", each, known) for each in known] == [Verdict.HIT, Verdict.MISS]


@pytest.mark.parametrize("trouble", ["none", "behind"])
def test_agent_is_asked_in_the_background_when_the_replica_cannot_say(session: Session, lookups: Lookups, trouble: str):
    session.replica, session.lag_s = trouble == "behind", 5.0
    known = keys(5)
    assert settled(lookups, "r", known[0], known) is Verdict.HIT
    assert [lookups.look("r", each, known) for each in known[1:]] == [
        Verdict.HIT, Verdict.MISS, Verdict.HIT, Verdict.MISS,
    ]  # fmt: skip
    assert len(session.asked) == 1


def test_nobody_waits_beyond_the_deadline_and_the_next_not_at_all_when_the_agent_is_silent(session: Session, lookups: Lookups):
    session.replica = False
    session.silent.set()
    began_s = time.monotonic()
    assert lookups.look("r", key(0), keys(1)) is Verdict.WAIT
    assert settled(lookups, "r", key(0), keys(1)) is Verdict.MISS
    assert time.monotonic() - began_s < LOOKUP_S + 0.5
    assert lookups.look("next", key(0), keys(1)) is Verdict.MISS


def test_questions_are_answered_again_when_one_could_not_be(session: Session, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("peer_agent.connectors.vllm.tier_lookup.PAUSE_S", 0.0)
    session.replica, usual = False, session.lookup
    monkeypatch.setattr(session, "lookup", lambda *_, **__: 1 / 0)
    lookups = Lookups({0: session}, lookup_s=LOOKUP_S)
    assert settled(lookups, "r", key(0), keys(2)) is Verdict.MISS
    monkeypatch.setattr(session, "lookup", usual)
    assert settled(lookups, "s", key(0), keys(2)) is Verdict.HIT
    lookups.close()


def test_everything_is_a_miss_at_once_when_there_is_no_agent(session: Session, lookups: Lookups):
    session.replica = session.attached = False
    assert lookups.look("r", key(0), keys(1)) is Verdict.MISS
    assert not session.asked


def test_block_is_a_miss_for_all_requests_when_a_load_did_not_bring_it(session: Session, lookups: Lookups):
    known = keys(2)
    assert lookups.look("r", known[0], known) is Verdict.HIT
    lookups.failed("r", [known[0]])
    assert lookups.look("r", known[0], known) is Verdict.MISS
    assert lookups.look("r", known[1], known) is Verdict.HIT
    assert lookups.look("other", known[0], known) is Verdict.MISS
    assert lookups.look("other", known[1], known) is Verdict.HIT


def test_block_stays_a_miss_for_the_request_when_its_failure_is_forgotten_elsewhere(
    lookups: Lookups, monkeypatch: pytest.MonkeyPatch
):
    known = keys(1)
    monkeypatch.setattr("peer_agent.connectors.vllm.tier_lookup.FAILED_S", 0.0)
    monkeypatch.setattr("peer_agent.connectors.vllm.tier_lookup.FRESH_S", 0.0)
    assert lookups.look("r", known[0], known) is Verdict.HIT
    lookups.failed("r", known)
    assert lookups.look("r", known[0], known) is Verdict.MISS
    assert lookups.look("other", known[0], known) is Verdict.HIT
    lookups.forget("r")
    assert lookups.look("r", known[0], known) is Verdict.HIT


def test_request_is_looked_up_anew_when_it_has_grown(session: Session, lookups: Lookups):
    known = keys(2)
    lookups.look("r", known[0], known)
    known = keys(4)
    assert lookups.look("r", known[3], known) is Verdict.HIT
    assert len(session.looked) == 2


def test_request_is_never_asked_for_when_it_is_excluded(session: Session, lookups: Lookups):
    lookups.describe("r", excluded=True)
    assert lookups.look("r", key(0), keys(1)) is Verdict.MISS
    assert not session.looked
    assert lookups.excluded("r")
    assert not lookups.excluded("another")


def test_fingerprints_differ_by_adapter_when_the_engine_names_it_alike(lookups: Lookups, session: Session):
    lookups.describe("r", adapter=b"adapter one")
    assert lookups.look("r", key(0), keys(1)) is Verdict.MISS
    names = {part.fingerprints for adapter in (b"", b"one", b"two") for part in by_group(keys(3), adapter=adapter)}
    assert len(names) == 3
    assert session.looked[0] == by_group(keys(1), adapter=b"adapter one")[0].fingerprints


def test_keys_are_told_apart_by_group_in_any_order():
    mixed = [key(7, 2), key(7, 0), key(8, 2), key(9, 1)]
    parts = by_group(mixed)
    assert [(part.group, part.positions.tolist()) for part in parts] == [(2, [0, 2]), (0, [1]), (1, [3])]
    assert list(parts[0].fingerprints) == [key(7)[:32], key(8)[:32]]


def test_keys_of_two_widths_are_refused():
    with pytest.raises(ValueError, match="different widths"):
        by_group([key(1), key(2)[16:]])
