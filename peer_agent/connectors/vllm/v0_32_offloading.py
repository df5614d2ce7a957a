"""vLLM 0.32: KvdirOffloadingConnector, vLLM's OffloadingConnector with KvdirTier below its host pool.

Only a connector sees vLLM's whole configuration; a tier sees what `OffloadingConfig` has, which says neither which weights
these are nor how blocks are hashed (docs/adr/0019). So the identity is made here and handed to the tier, and so is what
concerns single requests: the weights of a LoRA, and whether a request may be shared at all.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, iter_layer_specs
from vllm.v1.request import Request

from peer_agent.connectors.vllm.adapters import Adapters
from peer_agent.connectors.vllm.identity import identify
from peer_agent.connectors.vllm.settings import Settings
from peer_agent.connectors.vllm.v0_32_tier import KvdirTier

log = logging.getLogger("vllm.kvdir")

MODULE = "peer_agent.connectors.vllm"


class KvdirOffloadingConnector(OffloadingConnector):
    """Settings: the table "kvdir" of kv_connector_extra_config; beside it, all that vLLM's tiered offloading knows there."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises InvalidInput for settings that are wrong, and for an engine whose blocks nobody could share safely."""
        self._settings = Settings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._adapters = Adapters()
        self._told_of_salt = False
        self._tier: KvdirTier | None = None
        if role != KVConnectorRole.SCHEDULER:
            super().__init__(with_tier(vllm_config), role, kv_cache_config)
            return
        groups = {number: kv_cache_config.kv_cache_groups[number] for number in get_offloading_group_ids(kv_cache_config)}
        identity = identify(vllm_config, groups, self._settings, platform=platform(vllm_config, groups), environment=os.environ)
        tier = {"settings": self._settings, "identity": identity, "rows": row_form(list(groups.values()))}
        super().__init__(with_tier(vllm_config, **tier), role, kv_cache_config)
        self._tier = next(tier for tier in self.scheduler.manager.secondary_tiers if isinstance(tier, KvdirTier))

    def on_new_request(self, request: Request) -> None:
        assert self._tier is not None
        excluded, adapter = self._lacks_salt(request), b""
        if request.lora_request is not None:
            lora = request.lora_request
            adapter = self._adapters.digest(name=lora.lora_name, number=lora.lora_int_id, path=lora.lora_path)
            excluded |= not adapter
        if excluded or adapter:
            self._tier.describe(request.request_id, adapter=adapter, excluded=excluded)
        super().on_new_request(request)

    def _lacks_salt(self, request: Request) -> bool:
        if not self._settings.require_salt or request.cache_salt:
            return False
        if not self._told_of_salt:
            self._told_of_salt = True
            log.warning(
                "kvdir: request %s and others are not shared, because they carry no cache_salt and require_salt is set: send "
                "cache_salt with every request, the same for those that may share",
                request.request_id,
            )
        return True

    def reset_cache(self) -> bool | None:
        """What vLLM does after an update of the weights, which it tells in no other way: old blocks may be wrong now."""
        done: bool | None = super().reset_cache()
        if not self._settings.share_after_reset:
            assert self._tier is not None
            self._tier.stop_sharing()
            log.warning(
                "kvdir: nothing is shared any more, because external caches were reset and the weights may have changed: "
                "restart the engine, or set share_after_reset if its weights never change"
            )
        return done

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        return super().build_prom_metrics(with_tier(vllm_config), metric_types, labelnames, per_engine_labelvalues)


def with_tier(vllm_config: VllmConfig, **tier: Any) -> VllmConfig:
    """A configuration with KvdirTier as the first secondary tier, and KvdirTieringSpec unless another spec was named."""
    made, transfer = copy.copy(vllm_config), copy.copy(vllm_config.kv_transfer_config)
    extra = dict(transfer.kv_connector_extra_config)
    extra.setdefault("spec_name", "KvdirTieringSpec")
    extra.setdefault("spec_module_path", MODULE)
    ours = {"type": "KvdirTier", "module_path": MODULE, **tier}
    extra["secondary_tiers"] = [ours, *extra.get("secondary_tiers", ())]
    transfer.kv_connector_extra_config = extra
    made.kv_transfer_config = transfer
    return made


def platform(vllm_config: VllmConfig, groups: Mapping[int, Any]) -> str:
    """What computes the KV and decides how it lies in a page. vLLM's CPU attention packs keys for the instructions that the
    processor has; elsewhere each backend has a form of its own, and vLLM picks one by what the device can do unless told.
    """
    name = str(current_platform.device_name)  # device_type is "cuda" for ROCm, too
    if name != "cpu":
        return "-".join([name, *_attention(vllm_config.attention_config)])
    packings = {
        _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
        for group in groups.values()
        for spec in iter_layer_specs(group.kv_cache_spec)
        if isinstance(spec, AttentionSpec)
    }
    return "-".join([name, *sorted(packings)])


def _attention(config: Any) -> list[str]:
    kinds = [f"{kind}={backend.name}" for kind, backend in sorted(config.backend_per_kind.items())]
    if config.backend is not None:
        return [config.backend.name, *kinds]
    capability = current_platform.get_device_capability()
    return [f"auto{capability.to_int() if capability is not None else ''}", *kinds]


def row_form(groups: Sequence[Any]) -> str:
    """What decides where the bytes of a layer lie in a row: the layers of all groups in order, and their page sizes."""
    return ";".join(f"{group.kv_cache_spec.page_size_bytes}:{','.join(group.layer_names)}" for group in groups)
