"""Names that engines give to places and state groups, and what they are here. Unknown ones are nothing: they fail closed.

An unknown medium taken for GPU memory makes routers send requests to a node that would have to read a disk; one that is left
out costs a hit. Sources: vLLM 0.32 (`GPU`, `CPU`, `STORAGE` with a locality), SGLang 0.5.23 (`GPU`, `CPU_PINNED`, `DISK`,
`EXTERNAL`; `CPU_TIER1` and `CPU_TIER2` before), Dynamo's router (`device`, `host_pinned`, `disk`, `external`), RFC Mooncake
1527 (`gpu`, `cpu`, `disk`). Values only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from kvdir.location import Tier
from kvdir.namespace import StateKind

_TIERS: Mapping[str, Tier] = {
    "gpu": Tier.GPU, "device": Tier.GPU, "hbm": Tier.GPU, "npu": Tier.GPU,
    "cpu": Tier.CPU, "cpu_pinned": Tier.CPU, "cpu_tier1": Tier.CPU, "cpu_tier2": Tier.CPU, "host_pinned": Tier.CPU,
    "host": Tier.CPU, "dram": Tier.CPU,
    "disk": Tier.DISK, "ssd": Tier.DISK, "nvme": Tier.DISK,
    "external": Tier.REMOTE, "remote": Tier.REMOTE, "shared_storage": Tier.REMOTE,
}  # fmt: skip

_KINDS: Mapping[str, StateKind] = {
    "full_attention": StateKind.FULL,
    "sink_full_attention": StateKind.FULL,
    "mla_attention": StateKind.MLA,
    "sliding_window": StateKind.SLIDING_WINDOW,
    "sliding_window_mla": StateKind.SLIDING_WINDOW,
    "chunked_local_attention": StateKind.SLIDING_WINDOW,
    "mamba": StateKind.RECURRENT,
}


@functools.lru_cache(maxsize=256)
def tier_of(medium: str | None, locality: str | None = None) -> Tier | None:
    """The tier of a medium; None if unknown. No medium is GPU memory: versions that do not say know nothing else.

    locality: vLLM's LOCAL or REMOTE, relative to the engine. What is elsewhere is REMOTE, whatever it lies on; `STORAGE`
    without a locality may be either, and is taken for the slower one.
    """
    if locality is not None and locality.upper() == "REMOTE":
        return Tier.REMOTE
    if medium is None:
        return Tier.GPU
    name = medium.lower()
    if name == "storage":
        return Tier.DISK if locality is not None and locality.upper() == "LOCAL" else Tier.REMOTE
    return _TIERS.get(name)


def kind_of(name: str) -> StateKind | None:
    """The kind of a group by the engine's name for it; None if its restore rule is not known (cross attention, encoders)."""
    return _KINDS.get(name)
