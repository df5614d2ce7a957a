"""Publishers whose coordinators share a store: one speaks, the others stand by, and the next one tries when it fails."""

from __future__ import annotations

import asyncio

from kvdir.client.standby import Standby


class Voice:
    """A publisher that does nothing but remember that it was told to step back."""

    def __init__(self) -> None:
        self.stepped_back = 0
        self.leaving = False

    def step_back(self) -> None:
        self.stepped_back += 1


async def _has_turn(standby: Standby, voice: Voice) -> bool:
    turn = asyncio.ensure_future(standby.turn(voice, leaving=lambda: voice.leaving))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if not turn.done():
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        return False
    return True


async def test_nobody_waits_when_no_store_is_shared():
    standby, a, b = Standby(), Voice(), Voice()
    assert await _has_turn(standby, a)
    assert await _has_turn(standby, b)
    assert not standby.welcomed(a, "")
    assert not standby.welcomed(b, "")
    assert (a.stepped_back, b.stepped_back) == (0, 0)


async def test_older_one_steps_back_when_another_is_welcomed_to_the_same_store():
    standby, a, b, other = Standby(), Voice(), Voice(), Voice()
    assert not standby.welcomed(a, "one")
    assert not standby.welcomed(other, "two")
    assert standby.welcomed(b, "one")
    assert (a.stepped_back, b.stepped_back, other.stepped_back) == (1, 0, 0)
    standby.over(a)  # its call has ended; the turn is another's
    assert standby.waits(a)
    assert not await _has_turn(standby, a)


async def test_one_at_a_time_tries_when_the_speaker_fails():
    standby, voices = Standby(), [Voice() for _ in range(4)]
    for voice in voices:
        standby.welcomed(voice, "one")
    for voice in voices:
        standby.over(voice)
    standby.welcomed(voices[3], "one")
    tries: list[int] = []

    async def stand_by(number: int) -> None:
        await standby.turn(voices[number], leaving=lambda: False)
        tries.append(number)

    waiting = [asyncio.ensure_future(stand_by(number)) for number in range(3)]
    await asyncio.sleep(0.01)
    assert tries == []
    for expected in ([0], [0, 1], [0, 1, 2]):
        standby.over(voices[tries[-1]] if tries else voices[3])
        await asyncio.sleep(0.01)
        assert tries == expected
    await asyncio.gather(*waiting)


async def test_waiting_ends_when_it_leaves():
    standby, a, b = Standby(), Voice(), Voice()
    standby.welcomed(a, "one")
    standby.welcomed(b, "one")
    turn = asyncio.ensure_future(standby.turn(a, leaving=lambda: a.leaving))
    await asyncio.sleep(0)
    a.leaving = True
    standby.stir()
    await asyncio.wait_for(turn, 1)
    assert standby.waits(a)  # it did not take the turn of b


async def test_turn_is_free_when_the_speaker_has_left():
    standby, a, b = Standby(), Voice(), Voice()
    standby.welcomed(a, "one")
    standby.welcomed(b, "one")
    standby.left(b)
    assert await _has_turn(standby, a)
