"""Names of the backends that a mover can run. Looked up inside the mover, so that an agent never imports their libraries."""

from __future__ import annotations

import importlib

from peer_agent.mover.backend import Backend, BackendError, Service, Settings

BACKENDS = {
    "ucx": "peer_agent.mover.ucx:UcxBackend",
    "nixl": "peer_agent.mover.nixl:NixlBackend",
    "device": "peer_agent.mover.device:DeviceService",
    "fake": "peer_agent.mover.fake:FakeBackend",
}


def make_backend(name: str, settings: Settings) -> Backend | Service:
    """name: one of BACKENDS, or module:class (third parties, tests). Raises BackendError."""
    module, _, kind = BACKENDS.get(name, name).partition(":")
    if not kind:
        raise BackendError(f"unknown mover backend {name!r}; known are {', '.join(BACKENDS)}, or give module:class")
    try:
        made = getattr(importlib.import_module(module), kind)(settings)
    except ImportError as error:
        raise BackendError(f"{name}: cannot be loaded: {error}") from error
    return made  # type: ignore[no-any-return]
