"""Figures of the feed: how long after an owner says that it stored a block a reader finds it in a replica.

Owns the measuring; `kvdir bench feed` prints it. Three processes: the coordinator, a replica that watches it, and the meter,
which publishes at a set rate and reads. The first block of every event is a marker. A thread looks the markers up in the
region every POLL_S, and notes when each is first found. All are on one machine's monotonic clock, so lag is from before the
event is handed to gRPC until a lookup finds it, the poll included. The same load without a replica says what the feed costs
the coordinator. Does not: judge a figure.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

from kvdir.cli.bench_ingest import DIGEST, EPOCH, Acked, hello_message
from kvdir.cli.bench_process import CoordinatorProcess, coordinator_process, cpu_s
from kvdir.client.replica import Replica
from kvdir.core.event import EVENT_WIDTH, Batch, Event
from kvdir.fingerprint import Fingerprints
from kvdir.index import RegionError, RegionReader
from kvdir.location import Tier
from kvdir.rpc.channel import client_options, wait_ready
from kvdir.rpc.event_codec import encode_batch
from kvdir.rpc.tls import PLAINTEXT
from kvdir.v1 import events_pb2

__all__ = ["run_feed_bench"]

EVENT_BLOCKS = (128, 1_024)
BLOCKS_PER_S = 200_000
SECONDS = 8.0
POLL_S = 0.0005
CREDIT_EVENTS = 8_192
_READY_S = 20.0
_SCOPE = int.from_bytes(DIGEST[:8], "little")

Advance = Callable[..., None]


def run_feed_bench(*, advance: Advance = lambda n=1.0, text=None: None, seconds: float = SECONDS) -> dict[str, Any]:
    """rows, one an event size: blocks_per_s, lag_*_ms, CPU as shares of one core; unseen: markers that were never found."""
    return asyncio.run(_rounds(advance, seconds))


async def _rounds(advance: Advance, seconds: float) -> dict[str, Any]:
    rows = []
    for size in EVENT_BLOCKS:
        advance(0.0, f"{size} blocks an event, nobody watches")
        alone = await _round(size, seconds, watched=False)
        advance(0.5 / len(EVENT_BLOCKS), f"{size} blocks an event, a replica watches")
        watched = await _round(size, seconds, watched=True)
        advance(0.5 / len(EVENT_BLOCKS), "")
        rows.append({"event_blocks": size, **watched, "coordinator_cpu_unwatched": alone["coordinator_cpu"]})
    return {"blocks_per_s_asked": BLOCKS_PER_S, "seconds": seconds, "poll_ms": POLL_S * 1e3, "rows": rows}


async def _round(size: int, seconds: float, *, watched: bool) -> dict[str, Any]:
    with coordinator_process("--credit-events", str(CREDIT_EVENTS)) as coordinator:
        path = Path(f"/dev/shm/kvdir-bench-{os.getpid()}.feed")
        if not watched:
            wall_s, cpu, blocks = await _publish(coordinator, size, seconds, _Markers())
            return {"coordinator_cpu": cpu / wall_s, "blocks_per_s": blocks / wall_s}
        with _replica_process(coordinator.address, path) as replica:
            markers = _Markers()
            reading = threading.Thread(target=markers.read, args=(path,), daemon=True)
            reading.start()
            before_s, own_s = cpu_s(replica.pid), time.process_time()
            wall_s, cpu, blocks = await _publish(coordinator, size, seconds, markers)
            replica_cpu, own_cpu = cpu_s(replica.pid) - before_s, time.process_time() - own_s
            markers.stop()
            await asyncio.to_thread(reading.join)
    lags = quantiles(markers.lags_ms(), n=100, method="inclusive") if len(markers.seen) > 1 else [0.0] * 99
    return {
        "blocks_per_s": blocks / wall_s,
        "lag_p50_ms": lags[49],
        "lag_p99_ms": lags[98],
        "lag_max_ms": max(markers.lags_ms(), default=0.0),
        "unseen": len(markers.sent) - len(markers.seen),
        "coordinator_cpu": cpu / wall_s,
        "replica_cpu": replica_cpu / wall_s,
        "meter_cpu": own_cpu / wall_s,
    }


class _Markers:
    """Written by the event loop, read by the reading thread; marker n is found only behind marker n - 1."""

    def __init__(self) -> None:
        self.sent: list[float] = []
        self.seen: list[float] = []
        self._stop_s = float("inf")

    def next(self) -> bytes:
        """The first block of the event that is written now."""
        self.sent.append(time.monotonic())
        return _marker(len(self.sent))

    def stop(self) -> None:
        """No more will come; those under way have two seconds."""
        self._stop_s = time.monotonic() + 2.0

    def lags_ms(self) -> list[float]:
        return [(seen - sent) * 1e3 for sent, seen in zip(self.sent, self.seen, strict=False)]

    def read(self, path: Path) -> None:
        """Polls the region until every marker was found, or `stop` was long ago."""
        reader = _open(path)
        while time.monotonic() < self._stop_s:
            if len(self.seen) == len(self.sent):
                if self._stop_s != float("inf"):
                    break
                time.sleep(POLL_S)
                continue
            if reader.stale:
                reader = _open(path)
            first = len(self.seen) + 1
            wanted = b"".join(map(_marker, range(first, min(len(self.sent), first + 31) + 1)))
            runs, _, _, hits, _ = reader.lookup(wanted, 8, scope=_SCOPE)
            now_s = time.monotonic()
            if hits and memoryview(runs).cast("I")[0] == 0:
                self.seen += [now_s] * memoryview(runs).cast("I")[1]
            else:
                time.sleep(POLL_S)
        reader.close()


def _marker(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _open(path: Path) -> RegionReader:
    end_s = time.monotonic() + _READY_S
    while True:
        try:
            return RegionReader(path)
        except RegionError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.01)


async def _publish(coordinator: CoordinatorProcess, size: int, seconds: float, markers: _Markers) -> tuple[float, float, int]:
    """(wall seconds, coordinator CPU seconds, blocks) of publishing at the rate."""
    events = int(seconds * BLOCKS_PER_S / size)
    filler = os.urandom((size - 1) * EVENT_WIDTH * events)
    options = client_options()
    async with PLAINTEXT.aio(coordinator.address, options=options) as channel:
        await wait_ready(channel, target=coordinator.address, timeout_s=5.0)
        call: Any = channel.stream_stream(
            "/kvdir.v1.Events/Publish", request_serializer=None, response_deserializer=events_pb2.PublishResponse.FromString
        )()
        await call.write(hello_message())
        assert (await call.read()).WhichOneof("message") == "welcome"
        acked = Acked()
        reader = asyncio.create_task(acked.read(call, events))
        before_s, started_s = coordinator.cpu_s(), time.monotonic()
        for number in range(events):
            due_s = started_s + number * size / BLOCKS_PER_S
            if due_s > time.monotonic():
                await asyncio.sleep(due_s - time.monotonic())
            await acked.wait(number - CREDIT_EVENTS)
            at = number * (size - 1) * EVENT_WIDTH
            rest = filler[at : at + (size - 1) * EVENT_WIDTH]
            packed = markers.next().ljust(EVENT_WIDTH, b"\0") + rest
            event = Event.stored(Tier.CPU, DIGEST, Fingerprints(packed, EVENT_WIDTH))
            await call.write(encode_batch(EPOCH, Batch(number + 1, (event,))).SerializeToString())
        await reader
        wall_s, cpu = time.monotonic() - started_s, coordinator.cpu_s() - before_s
        call.cancel()
    return wall_s, cpu, events * size


@contextmanager
def _replica_process(address: str, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing but keep a replica."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVDIR_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (entry or os.getcwd() for entry in sys.path)))
    process = subprocess.Popen([sys.executable, "-m", "kvdir.cli.bench_feed", address, str(path)], env=env)
    try:
        _wait_whole(process, path)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10.0)


def _wait_whole(process: subprocess.Popen[bytes], path: Path) -> None:
    end_s = time.monotonic() + _READY_S
    while time.monotonic() < end_s and process.poll() is None:
        if path.exists():
            reader = _open(path)
            whole = bool(reader.beat())
            reader.close()
            if whole:
                return
        time.sleep(0.02)
    raise RuntimeError(f"the replica at {path} was not whole within {_READY_S:g} s")


async def _keep(address: str, path: str) -> None:
    running = asyncio.create_task(Replica(address, path=path, name="bench").run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_keep(sys.argv[1], sys.argv[2]))
