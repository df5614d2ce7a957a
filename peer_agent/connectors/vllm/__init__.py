"""kvdir for vLLM: connectors that vLLM loads by name from here (docs/engines/vllm.md).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvdirOffloadingConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "peer_agent.connectors.vllm", "kv_connector_extra_config": {
            "cpu_bytes_to_use": 17179869184, "kvdir": {"agent": "unix:/dev/shm/kvdir-node1.sock"}}}'

KvdirOffloadingConnector: vLLM's own offloading with KvdirTier below its host memory; the way in that we recommend.
KvdirTier, KvdirTieringSpec: its parts. KvdirConnector: a connector of its own, for platforms without the offload framework.
Rule: vLLM's interfaces for all this change from minor to minor, so each minor that was tried has modules of its own here, and
an unknown one is refused instead of guessed. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

SHIMS = {(0, 32): "v0_32"}
"""By minor version: the module that speaks to it."""

EXPORTS = {
    "KvdirOffloadingConnector": "offloading",
    "KvdirTier": "tier",
    "KvdirTieringSpec": "spec",
    "KvdirConnector": "connector",
}
"""Name to the part of the shim it is in: `v0_32_tier`, `v0_32_connector`."""

__all__ = ["KvdirConnector", "KvdirOffloadingConnector", "KvdirTier", "KvdirTieringSpec", "UnsupportedVllm"]


class UnsupportedVllm(ImportError):
    """This vLLM is not one that we know; says which are, and what to do."""


def shim(part: str) -> ModuleType:
    """The module for the installed vLLM. Raises UnsupportedVllm, or ImportError where there is no vLLM."""
    return importlib.import_module(f"{__name__}.{shim_name(_installed())}_{part}")


def shim_name(version: str) -> str:
    """Which modules speak to this version. Raises UnsupportedVllm."""
    numbers = version.split("+")[0].split(".")
    minor = tuple(int(number) for number in numbers[:2] if number.isdigit())
    name = SHIMS.get(minor)  # type: ignore[arg-type]
    if name is None:
        known = ", ".join(".".join(map(str, each)) for each in sorted(SHIMS))
        raise UnsupportedVllm(
            f"kvdir does not know vLLM {version}; it knows {known}. vLLM's connector interfaces change from minor to minor, so "
            f"nothing is shared with a version that was not tried: install a known vLLM, or a kvdir release that knows yours"
        )
    return name


def _installed() -> str:
    import vllm

    return str(vllm.__version__)


def __getattr__(name: str) -> Any:
    part = EXPORTS.get(name)
    if part is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(shim(part), name)
