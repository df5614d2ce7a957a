"""What an operator tells kvdir's connectors inside vLLM: the table "kvdir" of kv_connector_extra_config.

Rules: every setting once, with its consequence; an unknown one is refused, with those that exist. Only `agent` is required.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvdir.errors import InvalidInput

TABLE = "kvdir"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """agent: where this node's agent listens for engines, such as unix:/dev/shm/kvdir-node1.sock.

    weights: which weights these are, where their files are not on this node or the sampled digest is not enough: the same text
    exactly where they are the same. model: name for the directory; "": as served. lookup_ms: longest a request waits to hear
    what there is, where the agent keeps no replica. load_s: longest 64 MiB of a load may take; what has come by then counts,
    the rest is recomputed. store_s: longest a store may take. prefill_tokens_per_s: how fast this engine computes, so that
    what is not worth fetching is recomputed; 0: all is worth it. max_flight_bytes: host memory that loads and stores may hold
    up at once; more is recomputed, or not stored.
    require_salt: share only requests that carry a cache_salt. check: compare checksums once more when blocks are copied out.
    share_after_reset: go on after vLLM's reset of external caches, which says that weights may have changed.
    """

    agent: str
    weights: str = ""
    model: str = ""
    lookup_ms: float = 5.0
    load_s: float = 0.8
    store_s: float = 2.0
    prefill_tokens_per_s: float = 0.0
    max_flight_bytes: int = 2 << 30
    require_salt: bool = False
    check: bool = False
    share_after_reset: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Self:
        """From kv_connector_extra_config. InvalidInput says everything that is wrong with it."""
        table = extra.get(TABLE)
        if not isinstance(table, Mapping):
            raise InvalidInput(
                f'kv_connector_extra_config has no table "{TABLE}": '
                f'add "{TABLE}": {{"agent": "unix:/dev/shm/kvdir-NODE.sock"}}, the address for engines that the agent prints'
            )
        fields = {field.name: field for field in dataclasses.fields(cls)}
        faults = [f"{name}: unknown; known are {', '.join(fields)}" for name in sorted(set(table) - set(fields))]
        if not table.get("agent"):
            faults.append("agent: required, the engine address that this node's agent prints, unix:/dev/shm/kvdir-NODE.sock")
        faults += [
            f"{name}: must be {_WORDS[str(fields[name].type)]}, is {value!r}"
            for name, value in table.items()
            if name in fields and not _fits(value, str(fields[name].type))
        ]
        if faults:
            raise InvalidInput(f'"{TABLE}" in kv_connector_extra_config: ' + "; ".join(faults))
        return cls(**table)


_WORDS = {"str": "text", "float": "a number, not negative", "int": "a whole number, not negative", "bool": "true or false"}


def _fits(value: object, kind: str) -> bool:
    match kind:
        case "str":
            return isinstance(value, str)
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool) and value >= 0
        case _:
            return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
