"""Which of our events go out in the standard envelope."""

from __future__ import annotations

from typing import Any

from kvdir.core.event import Event
from kvdir.engines.rfc1527 import envelopes
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from kvdir.namespace import Namespace, StateKind


def announced(kind: StateKind, window_tokens: int = 0) -> Namespace:
    return Namespace.announced(
        model="m", block_tokens=16, hash_scheme="dynamo:xxh3", hash_seed="builtin", kind=kind, window_tokens=window_tokens
    )


def test_a_removal_ends_no_full_block_when_only_that_of_a_window_went() -> None:
    full, window = announced(StateKind.FULL), announced(StateKind.SLIDING_WINDOW, 64)
    state = announced(StateKind.RECURRENT)
    print_ = Fingerprints.of([b"12345678"])
    events = [Event.stored(Tier.GPU, space.digest, print_) for space in (full, window, state)]
    events += [Event.removed(Tier.GPU, window.digest, print_), Event.cleared(Tier.GPU)]
    spaces = {space.digest: space for space in (full, window, state)}
    told: list[dict[str, Any]] = envelopes(events, spaces, backend_id="n", first_event_id=1, timestamp_ms=0)
    assert [(item["event_id"], item["event_type"]) for item in told] == [(1, "stored"), (5, "cleared")]
