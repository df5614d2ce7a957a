"""What the other tests here stand on: engines in one process answer alike, and output depends on the whole prompt."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.engines import Engine, shared_prompts


def test_two_engines_of_one_process_answer_alike_when_neither_has_a_connector(tiny_llama: Path):
    prompts = shared_prompts(8)
    first = Engine(tiny_llama)
    answers = first.generate(*prompts)
    first.close()
    second = Engine(tiny_llama)
    again = second.one_by_one(prompts, forget=True)
    changed = second.generate([prompts[0][0] + 1, *prompts[0][1:]])
    second.close()
    assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]
    assert [answer.cached for answer in again] == [0] * 8
    assert changed[0].tokens != answers[0].tokens
