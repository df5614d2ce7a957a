"""The table of metrics keeps Prometheus' rules, and a family keeps the bounds of its labels."""

from __future__ import annotations

import re

import pytest

from kvdir.obs import definitions, labels
from kvdir.obs.call_figures import CallFigures
from kvdir.obs.definition import OTHER, Buckets, Definition, Exposer, Family, Fold, Kind, Label
from kvdir.obs.tally import Tally
from peer_agent.core.effects import LoadStatus
from peer_agent.core.schedule import Priority

MANY = 2_000


def by_labels(family: Family) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_a_name_is_declared_once_when_all_groups_are_read() -> None:
    names = [metric.name for group in definitions.GROUPS for metric in group.metrics]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("metric", definitions.DEFINITIONS.values(), ids=lambda metric: metric.name)
def test_a_definition_keeps_the_conventions_when_it_is_declared(metric: Definition) -> None:
    assert re.fullmatch(r"(kvdir|peer_agent|process)_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") is (metric.kind is Kind.COUNTER)
    assert metric.name.endswith("_info") or metric.kind is not Kind.INFO
    assert not re.search(r"_(ms|us|mb|kb|percent|count|sum|bucket)(_|$)", metric.name)
    assert metric.help.endswith(".")
    assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    for label in metric.labels:
        assert label.values or (label.bound and label.why)
        assert label.name not in ("fingerprint", "tenant", "request_id", "le", "peer")


def test_values_of_labels_are_those_of_the_enums_when_an_agent_is_meant() -> None:
    assert labels.STATUS.values == tuple(status.name.lower() for status in LoadStatus)
    assert labels.PRIORITY.values == tuple(priority.name.lower() for priority in Priority)


def test_the_worst_case_of_a_daemon_is_bounded_when_every_label_is_full() -> None:
    worst = {exposer: sum(metric.series_at_most for metric in definitions.exposed_by(exposer)) for exposer in Exposer}
    assert worst[Exposer.COORDINATOR] <= 7_000
    assert worst[Exposer.STORE] <= 7_000
    assert worst[Exposer.AGENT] <= 2_000


@pytest.mark.parametrize(("fold", "other"), [(Fold.SUM, sum(range(2, MANY))), (Fold.MAX, MANY - 1), (Fold.MIN, 2)])
def test_values_beyond_the_bound_become_one_series_when_a_label_is_full(fold: Fold, other: int) -> None:
    family = Family(Definition("kvdir_x", Kind.GAUGE, "X.", (Label("node", bound=2, why="two"),), fold=fold))
    for number in range(MANY):
        family.add(number, f"n{number}")
    assert by_labels(family) == {("n0",): 0, ("n1",): 1, (OTHER,): other}


def test_counters_have_no_sum_that_could_fall_when_what_they_count_comes_and_goes() -> None:
    label = Label("node", bound=2, why="two", comes_and_goes=True)
    family = Family(Definition("kvdir_x_total", Kind.COUNTER, "X.", (label,)))
    for number in range(MANY):
        family.add(number, f"n{number}")
    assert by_labels(family) == {("n0",): 0, ("n1",): 1}


def test_calls_keep_their_series_when_others_come_that_are_listed_before_them() -> None:
    figures = CallFigures()

    def call(*pairs: tuple[str, str]) -> list[tuple[str, ...]]:
        for pair in pairs:
            figures.began(pair[0])
            figures.ended(*pair, 0.001)
        (calls,) = [family for family in figures.families("kvdir") if family.definition.name == "kvdir_rpc_calls_total"]
        return list(by_labels(calls))

    first = call(*((f"M{number}", f"CODE{code}") for number in range(16) for code in range(8)))
    assert len(first) == 128
    assert call(("M0", "LATE"), ("M1", "LATE")) == [*first, (OTHER, OTHER)]


def test_all_series_start_at_zero_when_the_values_of_all_labels_are_known() -> None:
    family = definitions.family("kvdir_repairs_total")
    assert len(by_labels(family)) == 9
    assert not any(by_labels(family).values())


def test_a_value_nobody_declared_becomes_other_when_values_are_known() -> None:
    family = Family(Definition("kvdir_x_total", Kind.COUNTER, "X.", (Label("kind", ("a", "b")),)))
    family.add(3, "a").add(4, "new").add(5, "newer")
    assert by_labels(family) == {("a",): 3, ("b",): 0, (OTHER,): 9}


def test_a_family_ends_at_its_own_bound_when_the_product_of_its_labels_is_larger() -> None:
    labels = (Label("method", bound=50, why=""), Label("code", bound=50, why=""))
    family = Family(Definition("kvdir_x_total", Kind.COUNTER, "X.", labels, at_most=10))
    for method in range(20):
        for code in range(20):
            family.add(1, str(method), str(code))
    assert len(family.samples) == 11
    assert sum(sample.value for sample in family.samples) == 400


def test_buckets_are_cumulated_and_added_when_two_have_the_same_labels() -> None:
    definition = Definition("kvdir_x", Kind.HISTOGRAM, "X.", (), (1.0, 2.0))
    family = (
        Family(definition)
        .add_buckets(Buckets([1, 2, 3], 4.0))
        .add_buckets(Buckets([1, 0, 0], 0.5, {0: ({"trace_id": "ab"}, 0.5, 9.0)}))
    )
    values = [(sample.name, sample.labels.get("le"), sample.value) for sample in family.samples]
    assert values == [
        ("kvdir_x_bucket", "1.0", 2),
        ("kvdir_x_bucket", "2.0", 4),
        ("kvdir_x_bucket", "+Inf", 7),
        ("kvdir_x_count", None, 7),
        ("kvdir_x_sum", None, 4.5),
    ]
    assert family.samples[0].exemplar is not None
    assert family.samples[0].exemplar.labels == {"trace_id": "ab"}


@pytest.mark.parametrize("prefix", ["kvdir", "peer_agent"])
def test_a_tally_exposes_every_metric_it_may_have_when_nothing_has_happened(prefix: str) -> None:
    tally = Tally(prefix)
    assert {family.definition.name for family in tally.families()} == set(definitions.tallied(prefix))


def test_a_tally_counts_watches_and_observes_when_told() -> None:
    tally = Tally("kvdir")
    tally.add("auth_refused_total", "role")
    tally.add("auth_refused_total", "role", amount=2)
    tally.watch("tls_expires_timestamp_seconds", lambda: 7.0, "grpc")
    tally.observe("scrape_duration_seconds", 0.003)
    families = {family.definition.name: family for family in tally.families()}
    assert by_labels(families["kvdir_auth_refused_total"])[("role",)] == 3
    assert by_labels(families["kvdir_tls_expires_timestamp_seconds"])[("grpc",)] == 7
    assert families["kvdir_scrape_duration_seconds"].histograms[()].sum == 0.003
    with pytest.raises(KeyError):
        tally.add("nobody_declared_this_total")
    with pytest.raises(KeyError):
        tally.watch("nobody_declared_this", lambda: 0.0)
