"""What is believed about a path after what was seen on it."""

from __future__ import annotations

import random

import pytest

from peer_agent.core.figures import OVERDUE_PRIOR, PRIORS, ROUND_TRIP_PRIOR_S, UNKNOWN, Figures, PathFigures

KIB, MIB = 1 << 10, 1 << 20
TRUTH = PathFigures(latency_s=2e-3, bytes_per_s=3e8)


def feed(
    figures: Figures,
    truth: PathFigures = TRUTH,
    *,
    sizes: tuple[int, ...] = (64 * KIB, MIB, 8 * MIB),
    times: int = 20,
    now_s: float = 0.0,
    noise: float = 0.0,
) -> None:
    draw = random.Random(1)
    for at in range(times):
        size_bytes = sizes[at % len(sizes)]
        took_s = truth.took_s(size_bytes) * (1 + noise * draw.random())
        figures.observe("p", "tcp", size_bytes=size_bytes, took_s=took_s, queued_bytes=0, now_s=now_s)


def test_the_prior_of_the_plane_when_nothing_was_observed():
    figures = Figures()
    assert figures.estimate("p", "shm", now_s=0) == PRIORS["shm"]
    assert figures.estimate("p", "", now_s=0) == UNKNOWN
    assert figures.estimate("p", "of tomorrow", now_s=0).reads == 0


def test_latency_and_bandwidth_are_learnt_when_sizes_differ():
    figures = Figures()
    feed(figures, noise=0.2)
    found = figures.estimate("p", "tcp", now_s=0)
    assert found.latency_s == pytest.approx(TRUTH.latency_s * 1.1, rel=0.25)
    assert found.bytes_per_s == pytest.approx(TRUTH.bytes_per_s / 1.1, rel=0.15)
    assert found.reads > 5


@pytest.mark.parametrize("size_bytes", [4 * KIB, 256 * KIB, 16 * MIB])
def test_predictions_are_right_for_the_only_size_that_was_seen(size_bytes: int):
    figures = Figures()
    feed(figures, sizes=(size_bytes,))
    assert figures.estimate("p", "tcp", now_s=0).took_s(size_bytes) == pytest.approx(TRUTH.took_s(size_bytes), rel=0.1)


@pytest.mark.parametrize("plane", ["shm", "tcp"])
def test_bytes_queued_before_a_read_are_no_sign_of_a_slow_peer(plane: str):
    figures = Figures()
    for queued_bytes in (0, 16 * MIB, 64 * MIB) * 5:
        took_s = TRUTH.took_s(MIB, queued_bytes=queued_bytes)
        figures.observe("p", plane, size_bytes=MIB, took_s=took_s, queued_bytes=queued_bytes, now_s=0)
    assert figures.estimate("p", plane, now_s=0).bytes_per_s == pytest.approx(TRUTH.bytes_per_s, rel=0.1)


def test_one_outlier_moves_little_and_two_are_believed():
    figures = Figures()
    feed(figures)
    before_s = figures.estimate("p", "tcp", now_s=0).took_s(MIB)
    ratio = figures.observe("p", "tcp", size_bytes=MIB, took_s=1000 * before_s, queued_bytes=0, now_s=0)
    assert ratio == pytest.approx(1000)
    assert figures.estimate("p", "tcp", now_s=0).took_s(MIB) < 3 * before_s
    figures.observe("p", "tcp", size_bytes=MIB, took_s=1000 * before_s, queued_bytes=0, now_s=0)
    assert figures.estimate("p", "tcp", now_s=0).took_s(MIB) > 50 * before_s


def test_a_read_that_was_given_up_teaches_only_when_it_was_overdue():
    figures = Figures()
    feed(figures)
    before = figures.estimate("p", "tcp", now_s=0)
    figures.observe("p", "tcp", size_bytes=MIB, took_s=1e-6, queued_bytes=0, now_s=0, complete=False)
    assert figures.estimate("p", "tcp", now_s=0) == before
    figures.observe("p", "tcp", size_bytes=MIB, took_s=1.0, queued_bytes=0, now_s=0, complete=False)
    assert figures.estimate("p", "tcp", now_s=0).took_s(MIB) > 1.2 * before.took_s(MIB)


def test_a_peer_is_unmeasured_again_when_nothing_was_observed_for_long():
    figures = Figures()
    feed(figures, PathFigures(latency_s=1.0, bytes_per_s=1e5))
    figures.observe_lock("p", took_s=2.0, now_s=0)
    assert figures.estimate("p", "tcp", now_s=5).took_s(MIB) > 5
    faded = figures.estimate("p", "tcp", now_s=400)
    assert faded.took_s(MIB) == pytest.approx(PRIORS["tcp"].took_s(MIB), rel=0.1)
    assert faded.round_trip_s == pytest.approx(ROUND_TRIP_PRIOR_S, rel=0.1)


def test_overdue_is_what_one_read_in_a_hundred_exceeds():
    figures = Figures()
    draw = random.Random(2)
    assert figures.estimate("p", "tcp", now_s=0).overdue_ratio == OVERDUE_PRIOR
    for _ in range(400):
        slow = 2.5 if draw.random() < 0.05 else 1.0
        figures.observe("p", "tcp", size_bytes=MIB, took_s=slow * TRUTH.took_s(MIB), queued_bytes=0, now_s=0)
    assert 1.8 < figures.estimate("p", "tcp", now_s=0).overdue_ratio < 4.0


def test_overdue_stays_within_bounds_when_a_path_is_very_steady_or_wild():
    steady, wild = Figures(), Figures()
    feed(steady, times=200)
    for at in range(200):
        wild.observe("p", "tcp", size_bytes=MIB, took_s=1000.0 if at % 2 else 0.001, queued_bytes=0, now_s=0)
    assert steady.estimate("p", "tcp", now_s=0).overdue_ratio == 1.5
    assert wild.estimate("p", "tcp", now_s=0).overdue_ratio == 8.0


def test_round_trips_are_averaged_as_tcp_does():
    figures = Figures()
    figures.observe_lock("p", took_s=0.008, now_s=0)
    figures.observe_lock("p", took_s=0.016, now_s=0)
    assert figures.estimate("p", "tcp", now_s=0).round_trip_s == pytest.approx(0.009)


def test_the_peer_observed_longest_ago_is_forgotten_when_there_are_too_many():
    figures = Figures(max_peers=2)
    for name in ("a", "b", "a", "c"):
        figures.observe_lock(name, took_s=0.5, now_s=0)
    assert len(figures) == 2
    assert figures.estimate("b", "tcp", now_s=0).round_trip_s == ROUND_TRIP_PRIOR_S
    figures.forget("a")
    assert figures.estimate("a", "tcp", now_s=0) == PRIORS["tcp"]


def test_figures_stay_sane_when_observations_are_absurd():
    figures = Figures()
    for size_bytes, took_s in ((0, 0.0), (1, 1e9), (1 << 40, 0.0), (MIB, 1e-12)):
        figures.observe("p", "tcp", size_bytes=size_bytes, took_s=took_s, queued_bytes=0, now_s=0)
    found = figures.estimate("p", "tcp", now_s=0)
    assert found.latency_s > 0
    assert 0 < found.bytes_per_s < 1e12
