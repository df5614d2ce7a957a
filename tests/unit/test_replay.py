"""The replay on the real cores: repeatable, truthful about trust, and converging once the losses end."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdir.cli.main import main
from kvdir.core.inspect import faults
from kvdir.testing.agenda import Agenda
from kvdir.testing.clock import ManualClock
from kvdir.testing.routing import Policy
from kvdir.testing.sim_results import Outcome, Setup
from kvdir.testing.simulate import Simulation
from kvdir.testing.trace import Request


def requests(count: int, *, seed: int = 1, step_s: float = 0.2) -> list[Request]:
    """Chats: prompts grow, and share their first blocks."""
    rng, chats = random.Random(seed), dict[int, int]()
    out = []
    for number in range(count):
        chat = rng.randrange(12)
        length = chats[chat] = chats.get(chat, 1) + rng.randrange(1, 5)
        blocks = (0, *(1000 * (chat + 1) + at for at in range(length)))
        out.append(Request(number, number * step_s, 512 * len(blocks), 1, blocks))
    return out


def run(count: int = 150, **conditions: object) -> tuple[Outcome, Simulation]:
    setup = Setup(**{"nodes": 4, "blocks_per_node": 60, "sample_s": 0.5, **conditions})  # type: ignore[arg-type]
    simulation = Simulation(setup)
    return simulation.run(requests(count)), simulation


def test_equal_setup_gives_equal_results() -> None:
    assert run(loss=0.2, delay_s=0.1)[0] == run(loss=0.2, delay_s=0.1)[0]


def test_every_block_is_counted_once() -> None:
    outcome, _ = run()
    assert outcome.blocks == outcome.hit_local + outcome.hit_peer + outcome.recomputed
    assert outcome.hit_peer > 0
    assert sum(sample.blocks for sample in outcome.timeline) == outcome.blocks


def test_directory_is_exact_when_nothing_is_lost_or_late() -> None:
    outcome, _ = run()
    assert (outcome.stale_blocks, outcome.empty_probes, outcome.messages_lost) == (0, 0, 0)
    assert {sample.error_blocks for sample in outcome.timeline} == {0}
    assert outcome.settle_s == 0.0


@given(
    loss=st.sampled_from([0.0, 0.05, 0.3, 0.6]),
    delay_s=st.sampled_from([0.0, 0.01, 0.3]),  # a round trip below RepairPolicy.idle_s, or no repair is ever in time
    message_blocks=st.sampled_from([0, 1, 5]),
    heartbeat_s=st.sampled_from([0.1, 1.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_trusted_figures_are_true_and_streams_converge_after_any_loss(
    loss: float, delay_s: float, message_blocks: int, heartbeat_s: float, seed: int
) -> None:
    outcome, simulation = run(80, loss=loss, delay_s=delay_s, message_blocks=message_blocks, heartbeat_s=heartbeat_s, seed=seed)
    assert outcome.trust_violations == 0
    assert outcome.settle_s is not None
    assert list(faults(simulation.directory)) == []


def test_loss_shows_as_untrusted_and_stays_so_without_repair() -> None:
    repaired, _ = run(loss=0.2, delay_s=0.05)
    broken, _ = run(loss=0.2, delay_s=0.05, repair=False)
    assert 0 < repaired.untrusted_share < broken.untrusted_share
    assert repaired.settle_s is not None
    assert broken.settle_s is None
    assert broken.trust_violations == 0


def test_asking_the_owner_finds_more_than_the_literal_answer_when_events_are_lost() -> None:
    conditions = {"loss": 0.3, "message_blocks": 1, "repair": False}
    owner, _ = run(**conditions)
    literal, _ = run(**conditions, owner_answers=False)
    assert owner.hit_peer > literal.hit_peer


def test_affinity_raises_local_hits_and_imbalance() -> None:
    p2c, _ = run()
    affinity, _ = run(policy=Policy.AFFINITY)
    assert affinity.hit_local > p2c.hit_local
    assert affinity.imbalance > p2c.imbalance


def write_trace(tmp_path: Path, count: int) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        json.dumps({"timestamp": r.at_s * 1000, "input_length": 1, "output_length": 1, "hash_ids": r.blocks})
        for r in requests(count)
    ]
    path.write_text("\n".join(lines))
    return path


def test_command_prints_one_json_document_with_a_time_line(tmp_path: Path) -> None:
    path = write_trace(tmp_path, 50)
    arguments = ["replay", str(path), "--nodes", "3", "--blocks-per-node", "40", "--requests", "30", "--loss", "0.1"]
    result = CliRunner().invoke(main, [*arguments, "--output", "json"])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["requests"] == 30
    assert {"hit_ratio", "stale_ratio", "timeline", "setup", "untrusted_share"} <= set(document)
    assert {"at_s", "streams_synced", "views_trusted", "error_blocks"} <= set(document["timeline"][0])
    assert document["setup"]["loss"] == 0.1


def test_command_prints_tables_for_people(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["replay", str(write_trace(tmp_path, 20)), "--nodes", "3"])
    assert result.exit_code == 0, result.stderr
    for expected in ("hit ratio", "trusted but wrong", "over time"):
        assert expected in result.stdout


def test_command_names_file_and_line_when_the_trace_is_bad(tmp_path: Path) -> None:
    path = write_trace(tmp_path, 2)
    path.write_text(path.read_text() + "\n{}\n")
    result = CliRunner().invoke(main, ["replay", str(path)])
    assert result.exit_code == 2
    assert f"{path}:3: " in result.stderr


def test_agenda_runs_in_order_and_repeats() -> None:
    agenda, seen = Agenda(ManualClock()), list[str]()
    agenda.later(2.0, lambda: seen.append("b"))
    agenda.later(1.0, lambda: seen.append("a"))
    agenda.every(1.5, lambda: seen.append(f"e{agenda.now_s}"))
    agenda.advance_to(3.0)
    assert seen == ["a", "e1.5", "b", "e3.0"]
    with pytest.raises(ValueError, match="never end"):
        agenda.every(0, lambda: None)
