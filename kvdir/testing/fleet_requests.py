"""The requests of a simulated fleet: a public trace, squeezed or stretched into the time of the run, as often as wanted."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator
from pathlib import Path

from kvdir.testing.fleet_results import FleetSetup
from kvdir.testing.trace import Request, read_trace

NEW_BLOCKS = 1_000_000_000


def fleet_requests(trace: Path, setup: FleetSetup, *, rounds: int = 1) -> Iterator[Request]:
    """Every request of the trace once a round, between the ramp and the end. Rounds run side by side, each about other blocks,
    so that more rounds are more users. Raises TraceError.
    """
    requests = list(read_trace(trace))
    span_s = (requests[-1].at_s - requests[0].at_s) or 1.0
    room_s = setup.duration_s - setup.ramp_s

    def moved(request: Request, number: int) -> Request:
        share = (request.at_s - requests[0].at_s) / span_s
        late_s = number / rounds * room_s / len(requests)
        blocks = tuple(block + number * NEW_BLOCKS for block in request.blocks)
        return dataclasses.replace(request, at_s=setup.ramp_s + share * room_s + late_s, blocks=blocks)

    streams = [[moved(request, number) for request in requests] for number in range(rounds)]
    yield from heapq.merge(*streams, key=lambda request: request.at_s)
