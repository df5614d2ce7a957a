"""The replay on the real cores: repeatable, truthful about trust, and converging once the losses end."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdir.cli.main import main
from kvdir.core.inspect import faults
from kvdir.testing.agenda import Agenda
from kvdir.testing.clock import ManualClock
from kvdir.testing.routing import Policy
from kvdir.testing.sim_results import Outcome, Setup, UntrustedTime
from kvdir.testing.sim_trust import TrustWatch
from kvdir.testing.simulate import Simulation
from kvdir.testing.trace import Request, read_trace


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


def run(count: int = 150, **conditions: Any) -> tuple[Outcome, Simulation]:
    setup = Setup(**{"nodes": 4, "blocks_per_node": 60, "sample_s": 0.5, **conditions})
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
    delay_s=st.sampled_from([0.0, 0.01, 0.3, 1.0]),  # at the end a round trip above RepairPolicy.idle_s
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


def test_untrusted_intervals_are_told_for_every_stream_and_add_up() -> None:
    lossless, _ = run()
    assert [(time.intervals, time.total_s) for time in lossless.untrusted] == [(0, 0.0)] * 4
    lossy, simulation = run(loss=0.3, delay_s=0.05)
    assert [time.node for time in lossy.untrusted] == [node.name for node in simulation.nodes]
    for time in lossy.untrusted:
        assert time.intervals > 0
        assert 0 < time.longest_s <= time.total_s
        assert 0 < time.share < 1
    assert lossy.untrusted_share == pytest.approx(sum(time.share for time in lossy.untrusted) / 4, abs=1e-3)


def test_watch_counts_intervals_and_the_one_that_has_not_ended() -> None:
    watch = TrustWatch("a", now_s=10.0)
    for trusted, now_s in [(True, 11.0), (False, 12.0), (False, 13.0), (True, 14.0), (True, 15.0), (False, 19.0)]:
        watch.see(trusted, now_s=now_s)
    assert watch.total(now_s=20.0) == UntrustedTime(node="a", intervals=2, total_s=3.0, longest_s=2.0, share=0.3)


def test_most_peer_hits_stay_when_a_fifth_of_the_events_is_lost() -> None:
    """On an excerpt of the public trace under the conditions of the promise: p2c, 16 nodes of 2,000 blocks."""
    with resources.as_file(resources.files("peer_agent.demo") / "conversation_1000.jsonl.gz") as path:
        served = list(read_trace(path, limit=600))
    lossless, lossy = (Simulation(Setup(loss=loss)).run(served) for loss in (0.0, 0.2))
    assert lossless.hit_peer > 0
    assert lossy.hit_peer >= 0.97 * lossless.hit_peer
    assert (lossy.missed_stale, lossy.trust_violations) == (0, 0)
    assert lossy.repairs["replay"].done > 0


def test_delay_hides_new_blocks_but_stale_claims_cost_no_hit() -> None:
    outcome, _ = run(delay_s=5.0)
    assert outcome.stale_blocks > 0
    assert outcome.missed_unknown > 0
    assert outcome.missed_stale == 0


def test_sketch_repairs_when_a_removal_was_never_said() -> None:
    simulation = Simulation(Setup(nodes=2, blocks_per_node=60, heartbeat_s=0.5))

    def served() -> Iterator[Request]:
        for request in requests(60):
            if request.number == 40:
                simulation.nodes[0].forget_silently()
            yield request

    outcome = simulation.run(served())
    assert outcome.repairs["sketch"].done > 0
    assert outcome.repairs["snapshot"].asked == 0
    assert outcome.settle_s is not None


def test_asking_the_owner_finds_more_than_the_literal_answer_when_events_are_lost() -> None:
    conditions: dict[str, Any] = {"loss": 0.3, "message_blocks": 1, "repair": False}
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
    assert set(document["repairs"]) == {"replay", "sketch", "snapshot"}
    assert len(document["untrusted"]) == 3


def test_compare_says_what_the_conditions_cost(tmp_path: Path) -> None:
    path = write_trace(tmp_path, 60)
    arguments = ["replay", str(path), "--nodes", "3", "--blocks-per-node", "40", "--compare"]
    result = CliRunner().invoke(main, [*arguments, "--delay-s", "5", "--output", "json"])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    compared = document["compare"]
    ideal = compared["without_loss_and_delay"]
    assert ideal["setup"]["delay_s"] == 0
    assert compared["hit_peer_kept"] == round(document["hit_peer"] / ideal["hit_peer"], 4)
    assert "peer hits kept" in CliRunner().invoke(main, [*arguments, "--loss", "0.2"]).stdout
    nothing = CliRunner().invoke(main, arguments)
    assert nothing.exit_code == 2
    assert "--loss" in nothing.stderr


def test_command_prints_tables_for_people(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["replay", str(write_trace(tmp_path, 20)), "--nodes", "3"])
    assert result.exit_code == 0, result.stderr
    for expected in ("hit ratio", "trusted but wrong", "when figures were not trusted", "over time"):
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
