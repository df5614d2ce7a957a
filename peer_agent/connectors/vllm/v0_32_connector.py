"""`KvdirConnector` for vLLM 0.32: vLLM's objects in, plain values to the two halves, and back.

    --kv-transfer-config '{"kv_connector": "KvdirConnector", "kv_connector_module_path": "peer_agent.connectors.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvdir": {"agent": "unix:/dev/shm/kvdir-NODE.sock"}}}'

vLLM makes one object in the scheduler and one in each worker; they meet only in the metadata of steps. Rules of the two halves:
connector_scheduler.py, connector_worker.py. What this version of the connector does not share correctly it refuses at start, in
words (v0_32_pages.py). Source of the contract: base.py of vllm/distributed/kv_transfer/kv_connector/v1, and the scheduler.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from kvdir.errors import InvalidInput, KvdirError
from kvdir.namespace import Namespace
from peer_agent.client.engine import Engine, connect
from peer_agent.connectors.vllm.connector_lookup import Lookups
from peer_agent.connectors.vllm.connector_scheduler import Options, SchedulerHalf
from peer_agent.connectors.vllm.connector_values import COUNTERS, CacheGroup, SaveJob, StepPlan, StepReport
from peer_agent.connectors.vllm.connector_worker import Group, WorkerHalf
from peer_agent.connectors.vllm.pages import group_pool
from peer_agent.connectors.vllm.settings import Settings
from peer_agent.connectors.vllm.v0_32_pages import connector_faults, device_of, group_namespaces, probe, ready_event, split_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

HELD_SHARE = 4
"""At most one block in so many is held for saving."""

ATTACH_S = 2.0
"""How long the start of an engine waits for its agent, to say in words what is wrong."""

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


class KvdirConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module docstring."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        if faults := connector_faults(vllm_config, kv_cache_config):
            raise InvalidInput("KvdirConnector cannot share this configuration: " + "; ".join(faults))
        self._groups = _cache_groups(vllm_config, kv_cache_config, self._settings)
        self._engines: list[Engine] = []
        self._scheduler: _SchedulerSide | None = None
        self._worker: _WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = _SchedulerSide(self)
        else:
            self._worker = _WorkerSide(self)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what could not be saved is computed again

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return "LBHNC"  # one for all backends, so that they can share

    def engine(self, namespace: Namespace, *, device: Any = None, probe: bytes = b"") -> Engine:
        """A session with the agent. One that is not there, or serves other blocks, is told of once, and costs misses."""
        name = f"{self._kv_transfer_config.engine_id}:{self.role.name.lower()}"
        made = connect(
            self._settings.agent,
            namespace=namespace,
            engine=name,
            device=device,
            deadline_s=self._settings.load_s,
            check=self._settings.check,
            prefill_tokens_per_s=self._settings.prefill_tokens_per_s,
            probe=probe,
            timeout_s=0,
        )
        self._engines.append(made)
        try:
            made.attach(timeout_s=ATTACH_S)
        except KvdirError as error:
            logger.warning("kvdir: nothing is shared until this is mended: %s", error)
        return made

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        for engine in self._engines:
            engine.close()

    # workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps: a request is scheduled only once its blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are saved, behind the step."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.start_saves(self._plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        return self._worker.results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> KvdirWorkerMetadata | None:
        assert self._worker is not None
        report = self._worker.report()
        return KvdirWorkerMetadata(report) if report else None

    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvdirMetadata)
        return metadata.plan

    # scheduler

    @property
    def half(self) -> SchedulerHalf:
        """The scheduler half; for tests and figures."""
        assert self._scheduler is not None
        return self._scheduler.half

    @property
    def totals(self) -> Counter[str]:
        """COUNTERS of all workers since the start; for tests and figures."""
        assert self._scheduler is not None
        return self._scheduler.totals

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        assert self._scheduler is not None
        self._scheduler.pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler is not None
        self._scheduler.requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        found = self._scheduler.matched(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            ids = blocks.get_block_ids()
            self.half.allocated(request.request_id, request.block_hashes, ids, external_tokens=num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KvdirMetadata:
        assert self._scheduler is not None
        saves = self._scheduler.saves(scheduler_output)
        return KvdirMetadata(self.half.plan(saves, idle=not scheduler_output.total_num_scheduled_tokens))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        self._scheduler.ended(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Nothing to wait for: blocks that are still being saved are held one by one."""
        assert self._scheduler is not None
        self._scheduler.requests.pop(request.request_id, None)
        self.half.finished(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self.half.busy

    def has_pending_block_frees(self) -> bool:
        return self.half.frees_soon

    def reset_cache(self) -> bool | None:
        """After a change of the weights the namespace would be a lie: sharing ends until the server is started again."""
        if not self._settings.share_after_reset:
            logger.warning("kvdir: the cache was reset, so the weights may have changed: nothing is shared until a restart")
            self.half.stop()
        return True

    # figures

    def get_kv_connector_stats(self) -> KvdirStats | None:
        return self._scheduler.take_stats() if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvdirStats:
        return KvdirStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvdirPromMetrics:
        return KvdirPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class _SchedulerSide:
    """What the scheduler's connector has besides its half: requests, the block pool, sessions for lookups."""

    def __init__(self, connector: KvdirConnector) -> None:
        config, settings = connector._kv_transfer_config, connector._settings
        if config.is_kv_consumer and config.kv_load_failure_policy != "recompute":
            logger.warning(
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

    def _hold(self, block_ids: Sequence[int]) -> None:
        assert self.pool is not None
        self.pool.touch([self.pool.blocks[block_id] for block_id in block_ids])

    def _release(self, block_ids: Sequence[int]) -> None:
        assert self.pool is not None
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in reversed(block_ids)])


class _WorkerSide:
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

    def start_saves(self, plan: StepPlan) -> None:
        if plan.saves and self._half is not None:
            self._half.start_saves(plan, ready=ready_event(self._device))
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


@dataclass
class KvdirStats(KVConnectorStats):
    """Counters of connector_values.COUNTERS, since the last time."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return KvdirStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvdirPromMetrics(KVConnectorPromMetrics):
    """vllm:kvdir_*_total, one counter for each of connector_values.COUNTERS."""

    def __init__(self, vllm_config: VllmConfig, metric_types: dict[Any, Any], labelnames: list[str], values: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        self._counters = {
            name: self._counter_cls(name=f"vllm:kvdir_{name}", documentation=f"kvdir: {meaning}.", labelnames=labelnames)
            for name, meaning in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)


def _cache_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> tuple[CacheGroup, ...]:
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
