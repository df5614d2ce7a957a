"""Random stories, how one is told, and how a failing one is made short.

`random_story(seed)` is a pure function. `tell` plays a story, lets the network heal, and wants everything right within a
bounded number of heartbeats. `shrink` leaves out steps for as long as the story fails.
Source of the shrinking: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvdir.client.publisher import Backoff
from kvdir.core.directory import Limits
from kvdir.core.repair import RepairPolicy
from kvdir.errors import InvalidInput
from kvdir.server.config import CoordinatorConfig
from kvdir.testing.sim.cluster import LocalCluster
from kvdir.testing.sim.invariants import Violation
from kvdir.testing.sim.network import Faults
from kvdir.testing.sim.random_steps import random_steps
from kvdir.testing.sim.site import Site
from kvdir.testing.sim.steps import play
from kvdir.testing.sim.story import Setup, Step, Story

SILENCE_S = 2.0
BACKOFF = Backoff(base_s=0.1, limit_s=1.0)
LIMITS = Limits(
    stale_after_s=2.0,
    expire_after_s=6.0,
    forget_after_s=20.0,
    warm_up_s=1.0,
    warm_limit_s=5.0,
    max_snapshots=2,
    repair=RepairPolicy(idle_s=0.4, idle_max_s=1.0, total_s=4.0, retry_base_s=0.1, retry_max_s=1.0, spacing_s=0.2),
)
HEALING_HEARTBEATS = 16


@dataclass(frozen=True, slots=True)
class Told:
    """How a story went. heartbeats: from the healing until everything was right."""

    heartbeats: float
    seconds: float
    checks: int
    messages: int
    digest: int


def random_story(seed: int, *, coordinators: int = 1) -> Story:
    """A history of one to four nodes, short but for one in a hundred.

    Beside several coordinators no process starts twice under one name: each would take the one that came to it last, and who is
    right would be nobody's to say (docs/adr/0015).
    """
    rng = random.Random(seed)
    calm = rng.random() < 0.3
    setup = Setup(
        nodes=rng.choice([1, 2, 2, 3, 4]),
        seed=seed,
        namespaces=rng.choice([1, 1, 2]),
        ring_events=rng.choice([3, 8, 100]),
        sketch_cells=rng.choice([0, 8, 16, 64, 64]),
        chunk_blocks=rng.choice([1, 3, 100]),
        credit_events=rng.choice([3, 64, 8192]),
        loss=0.0 if calm else rng.choice([0.0, 0.02, 0.1, 0.3]),
        duplicates=rng.choice([0.0, 0.0, 0.1, 0.3]),
        jitter_s=rng.choice([0.0, 0.01, 0.2]),
        index=rng.choice(["native"] * 9 + ["reference"]),
        max_blocks=random.Random(~seed).choice([0, 0, 0, 2, 4, 10]),  # of its own, so that stories of before stay the same
    )
    count = 200 if rng.random() < 0.01 else rng.choice([8, 16, 24, 40])
    steps = random_steps(rng, count)
    if coordinators > 1:
        setup = dataclasses.replace(setup, coordinators=coordinators)
        steps = [part for step in steps if step.verb != "twice" for part in (_somewhere(rng, coordinators), step)]
    return Story(setup, tuple(steps))


def _somewhere(rng: random.Random, coordinators: int) -> Step:
    return Step("at", (str(rng.randrange(coordinators)),))


def tell(story: Story, *, watch: bool = True) -> Told:
    """Plays it and heals. Raises Violation."""
    setup = story.setup
    with LocalCluster(
        nodes=setup.nodes,
        coordinators=setup.coordinators,
        seed=setup.seed,
        faults=Faults(loss=setup.loss, duplicates=setup.duplicates, jitter_s=setup.jitter_s),
        namespaces=setup.namespaces,
        ring_events=setup.ring_events,
        sketch_cells=setup.sketch_cells,
        chunk_blocks=setup.chunk_blocks,
        config=CoordinatorConfig(heartbeat_interval_ms=500, credit_events=setup.credit_events),
        limits=LIMITS,
        silence_s=SILENCE_S,
        backoff=BACKOFF,
        tick_s=0.1,
        index="reference" if setup.index == "reference" else "native",
        max_blocks=setup.max_blocks,
        watch=watch,
    ) as cluster:
        start_s = cluster.now_s
        site = cluster.sites[0]
        for step in story.steps:
            if step.verb == "at":
                site = _site(cluster, step)
                continue
            play(site, step)
            if watch:
                cluster.check()
        cluster.heal()
        heartbeats = cluster.settle(heartbeats=HEALING_HEARTBEATS)
        messages = sum(site.network.deliveries for site in cluster.sites)
        digest = zlib.crc32(repr([site.network.digest for site in cluster.sites]).encode())
        return Told(heartbeats, cluster.now_s - start_s, cluster.checks, messages, digest)


def _site(cluster: LocalCluster, step: Step) -> Site:
    if len(step.args) != 1 or not step.args[0].isdigit():
        raise InvalidInput(f"step {str(step)!r}: at takes COORDINATOR, a number")
    return cluster.sites[int(step.args[0]) % len(cluster.sites)]


def violation_of(story: Story) -> Violation | None:
    """What breaks when the story is told; None when nothing does."""
    try:
        tell(story)
    except Violation as violation:
        return violation
    return None


def verdict(story: Story, *, tries: int = 300) -> str:
    """For people, and a story file itself: the shortest form of the story that still fails; empty when the story does not."""
    if violation_of(story) is None:
        return ""
    short = shrink(story, tries=tries)
    violation = violation_of(short)
    assert violation is not None
    lines = [
        f"# {violation}",
        f"# shrunk from {len(story.steps)} steps to {len(short.steps)}; again: python -m kvdir.testing.sim --story FILE",
        str(short),
        "# the last messages before it:",
        *(f"# {delivery}" for delivery in violation.recent[-20:]),
    ]
    return "\n".join(lines)


def shrink(story: Story, *, fails: Callable[[Story], bool] | None = None, tries: int = 400) -> Story:
    """A short story that still fails, found in at most so many tries. Every step of it matters, unless the tries ran out."""
    budget = _Budget(fails or (lambda candidate: violation_of(candidate) is not None), tries)
    steps: Sequence[Step] = story.steps
    pieces = 2
    while len(steps) >= 1:
        size = max(1, len(steps) // pieces)
        for start in range(0, len(steps), size):
            rest = [*steps[:start], *steps[start + size :]]
            if budget.fails(story.with_steps(rest)):
                steps, pieces = rest, max(2, pieces - 1)
                break
        else:
            if size == 1:
                break
            pieces = min(len(steps), 2 * pieces)
    return _plainer(story.with_steps(steps), budget)


def _plainer(story: Story, budget: _Budget) -> Story:
    """Every setting of the cluster back at its default that need not differ."""
    for item in dataclasses.fields(Setup):
        if item.name != "seed" and getattr(story.setup, item.name) != item.default:
            default: Any = item.default
            plain = Story(dataclasses.replace(story.setup, **{item.name: default}), story.steps)
            if budget.fails(plain):
                story = plain
    return story


class _Budget:
    """Tells stories until the tries run out; after that nothing fails any more."""

    def __init__(self, fails: Callable[[Story], bool], tries: int) -> None:
        self._fails = fails
        self._left = tries

    def fails(self, story: Story) -> bool:
        self._left -= 1
        return self._left >= 0 and self._fails(story)
