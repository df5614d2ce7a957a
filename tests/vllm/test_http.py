"""Two real OpenAI servers of vLLM, each with its agent: the second does not compute what the first has (`make test-vllm-http`).

One server is started after the other: both at once take minutes on two cores. Everything ends by process id, and what the
servers leave in shared memory is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.connectors import connector
from tests.vllm.engines import BLOCK_TOKENS, Prompt
from tests.vllm.nodes import Nodes, wait_for
from tests.vllm.world import tier

READY_S = 240.0
ANSWER_S = 60.0


@dataclass
class Server:
    """A process group of its own. port: of HTTP on loopback."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @classmethod
    def start(cls, model: Path, transfer: dict[str, Any], log: Path) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
                    "--port", str(port), "--served-model-name", "tiny", "--enforce-eager", "--dtype", "float32",
                    "--skip-tokenizer-init", "--max-model-len", "1024", "--max-num-seqs", "8", "--seed", "0",
                    "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", "64M",
                    "--kv-transfer-config", json.dumps(transfer),
                ],
                stdout=output, stderr=output, start_new_session=True,
                env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            )  # fmt: skip
        made = cls(process, port, log)
        try:
            wait_for(made.healthy, f"a server on port {port}", within_s=READY_S)
        except BaseException:
            made.end()
            raise
        return made

    def healthy(self) -> bool:
        assert self.process.poll() is None, f"the server ended: {self.log.read_text()[-3000:]}"
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).status == 200)
        return False

    def complete(self, prompt: Prompt) -> tuple[list[int], float]:
        """(tokens, seconds)."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        began_s = time.monotonic()
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            tokens = json.load(answer)["choices"][0]["token_ids"]
        return tokens, time.monotonic() - began_s

    def external_tokens(self) -> float:
        """Prompt tokens that came through the connector, by vLLM's own counter."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:external_prefix_cache_hits_total"))

    def end(self) -> None:
        left = shared_memory_of(self.process.pid)
        for number, within_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(within_s)
        for path in left:
            path.unlink(missing_ok=True)


def shared_memory_of(group: int) -> set[Path]:
    """What processes of the group map of vLLM's own in shared memory, which a killed server would leave there."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(maps.parent.name)) == group:
                found |= {Path(line.split()[-1]) for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return {path for path in found if path.name.startswith(("psm_", "vllm_", "sem."))}


@pytest.fixture
def nodes(shared_memory: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    directory = shared_memory / f"http-{request.node.callspec.id}"
    directory.mkdir()
    made = Nodes(directory)
    try:
        made.start_coordinator()
        for node in ("one", "two"):
            made.start_agent(node)
        yield made
    finally:
        made.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", [connector, tier], ids=["connector", "tier"])
def test_second_server_answers_from_the_first_one_s_blocks(
    way: Callable[..., dict[str, Any]], nodes: Nodes, tiny_llama: Path, tmp_path: Path
):
    first_prompt = [(7 * n * n + 3 * n) % 256 + 4 for n in range(300)]
    second_prompt = [(11 * n * n + 5 * n) % 256 + 4 for n in range(300)]
    shareable = len(first_prompt) // BLOCK_TOKENS * BLOCK_TOKENS
    with contextlib.ExitStack() as stack:
        first = Server.start(tiny_llama, way(nodes.engine("one")), tmp_path / "one.log")
        stack.callback(first.end)
        right, _ = first.complete(first_prompt)
        also_right, _ = first.complete(second_prompt)
        enough = 1.8 * shareable / BLOCK_TOKENS  # the last ones may wait for the server's next step
        wait_for(lambda: nodes.known_blocks("one") >= enough, "blocks of the first server known")

        second = Server.start(tiny_llama, way(nodes.engine("two")), tmp_path / "two.log")
        stack.callback(second.end)
        answer, _ = second.complete(first_prompt)
        assert answer == right
        assert second.external_tokens() > 0.8 * shareable
        _, usual_s = second.complete([*second_prompt[1:], 9])

        nodes.children["one"].kill()
        answer, took_s = second.complete(second_prompt)
        assert answer == also_right
        assert took_s - usual_s <= 1.0
