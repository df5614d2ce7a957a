"""Watches a simulated fleet: samples over time, every trusted figure against its owner's truth, and what came of it all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvdir.core.diff import Verdict, compare
from kvdir.core.digests import DigestsView, stream_digests
from kvdir.core.directory import Directory
from kvdir.core.inspect import faults
from kvdir.core.repair import Ask
from kvdir.testing.fleet_node import FleetNode
from kvdir.testing.fleet_results import STATES, FleetSample
from kvdir.testing.sim_results import RepairCost

if TYPE_CHECKING:
    from kvdir.testing.fleet import Fleet

SHOWN_VIOLATIONS = 10


class FleetWatch:
    """Writes into the fleet's outcome. lives: every life of every node, by (name, epoch). retired: coordinators that died."""

    def __init__(self, fleet: Fleet) -> None:
        self.lives: dict[tuple[str, int], FleetNode] = {}
        self.retired: list[Directory] = []
        self._fleet = fleet
        self._marks = (0, 0, 0)

    def sample(self) -> None:
        """One point of the time line; every trusted figure is checked."""
        reads = self._fleet.outcome.reads
        blocks, local, peer = self._marks
        self._marks = (reads.blocks, reads.hit_local, reads.hit_peer)
        live = self._fleet.live()
        states = dict.fromkeys(STATES, 0)
        for number, directory in enumerate(self._fleet.directories):
            for node in live:
                states[self._state(directory, node, number)] += 1
            if directory is not None:
                self._check_trust(directory)
        running = [directory for directory in self._fleet.directories if directory is not None]
        self._fleet.outcome.timeline.append(
            FleetSample(
                at_s=round(self._fleet.agenda.now_s, 3),
                nodes=len(live),
                states=states,
                blocks=reads.blocks - blocks,
                hit_local=reads.hit_local - local,
                hit_peer=reads.hit_peer - peer,
                repair_bytes={ask.value: sum(each.repairs[ask].bytes for each in self._all()) for ask in Ask},
                index_blocks=max((directory.index.stats().blocks for directory in running), default=0),
            )
        )

    def _state(self, directory: Directory | None, node: FleetNode, number: int) -> str:
        stream = node.links[number].stream
        known = directory.nodes.get(node.name) if directory is not None else None
        if stream is None or known is None or known.stream is not stream or stream.fenced:
            return "unknown"
        return stream.cursor.state.name.lower()

    def _check_trust(self, directory: Directory) -> None:
        """Trusted figures, each held against its owner's truth at that sequence number."""
        for holder in directory.holders:
            stream = holder.owner
            figure = stream.blocks_figure(holder)
            if not holder.visible or not figure.trusted:
                continue
            self._fleet.outcome.trust_checks += 1
            truth = self.lives[stream.node, stream.epoch].blocks_at(stream.cursor.applied_seq)
            if figure.value != truth:
                self._fleet.outcome.trust_violations += 1
                self._violated(f"{stream.node}: trusted figure {figure.value}, its owner held {truth}")

    def _violated(self, words: str) -> None:
        if len(self._fleet.outcome.violations) < SHOWN_VIOLATIONS:
            self._fleet.outcome.violations.append(f"{words} (at {self._fleet.agenda.now_s:.2f} s)")

    def _all(self) -> Iterator[Directory]:
        yield from self.retired
        yield from (directory for directory in self._fleet.directories if directory is not None)

    def finish(self) -> None:
        """Sums, invariants and digests at the end."""
        out = self._fleet.outcome
        self.sample()
        out.events = sum(directory.ingest.applied for directory in self._all())
        out.evicted_blocks = sum(directory.room.evicted_blocks for directory in self._all())
        for ask in Ask:
            tallies = [directory.repairs[ask] for directory in self._all()]
            out.repairs[ask.value] = RepairCost(
                asked=sum(tally.asked for tally in tallies),
                done=sum(tally.done for tally in tallies),
                failed=sum(tally.failed for tally in tallies),
                bytes=sum(tally.bytes for tally in tallies),
                seconds=round(sum(tally.seconds for tally in tallies), 3),
            )
        views = {}
        for number, directory in enumerate(self._fleet.directories):
            assert directory is not None
            for words in faults(directory):
                self._violated(f"coordinator {number}: {words}")
            views[str(number)] = DigestsView(str(number), stream_digests(directory, now_s=self._fleet.agenda.now_s))
        alive = {(node.name, node.epoch) for node in self._fleet.live()}
        out.differences = sum(row.verdict is not Verdict.EQUAL for row in compare(views) if (row.node, row.epoch) in alive)
