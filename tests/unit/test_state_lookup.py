"""Answers about a model's state groups, folded: what is said of a node that several answers name."""

from __future__ import annotations

import struct

from kvdir.core.answer import Lookup
from kvdir.core.state_lookup import fold, questions
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, StreamState, Tier
from kvdir.namespace import Namespace

ATTENTION = {"layers": 1, "kv_heads": 1, "head_dim": 8}
NAMESPACE = Namespace.create(
    model="m", weights="w", kv_dtype="float16", layout="NHD", block_tokens=16, position="rope", parallel="replicated",
    groups=[{"kind": "full", **ATTENTION}, {"kind": "sliding_window", "window_tokens": 17, **ATTENTION}], adapter="none",
    hash_scheme="vllm:sha256", hash_seed="0", cache_policy="exact",
)  # fmt: skip


def answer(state: StreamState, *, missing: int = 0, age_s: float = 0.0) -> Lookup:
    """The node "a" has the one block."""
    runs, sets = struct.pack("<III", 0, 1, 0), (struct.pack("<I", Tier.CPU),)
    return Lookup(runs, sets, (NodeTrust("a", 1, state, "", age_s, missing, ""),), 1, 1)


def test_node_is_trusted_as_far_as_the_most_doubtful_answer_does() -> None:
    asked = questions(NAMESPACE, Fingerprints.chain([b"0"]))
    sure, doubtful = answer(StreamState.SYNCED, age_s=9.0), answer(StreamState.GAP, missing=3)
    for answers in ([sure, doubtful], [doubtful, sure]):
        (told,) = fold(asked, answers, NAMESPACE).nodes
        assert (told.state, told.missing_events) == (StreamState.GAP, 3)
    older, newer = answer(StreamState.SYNCED, age_s=2.0), answer(StreamState.SYNCED, age_s=1.0)
    assert fold(asked, [older, newer], NAMESPACE).nodes[0].age_s == 2.0
