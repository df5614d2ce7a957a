"""NIXL's bindings behind few typed verbs: an agent of ours, the memory it registers, agents of peers, reads.

Rules:
- The bindings are used and not NIXL's Python class on top of them, which hard-codes a delay of 0 for the progress thread: with
  that it takes a whole core. Here it sleeps on UCX's event descriptor and wakes every PROGRESS_MS besides.
- A peer's agent gets a name of ours, in place of the one that its metadata begins with: NIXL refuses a name that is taken, and
  for ever one whose metadata was bad once, so that a peer could cut us off from another one by naming it.
- NIXL's exceptions have no common base; what it raises becomes BackendError, ConnectionError or NixlError here.

Does not: wait, or know what may be written where.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import numpy as np

from peer_agent.mover import libucp
from peer_agent.mover.backend import BackendError

PROGRESS_MS = 20

DISTRIBUTIONS = ("nixl", "nixl-cu12", "nixl-cu13")
INSTALL = (
    "use the engine image's own NIXL, or pip install --no-deps nixl-cu12 (with its dependencies it brings gigabytes of torch "
    "that nobody needs here)"
)

Handle = int
Places = Any
"""Packed u64 addresses or lengths, a numpy array."""


class NixlError(Exception):
    """NIXL failed otherwise than by a lost peer: whether a transfer goes on is not known."""


class NixlAgent:
    """Made once in a process, after UCX's environment is set. name: what NIXL calls us. Raises BackendError."""

    def __init__(self, name: str) -> None:
        self._bindings, self.version = load()
        self._name = name
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_MS * 1000
        config.useListenThread = False
        config.syncMode = self._bindings.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = self._bindings.nixlAgent(name, config)
            self._agent.createBackend("UCX", {})
        except Exception as error:
            devices = ", ".join(libucp.rdma_devices()) or "none"
            raise BackendError(f"nixl: {self.version} cannot start here: {error!r}; RDMA devices: {devices}") from error

    def register(self, address: int, size: int) -> None:
        """Memory to read from and into, for as long as the process lives. Raises BackendError."""
        rows = [(address, size, 0, "")]
        try:
            self._agent.registerMem(self._bindings.nixlRegDList(self._bindings.DRAM_SEG, rows), [])
        except Exception as error:
            raise BackendError(
                f"nixl: {size:,} bytes cannot be registered: {error!r}; RDMA pins them, so raise memlock "
                "(ulimit -l unlimited, systemd LimitMEMLOCK=infinity, docker --ulimit memlock=-1)"
            ) from error

    def metadata(self) -> bytes:
        """What a peer needs to `add` us. Raises BackendError."""
        own, prefix = bytes(self._agent.getLocalMD()), _prefix(self._name)
        if not own.startswith(prefix):
            raise BackendError(f"nixl: metadata of version {self.version} begins otherwise than we know; {INSTALL}")
        return own[len(prefix) :]

    def add(self, name: str, metadata: bytes) -> None:
        """name: never used before in this process. Raises ConnectionError."""
        try:
            self._agent.loadRemoteMD(_prefix(name) + metadata)
        except Exception as error:
            raise ConnectionError(f"NIXL does not take the peer's metadata: {error!r}") from error

    def remove(self, name: str) -> None:
        self._agent.invalidateRemoteMD(name)

    def prepare(self, name: str, row: tuple[int, int, int, int]) -> Handle:
        """A list of places of the agent `name`, "" for ours. row: first address, length, stride, count. Raises NixlError."""
        first, length, stride, count = row
        rows = np.array([[first, length, 0, stride, count]], np.uint64)
        owner = name or self._bindings.NIXL_INIT_AGENT
        try:
            return int(self._agent.prepXferDlist(owner, self._bindings.DRAM_SEG, rows, []))
        except Exception as error:
            raise NixlError(f"no list of the peer's memory: {error!r}") from error

    def release_list(self, prepared: Handle) -> None:
        self._agent.releasedDlistH(prepared)

    def read_prepared(self, ours: tuple[Handle, Places], theirs: tuple[Handle, Places]) -> Handle:
        """A transfer between places of two prepared lists (i32 indices). Raises NixlError."""
        try:
            return int(self._agent.makeXferReq(self._bindings.NIXL_READ, *ours, *theirs, b"", [], False))
        except Exception as error:
            raise NixlError(f"no transfer: {error!r}") from error

    def read(self, name: str, ours: Places, theirs: Places, lengths: Places) -> Handle:
        """A transfer whose places are described one by one. Raises NixlError."""
        try:
            here, there = (
                self._bindings.nixlXferDList(self._bindings.DRAM_SEG, _rows(side, lengths)) for side in (ours, theirs)
            )
            return int(self._agent.createXferReq(self._bindings.NIXL_READ, here, there, name, b"", []))
        except Exception as error:
            raise NixlError(f"no transfer: {error!r}") from error

    def post(self, transfer: Handle) -> bool:
        """Begins it. True if it has ended already. Raises as `ended` does."""
        return self._ended(lambda: self._agent.postXferReq(transfer, b""))

    def ended(self, transfer: Handle) -> bool:
        """True when every byte is here. ConnectionError: its endpoint has failed, which ends all its transfers; NixlError."""
        return self._ended(lambda: self._agent.getXferStatus(transfer))

    def release(self, transfer: Handle) -> None:
        self._agent.releaseXferReq(transfer)

    def _ended(self, ask: Any) -> bool:
        try:
            state = ask()
        except self._bindings.nixlRemoteDisconnectError as error:
            raise ConnectionError("NIXL has lost the peer") from error
        except Exception as error:
            raise NixlError(f"a transfer failed: {error!r}") from error
        if state not in (self._bindings.NIXL_SUCCESS, self._bindings.NIXL_IN_PROG):
            raise NixlError(f"a transfer ended in state {state}")
        return bool(state == self._bindings.NIXL_SUCCESS)


def load() -> tuple[ModuleType, str]:
    """NIXL's bindings and their version. Raises BackendError."""
    for distribution in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(distribution)
            return importlib.import_module(f"{distribution.replace('-', '_')}._bindings"), version
        except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError):
            continue
        except ImportError as error:
            raise BackendError(f"nixl: {distribution} {version} cannot be loaded: {error}") from error
    raise BackendError(f"nixl: NIXL is not installed for {sys.executable}; {INSTALL}, or leave 'nixl' out of transports")


def _prefix(name: str) -> bytes:
    """What NIXL's metadata of an agent begins with."""
    return b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name.encode() + b"|"


def _rows(addresses: Places, lengths: Places) -> Any:
    """n x (address, length, device 0), u64."""
    out = np.zeros((len(addresses), 3), np.uint64)
    out[:, 0] = addresses
    out[:, 1] = lengths
    return out
