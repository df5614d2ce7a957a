"""Every fault of docs/consistency.md, done to a simulated cluster: how long figures were not trusted, and what repair cost.

The cluster is kvdir.testing's LocalCluster: the real publisher, protocol, directory and index on simulated time. So the times
are exact, whatever the machine is doing, and follow from the settings: heartbeats of 1 s, ticks of 50 ms, 1 ms on the way.
Each fault is done at several moments between two heartbeats; the table has the worst of them. Bytes are those of all messages
with contents that the agent sent from the fault until everything was equal again; news of its own included.
`bystander_untrusted_s` is how long the figures of another node were not trusted: only the coordinator's own faults may
touch it. Does not: measure CPU.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvdir.testing import LocalCluster
from kvdir.testing.sim.invariants import unsettled

Advance = Callable[..., None]

VICTIM, BYSTANDER = 0, 1
HELD_BLOCKS = 2_000
CHANGED_BLOCKS = 10
MOMENTS = 4
STEP_S = 0.01
LOOK_S = 0.05
LIMIT_S = 90.0
OLD = range(CHANGED_BLOCKS)
NEW = range(10**6, 10**6 + CHANGED_BLOCKS)
LATER = range(10**6 + CHANGED_BLOCKS, 10**6 + 2 * CHANGED_BLOCKS)
CONTENTS = ("batch", "sketch", "snapshot")
REPAIRS = ("replay", "sketch", "snapshot")


def run_faults_bench(*, advance: Advance = lambda n=1.0, text=None: None, moments: int = MOMENTS) -> dict[str, object]:
    """`rows`: a mapping for each fault, the worst of its moments. `advance(share, text)` reports progress; shares sum to 1."""
    rows = []
    with _quiet():
        for name, do in FAULTS.items():
            rows.append(_worst(name, [_measured(do, moment / moments) for moment in range(moments)]))
            advance(1 / len(FAULTS), name)
    return {"held_blocks": HELD_BLOCKS, "changed_blocks": CHANGED_BLOCKS, "moments": moments, "rows": rows}


def _worst(name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest of every figure; None only if every one is."""
    noticed = [each.pop("noticed_s") for each in found]
    latest = max((at_s for at_s in noticed if at_s is not None), default=None)
    return {"fault": name, "noticed_s": latest, **{key: max(each[key] for each in found) for key in found[0]}}


def _measured(do: Callable[[Course], None], moment: float) -> dict[str, Any]:
    """The fault, `moment` of a heartbeat into a quiet time."""
    with LocalCluster(nodes=2, watch=False) as cluster:
        for node in (VICTIM, BYSTANDER):
            cluster.node(node).store(range(HELD_BLOCKS))
        cluster.settle()
        cluster.advance((2 + moment) * cluster.heartbeat_s)
        cluster.network.sent.clear()
        cluster.network.sent_bytes.clear()
        course = Course(cluster)
        do(course)
        course.advance(STEP_S)
        course.finish()
        return course.figures()


class Course:
    """What one fault leads to, looked at every 10 ms. Times are simulated seconds since the fault."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self._began_s = cluster.now_s
        self._noticed_s: float | None = None
        self._untrusted_s = self._bystander_untrusted_s = self._exact_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return self.cluster.now_s - self._began_s

    def advance(self, seconds: float) -> None:
        """Lets time pass, and looks on."""
        for _ in range(max(1, round(seconds / STEP_S))):
            self.cluster.advance(STEP_S)
            self._bystander_untrusted_s += 0 if self._trusted(BYSTANDER) else STEP_S
            if not self._trusted(VICTIM):
                self._untrusted_s += STEP_S
                self._noticed_s = self.elapsed_s if self._noticed_s is None else self._noticed_s

    def finish(self) -> None:
        """Until every view is trusted and equal to the truth. RuntimeError if it is not repaired at all."""
        while words := self._unsettled():
            if self.elapsed_s > LIMIT_S:
                raise RuntimeError(f"not repaired within {LIMIT_S:g} s: {words}")
            self.advance(LOOK_S)
        self._exact_s = self.elapsed_s

    def figures(self) -> dict[str, Any]:
        """A row of the table."""
        network, name = self.cluster.network, self.cluster.node(VICTIM).name
        return {
            "noticed_s": None if self._noticed_s is None else round(self._noticed_s, 2),
            "untrusted_s": round(self._untrusted_s, 2),
            "exact_s": round(self._exact_s, 2),
            **{kind: network.sent[name, f"{kind}_request"] for kind in REPAIRS},
            "bytes": sum(network.sent_bytes[name, kind] for kind in CONTENTS),
            "bystander_untrusted_s": round(self._bystander_untrusted_s, 2),
        }

    def _unsettled(self) -> str:
        if self._trusted(VICTIM) and self._trusted(BYSTANDER):
            return "; ".join(unsettled(self.cluster.sites[0]))
        return "some figure is not trusted"

    def _trusted(self, node: int) -> bool:
        """A node that is not known has no figures that anybody could act on."""
        try:
            return self.cluster.directory.blocks(node).trusted
        except KeyError:
            return False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The daemons log the faults that are done to them; here that is no news."""
    log = logging.getLogger("kvdir")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


# -- the faults, in the order of docs/consistency.md -------------------------------------------------------------------------


def _lost_event(course: Course) -> None:
    course.cluster.network.drop_events(VICTIM, count=1)
    course.cluster.node(VICTIM).store(NEW)
    course.advance(0.01)
    course.cluster.node(VICTIM).store(LATER)


def _lost_last_event(course: Course) -> None:
    course.cluster.network.drop_events(VICTIM, count=1)
    course.cluster.node(VICTIM).store(NEW)


def _lost_remove(course: Course) -> None:
    course.cluster.network.drop_events(VICTIM, count=1)
    course.cluster.node(VICTIM).remove(OLD)


def _queue_overflow(course: Course) -> None:
    for block in NEW:
        course.cluster.node(VICTIM).lose(stored=[block])


def _duplicated(course: Course) -> None:
    course.cluster.node(VICTIM).store(NEW)
    course.advance(0.01)
    for _ in range(3):
        course.cluster.network.repeat(course.cluster.node(VICTIM).name, -1)


def _reordered(course: Course) -> None:
    """The call breaks, the agent sends everything again in a new one, and then the old batch arrives as well."""
    course.cluster.node(VICTIM).store(NEW)
    course.cluster.network.cut(VICTIM, late_s=0.5)
    course.cluster.node(VICTIM).remove(NEW)


def _restart_keeping(course: Course) -> None:
    course.cluster.node(VICTIM).restart(keep=True)


def _restart_empty(course: Course) -> None:
    course.cluster.node(VICTIM).restart()


def _coordinator_restart(course: Course) -> None:
    course.cluster.restart_coordinator()


def _partition(course: Course) -> None:
    """30 s; the agent goes on storing and removing."""
    course.cluster.network.partition(VICTIM)
    for block in range(30):
        course.cluster.node(VICTIM).store([10**6 + block])
        course.cluster.node(VICTIM).remove([block])
        course.advance(1)
    course.cluster.network.rejoin(VICTIM)


def _clock_step(course: Course) -> None:
    """The wall clock goes back a day, then the agent starts again with its arena."""
    course.cluster.node(VICTIM).clock_offset_s = -86_400
    course.cluster.node(VICTIM).restart(keep=True)


def _two_agents(course: Course) -> None:
    course.cluster.node(VICTIM).start_twice()


def _never_said(course: Course) -> None:
    """A bug of the agent: one block gone, another one there, and no event about either."""
    course.cluster.node(VICTIM).change_silently(removed=[1], stored=[10**6])


def _false_report(course: Course) -> None:
    """A reader says "absent" about blocks that the node holds."""
    course.cluster.report_absent(VICTIM, OLD)


FAULTS: Mapping[str, Callable[[Course], None]] = {
    "lost event": _lost_event,
    "lost last event": _lost_last_event,
    "lost remove": _lost_remove,
    "queue overflow": _queue_overflow,
    "duplicated batch": _duplicated,
    "reordered across calls": _reordered,
    "agent restart, arena kept": _restart_keeping,
    "agent restart, arena gone": _restart_empty,
    "coordinator restart": _coordinator_restart,
    "partition of 30 s": _partition,
    "clock step and restart": _clock_step,
    "two agents, one name": _two_agents,
    "change never said (bug)": _never_said,
    "false report of a reader": _false_report,
}
