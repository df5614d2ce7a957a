"""vLLM 0.32: KvdirTieringSpec, vLLM's tiered offloading wherever there is vLLM, the CPU platform included."""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvdir.errors import InvalidInput
from peer_agent.connectors.vllm.v0_32_worker import MemcpyWorker


class KvdirTieringSpec(TieringOffloadingSpec):
    """vLLM's own, but that it runs on the CPU platform, too."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        worker: OffloadingWorker | None = self._worker
        if worker is None:
            if self.config.canonical_layout:
                raise InvalidInput("canonical_layout is for GPUs: remove it from kv_connector_extra_config on CPU")
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            worker = self._worker = MemcpyWorker(kv_caches, region, blocks_per_chunk=self.blocks_per_chunk)
        return worker
