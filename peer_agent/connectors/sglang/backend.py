"""KvdirHiCache: what SGLang's HiCache controllers call. Thin: which pool, which pages, which policy; the rest is stored.py's.

Contract: `sglang.srt.mem_cache.hicache_storage.HiCacheStorage` of SGLang 0.5.23, loaded by the `dynamic` backend of its
factory. v0 (`get`, `set`, `batch_get`, `batch_set`) moves flat pages of the KV pool; v1 (`batch_*_v1`, switched on by
interface_v1 in the extra config) its pages in place; v2 (`batch_*_v2`) pages of every registered pool.

Rules: configuration that could share wrong bytes raises when pools are registered, which fails the attach with words; after
that nothing raises, and whatever does not work is a page that is not there. `clear` deletes nothing: see its docstring.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from peer_agent.connectors.sglang.hits import BLOCK_GROUPS, PoolHits, leading, usable
from peer_agent.connectors.sglang.identity import KV, pool_namespace
from peer_agent.connectors.sglang.pages import pages_of
from peer_agent.connectors.sglang.settings import read_settings
from peer_agent.connectors.sglang.stored import Figures, StoredPool

logger = logging.getLogger(__name__)


class KvdirHiCache(HiCacheStorage):
    """One rank's storage backend. storage_config: SGLang's HiCacheStorageConfig. options: what its factory passes, unused."""

    def __init__(self, storage_config: Any, options: Any = None) -> None:
        """Raises ConfigError with everything that is wrong in the extra config."""
        self._config = storage_config
        self._settings = read_settings(storage_config.extra_config)
        self._in_place = bool((storage_config.extra_config or {}).get("interface_v1", 0))
        self._pools: dict[str, StoredPool] = {}
        self._page_tokens = 0
        self._logical = False

    # pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._page_tokens = int(mem_pool_host.page_size)
        # A logical pool has indices and no bytes: its side pools have them. Not told by its kv_buffer, which is None for pools
        # that keep K alone as well: whose pages, taken for logical, would count as loaded without a byte.
        self._logical = getattr(mem_pool_host, "size_per_token", None) == 0
        if not self._logical:
            self._add(KV, mem_pool_host, runs=self._in_place)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != KV:  # known already, by register_mem_pool_host
            self._add(name, host_pool, runs=True)

    def _add(self, name: str, pool: Any, *, runs: bool) -> None:
        pages = pages_of(pool, runs=runs)
        namespace = pool_namespace(
            name, pool, page_bytes=pages.page_bytes, page_tokens=self._page_tokens, form=pages.form, config=self._config,
            settings=self._settings,
        )  # fmt: skip
        known = self._pools.pop(name, None)
        if known is not None:
            known.close()
        engine = f"sglang-{name}-{namespace.parallel}"
        waited_for = all(other.engine.attached for other in self._pools.values())
        self._pools[name] = StoredPool.open(name, namespace, pages, self._settings, engine=engine, wait=waited_for)
        logger.info("kvdir: pool %s is namespace %s, pages of %d bytes", name, namespace.short, pages.page_bytes)

    # v0: flat pages of the KV pool

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        pool = self._pools.get(KV)
        if pool is None or not target_locations or any(item is None for item in target_locations):
            return [None] * len(keys)
        got = pool.load_values(keys, target_locations)
        return [page if hit else None for page, hit in zip(target_locations, got, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        pool = self._pools.get(KV)
        pages = values if values is not None else target_locations
        if pool is None or not pages or any(item is None for item in pages):
            return False
        return all(pool.store_values(keys, pages))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        pool = self._pools.get(KV)
        return leading(pool.present(keys, prefix=True)) if pool is not None else 0

    # v1: the KV pool in place

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move(KV, keys, host_indices, storing=False)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move(KV, keys, host_indices, storing=True)

    # v2: every pool

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """kv_hit_pages: the longest restorable prefix. extra_pool_hit_pages: how far each pool reaches on its own."""
        kv_pages = len(keys) if self._logical else self.batch_exists(keys, extra_info)
        transfers = [transfer for transfer in pool_transfers or [] if str(transfer.name) != KV]
        if self._logical and not transfers:
            kv_pages = 0
        hits = [self._pool_hits(transfer, keys[:kv_pages]) for transfer in transfers] if kv_pages else []
        try:
            folded = usable(kv_pages, hits)
        except ValueError as error:  # of another release of SGLang: it recomputes
            logger.error("kvdir: %s", error)
            return PoolTransferResult(0, {}, [])
        reached = ({KV: kv_pages} if kv_pages else {}) | folded.reached
        return PoolTransferResult(folded.pages, reached, folded.restorable)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return {item.name: self._move(str(item.name), item.keys, item.host_indices, storing=False) for item in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return {item.name: self._move(str(item.name), item.keys, item.host_indices, storing=True) for item in transfers}

    # the rest

    def clear(self) -> None:
        """Deletes nothing, and says so: the agent's memory is not this server's alone, and pages of these weights stay right.

        Weights that were updated in place need another `weights`: detach the storage backend and attach it with the new one.
        """
        logger.warning(
            "kvdir: clear deletes nothing, since other servers use these pages too; they go as room is needed. After an update "
            "of the weights detach the storage backend and attach it with another `weights`, or old pages would be found"
        )

    def get_stats(self) -> None:
        """SGLang's own statistics of a backend: none. See `figures`."""

    def figures(self) -> dict[str, Figures]:
        """Per pool, since the start."""
        return {name: pool.figures for name, pool in self._pools.items()}

    def close(self) -> None:
        """Ends the sessions with the agent. Idempotent."""
        for pool in self._pools.values():
            pool.close()
        self._pools = {}

    # internals

    def _pool_hits(self, transfer: Any, keys: Sequence[str]) -> PoolHits:
        """A pool that is not registered has nothing."""
        name, policy = str(transfer.name), str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
        asked = transfer.keys if policy == BLOCK_GROUPS and transfer.keys else keys
        pool = self._pools.get(name)
        return PoolHits(
            name=name,
            policy=policy,
            present=pool.present(asked, prefix=False) if pool is not None else bytes(len(asked)),
            pages=len(transfer.keys or ()) or 1,
            block_pages=transfer.block_pages,
            group_pages=transfer.group_pages,
        )

    def _move(self, name: str, keys: list[str] | None, host_indices: Any, *, storing: bool) -> list[bool]:
        keys = keys or []
        if name == KV and self._logical:
            return [True] * len(keys)  # there are no bytes to move
        pool = self._pools.get(name)
        slots = host_indices.tolist() if host_indices is not None else []
        page_size = int(getattr(self._host_pool(name), "page_size", 0) or 1)
        if pool is None or len(slots) != len(keys) * page_size:
            logger.error(
                "kvdir: pool %s %s; %d slots for %d pages of %d", name, "is known" if pool else "was never registered",
                len(slots), len(keys), page_size,
            )  # fmt: skip
            return [False] * len(keys)
        starts = slots[::page_size]
        return pool.store(keys, starts) if storing else pool.load(keys, starts)

    def _host_pool(self, name: str) -> Any:
        return self.mem_pool_host if name == KV else getattr(self, "registered_pools", {}).get(name)
