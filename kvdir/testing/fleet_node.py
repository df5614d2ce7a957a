"""One life of a node in a simulated fleet, its link to each coordinator, and what its messages do when they arrive."""

from __future__ import annotations

from kvdir.core.directory import Directory
from kvdir.core.event import Batch, Heartbeat, SnapshotChunk
from kvdir.core.node import Stream
from kvdir.core.sender import StreamSender
from kvdir.core.sketches import SketchStatement
from kvdir.testing.sim_node import SimNode


class Link:
    """One node's calls to one coordinator. cut: nothing passes. calls: how many began; what an earlier one sent is lost."""

    __slots__ = ("calls", "connection", "cut", "number", "open", "sender", "stream")

    def __init__(self, number: int, sender: StreamSender) -> None:
        self.number = number
        self.sender = sender
        self.stream: Stream | None = None
        self.connection = 0
        self.calls = 0
        self.open = self.cut = False


class FleetNode(SimNode):
    """One life of a node, with a link to every coordinator."""

    def __init__(self, name: str, epoch: int, coordinators: int, *, namespace_digest: bytes, capacity_blocks: int) -> None:
        super().__init__(name, epoch, namespace_digest=namespace_digest, capacity_blocks=capacity_blocks)
        self.links = [Link(number, self.new_sender()) for number in range(coordinators)]
        self.alive = True


# -- messages, as they arrive ------------------------------------------------------------------------------------------------


def batch_arrives(batch: Batch, directory: Directory, stream: Stream, now_s: float) -> None:
    directory.batch(stream, batch.first_seq, batch.events, now_s=now_s)


def heartbeat_arrives(heartbeat: Heartbeat, directory: Directory, stream: Stream, now_s: float) -> None:
    directory.heartbeat(stream, heartbeat, now_s=now_s)


def sketch_arrives(statement: SketchStatement, directory: Directory, stream: Stream, now_s: float) -> None:
    directory.sketch(stream, statement, now_s=now_s)


def chunk_arrives(chunk: SnapshotChunk, directory: Directory, stream: Stream, now_s: float) -> None:
    directory.snapshot_chunk(stream, chunk, now_s=now_s)


def unavailable_arrives(directory: Directory, stream: Stream, now_s: float) -> None:
    directory.replay_unavailable(stream, now_s=now_s)


def goodbye_arrives(directory: Directory, stream: Stream, now_s: float) -> None:
    directory.goodbye(stream, now_s=now_s)
