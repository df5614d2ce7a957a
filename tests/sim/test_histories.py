"""Random histories of a simulated cluster: every promise holds at every moment, and all is right soon after the healing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvdir.core.stream import StreamCursor
from kvdir.errors import InvalidInput
from kvdir.testing.sim.__main__ import main
from kvdir.testing.sim.histories import random_story, shrink, tell, verdict, violation_of
from kvdir.testing.sim.story import Setup, Step, Story

HISTORIES = 2_000
IN_ONE_TEST = 100


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, HISTORIES, IN_ONE_TEST))
def test_promises_hold_when_history_is_random(first: int) -> None:
    for seed in range(first, first + IN_ONE_TEST):
        if violation_of(random_story(seed)) is not None:
            pytest.fail(f"seed {seed}:\n{verdict(random_story(seed), tries=150)}", pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_three_coordinators_agree_soon_after_the_healing_when_history_is_random(first: int) -> None:
    """Partitions between one agent and one coordinator, loss, delay, restarts; then equal digests and the same answers."""
    for seed in range(first, first + 50):
        story = random_story(seed, coordinators=3)
        if violation_of(story) is not None:
            pytest.fail(f"seed {seed}:\n{verdict(story, tries=150)}", pytrace=False)


def test_runs_are_equal_when_seeds_are() -> None:
    story = random_story(4)
    assert tell(story) == tell(story)
    assert tell(story).digest != tell(random_story(5)).digest


def test_runs_are_equal_when_hashing_is_not() -> None:
    code = "from kvdir.testing.sim.histories import *; print([tell(random_story(seed)).digest for seed in (11, 12)])"
    outcomes = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outcomes) == 1


def test_failing_story_is_short_when_the_core_has_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(self: StreamCursor, last_seq: int, *, now_s: float) -> None:
        """A heartbeat that does not show the loss of the last event."""
        self._heard(now_s)

    monkeypatch.setattr(StreamCursor, "heartbeat", deaf)
    story = next(story for story in map(random_story, range(1_000)) if violation_of(story))
    short = shrink(story, tries=200)
    assert len(short.steps) <= 4, str(short)
    assert violation_of(Story.parse(str(short))) is not None
    text = verdict(short)
    assert str(short) in text
    assert "python -m kvdir.testing.sim --story FILE" in text
    assert Story.parse(text) == short


def test_shrinking_keeps_what_matters_when_steps_are_many() -> None:
    story = Story(Setup(nodes=4, loss=0.1), tuple(Step("advance", (str(number),)) for number in range(40)))

    def fails(candidate: Story) -> bool:
        seconds = {step.args[0] for step in candidate.steps}
        return {"7", "31"} <= seconds and candidate.setup.loss > 0

    short = shrink(story, fails=fails)
    assert [step.args for step in short.steps] == [("7",), ("31",)]
    assert short.setup == Setup(loss=0.1)


def test_story_is_the_same_when_it_went_through_text() -> None:
    story = random_story(9)
    assert Story.parse(f"# a comment\n{story}\n\n") == story


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fly 0", "no step"),
        ("store 0 cpu", "takes NODE TIER NAMESPACE BLOCKS"),
        ("cluster nodes=many", "nodes=many"),
        ("garbage 0 loud", "loud"),
        ("coordinator sleeps", "sleeps"),
        ("at nowhere", "at takes COORDINATOR"),
    ],
)
def test_story_is_refused_when_a_line_makes_no_sense(line: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        tell(Story.parse(line))


def test_command_says_how_it_went_when_a_seed_is_told() -> None:
    outcome = CliRunner().invoke(main, ["--seed", "3"])
    assert outcome.exit_code == 0
    assert Story.parse(outcome.output) == random_story(3)
    assert "every promise held" in outcome.output


def test_command_fails_with_the_story_when_a_promise_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamCursor, "heartbeat", lambda self, last_seq, *, now_s: self._heard(now_s))
    outcome = CliRunner().invoke(main, ["--duration-s", "60", "--seed", "0"])
    assert outcome.exit_code == 1
    assert violation_of(Story.parse(outcome.stdout)) is not None


def test_command_is_refused_when_the_story_makes_no_sense() -> None:
    assert CliRunner().invoke(main, ["--story", "-"], input="fly 0").exit_code == 2
