"""vLLM 0.32 on CPU: its offload worker, whose copies are memcpy, since vLLM's own wants CUDA or XPU.

Rules: pages go to the same places of a row as vLLM's own worker puts them (v1/kv_offload/cpu/gpu_worker.py: the tensors side by
side, of each the blocks of a chunk in order). Copies happen in the calls, on the thread that runs the model: on this platform
"device" and host are one memory, and nothing runs beside them that they could wait for.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


class MemcpyWorker(OffloadingWorker):
    """Owns the region; `shutdown` gives it back."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion, *, blocks_per_chunk: int) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = caches.group_data_refs
        self._pages = [item.tensor.view(torch.int8) for item in caches.tensors]
        self._rows = [_by_block(region, item.page_size_bytes, blocks_per_chunk) for item in caches.tensors]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way outside the calls."""

    def shutdown(self) -> None:
        self._rows.clear()
        self._pages.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, paged: GPULoadStoreSpec, pooled: CPULoadStoreSpec, *, to_host: bool) -> bool:
        began_s = time.monotonic()
        copied_bytes = block_at = chunk_at = 0
        chunks = np.asarray(pooled.chunk_ids)
        for refs, size, first in zip(self._refs, paged.group_sizes, paged.block_indices, strict=True):
            if not size:
                continue
            blocks = torch.from_numpy(np.asarray(paged.block_ids[block_at : block_at + size], np.int64))
            place = first % self._blocks_per_chunk + np.arange(size)
            rows = torch.from_numpy(chunks[chunk_at + place // self._blocks_per_chunk].astype(np.int64))
            parts = torch.from_numpy(place % self._blocks_per_chunk)
            for ref in refs:
                pages, pool, used = self._pages[ref.tensor_idx], self._rows[ref.tensor_idx], ref.page_size_bytes
                if to_host:
                    pool[rows, parts, :used] = pages[blocks, :used]
                else:
                    pages[blocks, :used] = pool[rows, parts, :used]
                copied_bytes += size * used
            block_at += size
            chunk_at += int(place[-1]) // self._blocks_per_chunk + 1
        took_s = time.monotonic() - began_s
        self._ended.append(TransferResult(job_id=job_id, success=True, transfer_size=copied_bytes, transfer_time=took_s))
        return True


def _by_block(region: SharedOffloadRegion, page_bytes: int, blocks_per_chunk: int) -> torch.Tensor:
    """(rows, blocks of a chunk, page bytes) of one tensor's share of the region."""
    view: torch.Tensor = region.create_next_worker_view(page_bytes * blocks_per_chunk)
    return view.unflatten(1, (blocks_per_chunk, page_bytes))
