"""`KvdirConnector` for vLLM 0.32: vLLM's interface, each call handed to the side that it is for.

    --kv-transfer-config '{"kv_connector": "KvdirConnector", "kv_connector_module_path": "peer_agent.connectors.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvdir": {"agent": "unix:/dev/shm/kvdir-NODE.sock"}}}'

vLLM makes one object in the scheduler and one in each worker; they meet only in the metadata of steps. What each of them does:
v0_32_connector_sides.py. What this version of the connector does not share correctly it refuses at start, in words
(v0_32_pages.py). Source of the contract: base.py of vllm/distributed/kv_transfer/kv_connector/v1, and the scheduler.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvdir.errors import InvalidInput, KvdirError
from kvdir.namespace import Namespace
from peer_agent.client.engine import Engine, connect
from peer_agent.connectors.vllm.connector_scheduler import SchedulerHalf
from peer_agent.connectors.vllm.connector_values import StepPlan
from peer_agent.connectors.vllm.settings import Settings
from peer_agent.connectors.vllm.v0_32_connector_sides import (
    KvdirMetadata,
    KvdirWorkerMetadata,
    SchedulerSide,
    WorkerSide,
    cache_groups,
)
from peer_agent.connectors.vllm.v0_32_connector_stats import KvdirPromMetrics, KvdirStats
from peer_agent.connectors.vllm.v0_32_pages import connector_faults

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

log = logging.getLogger("vllm.kvdir")

ATTACH_S = 2.0
"""How long the start of an engine waits for its agent, all sessions together, to say in words what is wrong."""


class KvdirConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module docstring."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        if faults := connector_faults(vllm_config, kv_cache_config):
            raise InvalidInput("KvdirConnector cannot share this configuration: " + "; ".join(faults))
        self._groups = cache_groups(vllm_config, kv_cache_config, self._settings)
        self._engines: list[Engine] = []
        self._attach_until_s = 0.0
        self._told: set[str] = set()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(self)
        else:
            self._worker = WorkerSide(self)

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
        self._attach_until_s = self._attach_until_s or time.monotonic() + ATTACH_S
        self._engines.append(made)
        try:
            made.attach(timeout_s=max(0.0, self._attach_until_s - time.monotonic()))
        except KvdirError as error:
            if str(error) not in self._told:
                log.warning("kvdir: nothing is shared until this is mended: %s", error)
            self._told.add(str(error))
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
        """vLLM calls this after a step that raised, too (_get_kv_connector_output): its pages hold anything then."""
        assert self._worker is not None
        self._worker.start_saves(self._plan(), filled=sys.exception() is None)

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
        assert self._scheduler is not None
        return self._scheduler.frees_soon()

    def reset_cache(self) -> bool | None:
        """After a change of the weights the namespace would be a lie: sharing ends until the server is started again."""
        if not self._settings.share_after_reset:
            log.warning("kvdir: the cache was reset, so the weights may have changed: nothing is shared until a restart")
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
