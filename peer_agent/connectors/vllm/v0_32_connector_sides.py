"""The two sides of KvdirConnector for vLLM 0.32: vLLM's objects in, plain values to the two halves, and back.

Rules of the two halves: connector_scheduler.py, connector_worker.py. Here is what they need of vLLM: requests, the block pool,
pages, and the sessions with the agent.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from peer_agent.connectors.vllm.connector_lookup import Lookups
from peer_agent.connectors.vllm.connector_scheduler import Options, SchedulerHalf
from peer_agent.connectors.vllm.connector_values import CacheGroup, SaveJob, StepPlan, StepReport
from peer_agent.connectors.vllm.connector_worker import Group, WorkerHalf
from peer_agent.connectors.vllm.pages import group_pool
from peer_agent.connectors.vllm.settings import Settings
from peer_agent.connectors.vllm.v0_32_connector_stats import KvdirStats
from peer_agent.connectors.vllm.v0_32_pages import device_of, group_namespaces, probe, ready_event, split_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from peer_agent.connectors.vllm.v0_32_connector import KvdirConnector

log = logging.getLogger("vllm.kvdir")

HELD_SHARE = 4
"""At most one block in so many is held for saving."""

LOAD_THREADS = 4


@dataclass
class KvdirMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step."""

    plan: StepPlan


@dataclass
class KvdirWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, when something ended."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvdirWorkerMetadata:
        assert isinstance(other, KvdirWorkerMetadata)
        return KvdirWorkerMetadata(self.report.add(other.report))


class SchedulerSide:
    """What the scheduler's connector has besides its half: requests, the block pool, sessions for lookups."""

    def __init__(self, connector: KvdirConnector) -> None:
        config, settings = connector._kv_transfer_config, connector._settings
        if config.is_kv_consumer and config.kv_load_failure_policy != "recompute":
            log.warning(
                'kvdir: kv_load_failure_policy is "fail": a block that does not arrive ends its request with an error. '
                'Set "kv_load_failure_policy": "recompute"'
            )
        self._require_salt = settings.require_salt
        self.requests: dict[str, Request] = {}
        self.pool: BlockPool | None = None
        self.totals: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(connector._kv_cache_config, connector._vllm_config)
        engines = []
        for group in connector._groups:
            hashed = probe(connector._vllm_config, hash_tokens=hash_tokens, block_tokens=group.block_tokens)
            engines.append([connector.engine(namespace, probe=hashed) for namespace in group.namespaces])
        self._lookups = Lookups(engines, deadline_s=settings.lookup_ms / 1000)
        self.half = SchedulerHalf(
            connector._groups,
            self._lookups,
            block_tokens=block_tokens,
            hold=self._hold,
            release=self._release,
            clock_s=time.monotonic,
            options=Options(
                loads=config.is_kv_consumer,
                saves=config.is_kv_producer,
                workers=connector._vllm_config.parallel_config.world_size,
                held_most=max(1, connector._kv_cache_config.num_blocks // HELD_SHARE),
                twin_wait_s=settings.load_s,
            ),
        )

    def close(self) -> None:
        self._lookups.close()

    def matched(self, request: Request, computed: int) -> int | None:
        if request.skip_reading_prefix_cache or not self._shareable(request):
            return 0
        return self.half.matched(request.request_id, request.block_hashes, tokens=request.num_tokens, computed=computed)

    def saves(self, output: SchedulerOutput) -> list[SaveJob]:
        made = []
        block_state = output.kv_connector_block_state
        for request_id, computed in _scheduled(output):
            request = self.requests.get(request_id)
            if request is None or not self._shareable(request):
                continue
            job = self.half.save(
                request_id,
                request.block_hashes,
                partial(block_state.resolve_block_ids, request_id),
                computed_tokens=computed + output.num_scheduled_tokens[request_id],
            )
            if job is not None:
                made.append(job)
        return made

    def ended(self, output: KVConnectorOutput) -> None:
        meta = output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, KvdirWorkerMetadata) else None
        self.half.ended(report, loaded=tuple(output.finished_recving or ()))
        if report is not None:
            self._counts.update(report.counts)
            self.totals.update(report.counts)

    def take_stats(self) -> KvdirStats | None:
        taken, self._counts = self._counts, Counter()
        return KvdirStats(data=dict(taken)) if taken else None

    def _shareable(self, request: Request) -> bool:
        """A LoRA is in vLLM's hashes by name and path only, which says nothing about its weights: such requests stay here."""
        return request.lora_request is None and (bool(request.cache_salt) or not self._require_salt)

    def frees_soon(self) -> bool:
        pool = self.pool
        return pool is not None and any(pool.blocks[block_id].ref_cnt == 1 for block_id in self.half.just_held())

    def _hold(self, block_ids: Sequence[int]) -> None:
        assert self.pool is not None
        self.pool.touch([self.pool.blocks[block_id] for block_id in block_ids])

    def _release(self, block_ids: Sequence[int]) -> None:
        assert self.pool is not None
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in reversed(block_ids)])


class WorkerSide:
    """What a worker's connector has besides its half: the sessions that move blocks, made once the pages are known."""

    def __init__(self, connector: KvdirConnector) -> None:
        self._connector = connector
        self._half: WorkerHalf | None = None
        self._device: Any = None
        self._bad_blocks: set[int] = set()

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        connector = self._connector
        self._device = device_of(caches)
        split = split_of(connector._vllm_config, connector._kv_cache_config)
        groups = []
        for group, spec in zip(connector._groups, connector._kv_cache_config.kv_cache_groups, strict=True):
            mine = split.part if len(group.namespaces) > 1 else 0  # MLA is the same on all ranks: the first one stores it
            namespace = group.namespaces[mine]
            pool = group_pool(
                self._device,
                caches,
                spec.layer_names,
                blocks=connector._kv_cache_config.num_blocks,
                block_bytes=namespace.block_bytes,
            )
            groups.append(
                Group(connector.engine(namespace, device=self._device), pool, saves=split.saves and mine == split.part)
            )
        settings = connector._settings
        self._half = WorkerHalf(groups, load_s=settings.load_s, save_s=settings.store_s, threads=LOAD_THREADS)

    def close(self) -> None:
        if self._half is not None:
            self._half.close()

    def start_loads(self, plan: StepPlan) -> None:
        if plan.loads and self._half is not None:
            self._half.start_loads(plan, ready=ready_event(self._device))

    def start_saves(self, plan: StepPlan, *, filled: bool) -> None:
        if plan.saves and self._half is not None:
            if filled:
                self._half.start_saves(plan, ready=ready_event(self._device))
            else:
                self._half.drop_saves(plan)
        if plan.idle and self._half is not None:
            self._half.await_news()

    def results(self) -> KVConnectorTransferResults:
        if self._half is None:
            return KVConnectorTransferResults()
        results = self._half.results()
        self._bad_blocks |= results.bad_blocks
        return KVConnectorTransferResults(finished_recving=results.loaded, failed_recving=results.failed)

    def take_bad_blocks(self) -> set[int]:
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken

    def report(self) -> StepReport:
        return StepReport() if self._half is None else self._half.report()


def cache_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> tuple[CacheGroup, ...]:
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    namespaces = group_namespaces(vllm_config, kv_cache_config, settings)
    return tuple(
        CacheGroup(
            state=parts[0].groups[number],
            namespaces=parts,
            block_tokens=group.kv_cache_spec.block_size,
            hashes_per_block=group.kv_cache_spec.block_size // hash_tokens,
        )
        for number, (group, parts) in enumerate(zip(kv_cache_config.kv_cache_groups, namespaces, strict=True))
    )


def _scheduled(output: SchedulerOutput) -> list[tuple[str, int]]:
    """(request, tokens computed before this step) of every request in this step."""
    new = [(request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    return new + list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
