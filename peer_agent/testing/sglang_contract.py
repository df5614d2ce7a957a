"""The part of SGLang that a HiCache storage backend meets: the real one, or a copy of its signatures where it is not there.

The copy is of `sglang/srt/mem_cache/hicache_storage.py`, SGLang 0.5.23, in our own words; tests/sglang compares it with the
real module. That is imported without the packages around it, which want CUDA: only torch is needed.
"""

from __future__ import annotations

import abc
import enum
import importlib
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "0.5.23"
SITE = "KVDIR_SGLANG_SITE"
"""Environment variable: where SGLang was installed without its dependencies (tests/sglang/install.sh)."""

MODULE = "sglang.srt.mem_cache.hicache_storage"
_PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage")


@dataclass
class HiCacheStorageConfig:
    """Which rank of what a backend is for. extra_config: what the operator gave."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolName(enum.StrEnum):
    """Those that the tests use."""

    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"


class PoolHitPolicy(enum.StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    """Pages of one pool: slots in host memory, or on the device, and their keys."""

    name: Any
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: Any = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: Any = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class HiCacheStorage(abc.ABC):
    """What a backend must and may have."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[Any, Any] = {}
        self.registered_pools[host_pool_name] = host_pool

    def on_host_pools_registered(self) -> None:
        return None

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        return None

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        return None

    @abc.abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abc.abstractmethod
    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abc.abstractmethod
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...

    @abc.abstractmethod
    def batch_set(self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool: ...

    @abc.abstractmethod
    def exists(self, key: str) -> bool: ...

    def batch_exists(self, keys: Any, extra_info: Any = None) -> int:
        return next((at for at, key in enumerate(keys) if not self.exists(key)), len(keys))

    def clear(self) -> Any:
        return None

    def get_stats(self) -> Any:
        return None


def use() -> types.ModuleType:
    """What `import sglang.srt.mem_cache.hicache_storage` means from now on, where it is not loaded already: the real module if
    KVDIR_SGLANG_SITE names its folder, else this copy.
    """
    if MODULE not in sys.modules:
        site = os.environ.get(SITE)
        for name in _PACKAGES:
            package = types.ModuleType(name)
            package.__path__ = [str(Path(site).joinpath(*name.split(".")))] if site else []
            sys.modules[name] = package
        if not site:
            sys.modules[MODULE] = sys.modules[__name__]
    return importlib.import_module(MODULE)
