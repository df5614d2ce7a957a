"""What the operator says in HiCache's extra config for kvdir: read once, every fault at once, in words.

Rules: keys that SGLang reads there are left alone; a key that nobody knows is a fault, since a mistyped `weights` would share
blocks of other weights. Does not: know pools.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvdir.errors import ConfigError, InvalidInput
from kvdir.namespace import DTYPE_BYTES
from peer_agent.connectors.weights import weights_digest

SGLANG_KEYS = frozenset(
    {
        "backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "prefetch_threshold",
        "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    }
)  # fmt: skip
"""Of SGLang 0.5.23; most are taken out before a backend sees them."""

CONFIG = "config.json"

_TIMES = ("deadline_s", "exists_deadline_s", "attach_timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """agent: where engines of this host attach. weights: revision or digest of the weights; two models of one name differ here.
    model_path: directory or file of the weights, whose digest is taken where `weights` says nothing, with that of the model's
    configuration beside them: other scales or windows over the same weights give other KV.
    kv_dtype: effective element type where the host pool hides it (fp8 is kept as uint8). position, adapter: as in a namespace.
    deadline_s: longest a batch of pages may take to store or load. exists_deadline_s: to say what is there.
    attach_timeout_s: longest the start of the engine waits for the agent; it starts without one, too, and sees misses.
    window_tokens: of sliding windows, for people: SGLang itself says how many trailing pages it needs.
    model: name of the model where SGLang gives none, or another than other engines use.
    """

    agent: str
    weights: str = ""
    model_path: str = ""
    kv_dtype: str = ""
    position: str = "as the weights say"
    adapter: str = "none"
    model: str = ""
    deadline_s: float = 1.0
    exists_deadline_s: float = 0.05
    attach_timeout_s: float = 2.0
    window_tokens: int = 0


def read_settings(extra: Mapping[str, Any] | None) -> Settings:
    """Raises ConfigError with every fault. Reads some of the weights where only their place is given."""
    extra = extra or {}
    names = [field.name for field in fields(Settings)]
    values = {name: extra[name] for name in names if name in extra}
    faults = [_unknown(key, names) for key in extra if key not in SGLANG_KEYS and key not in names]
    if not values.get("agent"):
        faults.append(f"agent: required; {_AGENT}")
    if not values.get("weights") and not values.get("model_path"):
        faults.append(f"weights: required, or model_path; {_WEIGHTS}")
    for name, value in values.items():
        if name in _TIMES:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 3600:
                faults.append(f"{name}: must be seconds from 0 to 3600, is {value!r}")
        elif name == "window_tokens":
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                faults.append(f"window_tokens: must be a whole number, is {value!r}")
        elif not isinstance(value, str):
            faults.append(f"{name}: must be text, is {value!r}")
    if isinstance(dtype := values.get("kv_dtype"), str) and dtype and dtype not in DTYPE_BYTES:
        faults.append(f"kv_dtype: {dtype!r} is unknown; one of {', '.join(DTYPE_BYTES)}")
    if faults:
        raise ConfigError([f"HiCache extra config: {fault}" for fault in faults])
    settings = Settings(**values)
    if settings.weights:
        return settings
    try:
        return replace(settings, weights=_digest(Path(settings.model_path)))
    except (InvalidInput, OSError) as error:
        raise ConfigError([f"HiCache extra config: model_path: {error}"]) from error


def _digest(model_path: Path) -> str:
    """Of weights and configuration. Raises as `weights_digest`."""
    weights, config = weights_digest(model_path), model_path / CONFIG
    if not config.is_file():
        return weights
    return f"{weights}:{hashlib.blake2b(config.read_bytes(), digest_size=8, person=b'kvdir-config').hexdigest()}"


_AGENT = "the address under `engines attach at` of `peer-agent serve`, such as unix:/dev/shm/kvdir-node1.sock"
_WEIGHTS = (
    "revision or digest of the weights that this server has loaded, or the directory they are in: other weights under the "
    "same name must never match"
)


def _unknown(key: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key, names, 1)
    return f"{key}: unknown" + (f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}")
