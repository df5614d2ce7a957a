"""For tests with a real vLLM on CPU (`make test-vllm`): what has to be set before vLLM is imported, models, agents, engines.

Several engines live in this one process, one after another: the worker's connector is a singleton of the process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.vllm.world import World

VLLM_IS_HERE = importlib.util.find_spec("vllm") is not None
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
SHARED_MEMORY = Path("/dev/shm")
DIRECTORY, POOL = "kvdir-vllm-", "vllm_offload_test-"
"""Followed by a process id: of directories made here, and of host pools, which vLLM names after engine_id (world.py)."""

if VLLM_IS_HERE:
    os.environ.update(ENVIRONMENT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(180))
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM's and torch's own


@pytest.fixture(scope="session")
def shared_memory() -> Iterator[Path]:
    """A directory on shared memory, for arenas and sockets; gone afterwards, and so are pools of engines that were not closed.

    What sessions left that were killed is removed by the next one: names say which process made them.
    """
    _remove_what_is_left()
    with tempfile.TemporaryDirectory(prefix=f"{DIRECTORY}{os.getpid()}-", dir=SHARED_MEMORY) as path:
        yield Path(path)
    _remove_what_is_left(mine=True)


def _remove_what_is_left(*, mine: bool = False) -> None:
    """Of test sessions that have ended; mine: of this one."""
    for prefix in (DIRECTORY, POOL):
        for path in SHARED_MEMORY.glob(f"{prefix}*"):
            pid = path.name.removeprefix(prefix).split("-")[0]
            if not pid.isdigit() or (int(pid) != os.getpid() if mine else Path("/proc", pid).exists()):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.vllm.models import make_llama

    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.vllm.models import make_gemma3

    return make_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="session")
def connector_llama(tiny_llama: Path, shared_memory: Path) -> Iterator[World]:
    """As `world`, of a Llama by way of KvdirConnector, for the files of its tests that follow each other."""
    from tests.vllm.connectors import connector
    from tests.vllm.world import World

    made = World.start(shared_memory / "connector-llama", tiny_llama, connector)
    yield made
    made.close()


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def world(request: pytest.FixtureRequest, shared_memory: Path) -> Iterator[World]:
    """An owner whose agent has the blocks of eight prompts from a real engine, and the right answers. By way of the tier."""
    from tests.vllm.world import World

    made = World.start(shared_memory / f"tier-{request.param}", request.getfixturevalue(f"tiny_{request.param}"))
    yield made
    made.close()
