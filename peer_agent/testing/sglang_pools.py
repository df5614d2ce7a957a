"""Host pools as SGLang's HiCache has them, on plain memory: what a storage backend uses of them, and no more.

After `sglang/srt/mem_cache/pool_host/{mha,mla,mamba}.py`, SGLang 0.5.23. Pages and slots are tensors where torch is loaded,
else arrays.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from peer_agent.testing import sglang_contract

Array = np.ndarray[Any, Any]


def tensor(array: Array) -> Any:
    torch: Any = sys.modules.get("torch")
    return torch.from_numpy(array) if torch is not None else array


def slots(pool: Any, pages: Sequence[int]) -> Any:
    """Token slots of these pages, one after the other, as an index tensor."""
    size = pool.page_size
    return tensor(np.concatenate([np.arange(page * size, (page + 1) * size) for page in pages]))


def page_keys(count: int, *, root: str = "") -> list[str]:
    """A chain of page hashes in hexadecimal, as SGLang makes keys."""
    out: list[str] = []
    for number in range(count):
        out.append(hashlib.sha256(f"{out[-1] if out else root}/{number}".encode()).hexdigest())
    return out


def storage_config(extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    """HiCacheStorageConfig of one rank; answers may be slow, since tests share their machine."""
    settings = {
        "agent": "unix:/nowhere", "weights": "rev-1", "interface_v1": 1, "exists_deadline_s": 2.0, "deadline_s": 5.0,
    }  # fmt: skip
    values: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "tiny",
    }  # fmt: skip
    return sglang_contract.use().HiCacheStorageConfig(**(values | fields), extra_config=settings | (extra or {}))


class FakeHostPool:
    """K and V of `layers` layers. layout: page_first (two runs a page) or layer_first (two runs a layer of a page)."""

    def __init__(
        self,
        *,
        layout: str = "page_first",
        pages: int = 32,
        page_size: int = 4,
        layers: int = 3,
        heads: int = 2,
        head_dim: int = 8,
        dtype: str = "float16",
    ) -> None:
        self.layout, self.page_size, self.layer_num = layout, page_size, layers
        self.head_num, self.head_dim, self.dtype = heads, head_dim, dtype
        self.size_per_token = self._components * layers * heads * head_dim * 2
        slots = pages * page_size
        lead = (layers, slots) if layout == "layer_first" else (slots, layers)
        self.kv_buffer: Any = np.zeros((self._components, *lead, heads, head_dim), np.float16)

    _components = 2

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        slots = indices.tolist()
        runs = [run for at in range(0, len(slots), self.page_size) for run in self._runs(slots[at])]
        return [run.ctypes.data for run in runs], [run.nbytes for run in runs]

    def _runs(self, start: int) -> list[Array]:
        end = start + self.page_size
        if self.layout == "layer_first":
            return [part[layer, start:end] for layer in range(self.layer_num) for part in self.kv_buffer]
        return [part[start:end] for part in self.kv_buffer]

    def _page(self, start: int) -> Array:
        end = start + self.page_size
        page: Array = self.kv_buffer[:, :, start:end] if self.layout == "layer_first" else self.kv_buffer[:, start:end]
        return page

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        page = self._page(int(index))
        return tensor(page.flatten() if flat else page)

    def get_dummy_flat_data_page(self) -> Any:
        return tensor(np.zeros(self._page(0).size, np.float16))

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        page = self._page(int(index))
        page[...] = np.asarray(data_page).reshape(page.shape)

    # for tests

    def fill(self, starts: Sequence[int], *, seed: int) -> None:
        """Random bytes in these pages."""
        random = np.random.default_rng(seed)
        for start in starts:
            page = self._page(start)
            page[...] = random.integers(0, 1 << 16, page.shape, np.uint16).view(np.float16)

    def put(self, start: int, data: bytes) -> None:
        page = self._page(start)
        page[...] = np.frombuffer(data, np.float16).reshape(page.shape)

    def page_bytes(self, start: int) -> bytes:
        return self._page(start).tobytes()


class FakeLatentPool(FakeHostPool):
    """MLA: one latent tensor, so that a page is one run."""

    _components = 1
    kv_lora_rank = 8


class FakeKeyPool(FakeLatentPool):
    """K alone, in `k_buffer`: as in SGLang, its kv_buffer is None."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.k_buffer, self.kv_buffer = self.kv_buffer[0], None

    def _runs(self, start: int) -> list[Array]:
        return [self.k_buffer[start : start + self.page_size]]

    def _page(self, start: int) -> Array:
        page: Array = self.k_buffer[start : start + self.page_size]
        return page


class FakeStatePool(FakeHostPool):
    """Mamba: a page is the state at one boundary, in one slot; it cannot be flattened."""

    def __init__(self, *, pages: int = 32, **options: Any) -> None:
        super().__init__(pages=pages, page_size=1, **options)

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        raise NotImplementedError

    def get_dummy_flat_data_page(self) -> Any:
        raise NotImplementedError


class FakeLogicalPool:
    """Indices without bytes: the side pools of some models hold everything."""

    kv_buffer = None
    size_per_token = 0
    layout = "page_first"
    dtype = "float16"

    def __init__(self, *, page_size: int = 4) -> None:
        self.page_size = page_size
