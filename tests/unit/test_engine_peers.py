"""Who is at the other end of a subscription, by what the monitor of its socket tells."""

from __future__ import annotations

from kvdir.client.engine_socket import Peers


def test_engine_stays_when_somebody_opens_and_closes_the_port():
    peers = Peers()
    peers.opened(5)
    assert not peers.any
    peers.shook()
    for descriptor in (6, 7):
        peers.opened(descriptor)
    for descriptor in (6, 7):
        peers.closed(descriptor)
        assert peers.any
    peers.opened(6)
    peers.closed(5)
    assert not peers.any  # 6 has not said anything


def test_engine_is_told_from_one_that_opened_at_the_same_time_when_that_closes():
    peers = Peers()
    peers.opened(5)
    peers.opened(6)
    peers.shook()
    assert peers.any
    peers.closed(6)
    assert peers.any
    peers.closed(5)
    assert not peers.any


def test_wrong_guess_ends_with_the_connection_that_does_not_speak():
    peers = Peers()
    peers.opened(5)
    peers.opened(6)
    peers.shook()
    peers.closed(5)
    assert peers.any
    peers.closed(6)
    assert not peers.any
