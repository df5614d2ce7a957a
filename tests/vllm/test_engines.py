"""What the other tests here stand on: engines in one process answer alike, and output depends on the whole prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.engines import Engine, shared_prompts


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gemma3"])
def test_answers_are_those_of_another_engine_and_change_with_any_token(model: str, request: pytest.FixtureRequest):
    path: Path = request.getfixturevalue(model)
    prompts = shared_prompts(8)
    first = Engine(path)
    answers = first.generate(*prompts)
    first.close()
    second = Engine(path)
    again = second.one_by_one(prompts, forget=True)
    changed = [[*prompts[0][:place], prompts[0][place] + 1, *prompts[0][place + 1 :]] for place in (0, 77, 150, 199)]
    others = second.generate(*changed)
    second.close()
    assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]
    assert [answer.cached for answer in again] == [0] * 8
    assert all(other.tokens != answers[0].tokens for other in others)
    assert all(len(set(answer.tokens)) > 4 for answer in answers), "a model that repeats itself proves nothing"
