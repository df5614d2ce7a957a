"""What people are told of an engine's block size, beside what else is served on its node."""

from __future__ import annotations

import pytest

from kvdir.client.engine_findings import FindingKind, Findings
from kvdir.client.engine_judge import Judge
from kvdir.client.engine_options import parse_engine
from kvdir.client.engine_sources import written
from kvdir.engines import decode
from kvdir.testing.fake_engine import batch_of, stored


@pytest.mark.parametrize(
    ("served", "words"), [({16}, "--block-size 16"), ({8, 16}, "--block-size 8 or 16"), ({16, 32}, ""), (set(), "")]
)
def test_block_size_is_a_finding_when_nothing_served_for_the_model_has_it(served: set[int], words: str):
    engine = parse_engine("vllm=tcp://127.0.0.1:1,model=m,hash=opaque")
    findings = Findings("n/vllm-0")
    judge = Judge(engine, written(engine)[0], findings, expected=lambda: {"m": served, "other": {7}})
    judge.look(decode("vllm", batch_of(stored([1], block_tokens=32))), 0.0)
    assert [finding.kind for finding in findings.all] == ([FindingKind.BLOCK_SIZE] if words else [])
    assert all(words in finding.words for finding in findings.all)
