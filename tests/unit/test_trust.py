"""Convergent and cumulative figures."""

from __future__ import annotations

import dataclasses

import pytest

from kvdir.core.trust import Convergent, Cumulative
from kvdir.errors import UntrustedView


def test_cumulative_refuses_when_untrusted() -> None:
    figure = Cumulative(7, False, 1.0, 2.0, "3 events missing")
    with pytest.raises(UntrustedView, match=r"3 events missing.*kvdir reconcile"):
        figure.require_trusted()
    assert Cumulative(7, True, 1.0).require_trusted() == 7


def test_convergent_is_usable_when_old() -> None:
    assert Convergent(7, as_of_s=-1e9).require_trusted() == 7


def test_sum_is_as_trusted_as_its_worst_part() -> None:
    good, bad = Cumulative(1, True, 5.0), Cumulative(2, False, 9.0, 4.0, "gap")
    assert good + good == Cumulative(2, True, 5.0)
    assert good + bad == bad + good == Cumulative(3, False, 5.0, 4.0, "gap")
    assert (bad + Cumulative(1, False, 1.0, 3.0, "older")).untrusted_since_s == 3.0


def test_figures_cannot_be_changed_or_confused() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Cumulative(1, False, 0.0).trusted = True  # type: ignore[misc]
    assert Convergent(1, 0.0) != Cumulative(1, True, 0.0)
