"""Recompute time against transfer time."""

from __future__ import annotations

import math

import pytest

from peer_agent.core.cost import UNKNOWN_PRICE, Offer, Recompute, finish_s

PRICE = Recompute(block_tokens=16, prefill_tokens_per_s=16_000)  # 1 ms a block


def test_every_hit_is_worth_it_and_gains_nothing_measurable_when_the_price_is_not_known():
    assert UNKNOWN_PRICE.worth(1, cost_s=1e9)
    assert UNKNOWN_PRICE.net_gain_s(5, spent_s=1.0) == 0.0
    assert not UNKNOWN_PRICE.worth(0, cost_s=0.0), "no block is never worth anything"


def test_worth_only_when_recomputing_takes_longer():
    assert PRICE.worth(10, cost_s=0.009)
    assert not PRICE.worth(10, cost_s=0.010)


def test_net_gain_is_negative_when_hits_cost_more_than_they_save():
    assert PRICE.net_gain_s(10, spent_s=0.025) == pytest.approx(-0.015)


def test_one_offer_ends_after_its_start_and_its_bytes():
    assert finish_s([Offer(0.5, 100)], 50) == pytest.approx(1.0)


def test_two_offers_end_together_when_both_help():
    offers = [Offer(0.0, 100), Offer(0.2, 50)]
    end_s = finish_s(offers, 140)
    assert sum(offer.bytes_by(end_s) for offer in offers) == pytest.approx(140)
    assert end_s == pytest.approx(1.0)


def test_an_offer_that_starts_too_late_changes_nothing():
    assert finish_s([Offer(0.0, 100), Offer(1.0, 1e9)], 100) == pytest.approx(1.0)


def test_never_ends_when_nobody_offers():
    assert finish_s([], 1) == math.inf
