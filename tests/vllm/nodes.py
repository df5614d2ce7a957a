"""A coordinator and agents as processes, for engines of this process: started, stopped, killed by the test.

Arenas lie in a directory on shared memory that the caller owns. Everything started here is ended by `close`, by process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvdir.client.sync import Client
from kvdir.errors import KvdirError
from kvdir.testing.wait import wait_until
from peer_agent.v1 import engine_pb2, engine_pb2_grpc

READY_S = 30.0
wait_for = wait_until


@dataclass(slots=True)
class Child:
    """ready: the line that it printed when it served."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait(10)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.go_on()
            os.kill(self.pid, signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


class Nodes:
    """children: agents by node name, and "coordinator". coordinator: its address."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.children: dict[str, Child] = {}
        self.coordinator = "127.0.0.1:0"

    def start_coordinator(self) -> str:
        """Again at the same address after it was ended."""
        child = self._start(
            "coordinator", "-m", "kvdir", "serve", "--listen", self.coordinator, "--http-listen", "", "--heartbeat-interval-ms",
            "100", "--output", "json",
        )  # fmt: skip
        self.coordinator = str(child.ready["grpc"])
        return self.coordinator

    def start_agent(self, node: str, *more: str) -> Child:
        """An agent without a namespace file: engines bring theirs along."""
        return self._start(
            node, "-m", "peer_agent", "serve", "--node", node, "--accept-bytes", "16MiB", "--arena-path",
            str(self.directory / node), "--huge-pages", "off", "--coordinators", self.coordinator, "--replica",
            "--listen", "127.0.0.1:0", "--http-listen", "", "--output", "json", "--grace-s", "1", *more,
        )  # fmt: skip

    def engine(self, node: str) -> str:
        """Where engines of the node attach, whether its agent runs or not."""
        return f"unix:{self.directory / node}.sock"

    def known_blocks(self, node: str) -> int:
        """Blocks that the coordinator names for the node."""
        with contextlib.suppress(KvdirError), Client(self.coordinator) as client:
            for view in client.nodes():
                if view.trust.node == node:
                    return sum(item.blocks.value for item in view.holdings)
        return 0

    def held_blocks(self, node: str) -> int:
        """Blocks that the node's agent says it has."""
        with grpc.insecure_channel(self.engine(node)) as channel:
            answer = engine_pb2_grpc.EngineStub(channel).Inventory(engine_pb2.InventoryRequest(), timeout=5)
        return sum(item.committed for item in answer.namespaces)

    def close(self) -> None:
        for child in self.children.values():
            child.end()

    def _start(self, name: str, *arguments: str) -> Child:
        if name in self.children:
            self.children[name].end()
        with (self.directory / f"{name}.log").open("a") as log:
            process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=log, text=True)
        self.children[name] = child = Child(process, {})
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                child.ready = json.loads(line)
                assert child.ready.get("event") == "ready", f"{name} did not start: {line}"
                return child
        raise AssertionError(f"{name} did not start: {(self.directory / f'{name}.log').read_text()[-2000:]}")
