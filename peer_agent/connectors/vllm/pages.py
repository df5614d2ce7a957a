"""An engine's paged KV cache as slots of a pool: slot = block id, one segment a layer, no bytes moved.

Rules: the pages of one block must each be one run of bytes (the layouts of vLLM that put layers and blocks outermost); what is
not is refused in words, never copied some other way. A page that several layers share is there once. The order is that of the
layers in their group, so it is the same on every engine of the model; the layout in the namespace names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kvdir.errors import InvalidInput
from peer_agent.memory.device import Device, DevicePool, Segment

if TYPE_CHECKING:
    import torch


def group_pool(
    device: Device, caches: Mapping[str, torch.Tensor], layers: Iterable[str], *, blocks: int, block_bytes: int
) -> DevicePool:
    """The pool of one KV cache group. caches: per layer a view (blocks or a multiple, ...). InvalidInput, and what to do.

    block_bytes: what a block has by its namespace; another sum would mean that the namespace describes other pages.
    """
    segments: dict[int, Segment] = {}
    owners = []
    for layer in layers:
        if layer not in caches:
            raise InvalidInput(f"no KV cache was registered for layer {layer}: is it one of this worker's?")
        segment = page_segment(caches[layer], blocks=blocks, where=f"the KV cache of {layer}")
        segments.setdefault(segment.address, segment)
        owners.append(caches[layer])
    pool = DevicePool(device, blocks, tuple(segments.values()), owner=tuple(owners))
    if pool.block_bytes != block_bytes:
        raise InvalidInput(
            f"a block has {pool.block_bytes} bytes in the engine's pages and {block_bytes} by its namespace "
            f"({len(segments)} pages): report this model and its configuration, it cannot be shared"
        )
    return pool


def page_segment(cache: torch.Tensor, *, blocks: int, where: str) -> Segment:
    """Where the pages of one layer are. cache: (blocks * k, ...), k kernel blocks a block, in any order of the inner axes."""
    kernel_blocks, remainder = divmod(cache.shape[0], blocks) if cache.dim() > 1 else (0, 1)
    if remainder or not kernel_blocks:
        raise InvalidInput(f"{where} has shape {tuple(cache.shape)}, not (a multiple of {blocks} blocks, ...)")
    page_bytes = cache[0].numel() * cache.element_size()
    stride_bytes = cache.stride(0) * cache.element_size()
    if not _one_run(cache[0].shape, cache[0].stride()) or stride_bytes < page_bytes:
        raise InvalidInput(
            f"{where} does not keep a block's bytes together (shape {tuple(cache.shape)}, strides {cache.stride()}): "
            "set VLLM_KV_CACHE_LAYOUT to one with layers and blocks outermost, such as LBHNC"
        )
    if kernel_blocks > 1 and stride_bytes != page_bytes:
        raise InvalidInput(
            f"{where} has {kernel_blocks} kernel blocks a block with gaps between them: set a smaller --block-size"
        )
    return Segment(cache.data_ptr(), stride_bytes * kernel_blocks, page_bytes * kernel_blocks)


def _one_run(shape: Iterable[int], strides: Iterable[int]) -> bool:
    """Whether elements fill one run of memory, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
