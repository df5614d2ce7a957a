"""KvdirHiCache under SGLang's own classes: its factory loads it, signatures are equal, its rule is ours."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import random
from pathlib import Path
from typing import Any

import pytest

from peer_agent.connectors.sglang.hits import PoolHits, leading, usable
from peer_agent.testing import sglang_contract
from peer_agent.testing.sglang_pools import FakeHostPool, FakeLogicalPool

pytestmark = pytest.mark.sglang

sglang = sglang_contract.use()
EXTRA = {
    "backend_name": "kvdir", "module_path": "peer_agent.connectors.sglang", "class_name": "KvdirHiCache",
    "agent": "unix:/nowhere", "weights": "rev-1", "attach_timeout_s": 0,
}  # fmt: skip


def config(extra: dict[str, Any] | None = None) -> Any:
    return sglang.HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "tiny", extra_config=EXTRA | (extra or {}))


def test_these_are_the_real_classes_when_the_site_is_given() -> None:
    assert sglang.__file__.endswith("sglang/srt/mem_cache/hicache_storage.py")
    assert sglang_contract.VERSION in Path(sglang.__file__).parents[3].name


def test_the_dynamic_backend_is_our_class_when_sglang_makes_it() -> None:
    factory = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
    backend = factory.create_backend("dynamic", config(), None)
    assert type(backend).__name__ == "KvdirHiCache"
    assert isinstance(backend, sglang.HiCacheStorage)
    assert backend.batch_exists(["00" * 32]) == 0
    backend.close()


def test_the_factory_tells_what_is_wrong_when_the_extra_config_is() -> None:
    factory = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
    with pytest.raises(Exception, match="weights: required"):
        factory.create_backend("dynamic", config({"weights": ""}), None)


def test_calls_go_through_when_sglang_wraps_the_backend_with_failures() -> None:
    """SGLang's own failure injector passes positional arguments on, and adds nothing that we lack."""
    from peer_agent.connectors.sglang import KvdirHiCache

    injector = sglang.HiCacheStorageFailureInjector(KvdirHiCache(config(), {}), 0.0, 0.0)
    assert injector.batch_exists(["00" * 32]) == 0
    assert injector.batch_get(["00" * 32], [None]) == [None]
    assert injector.batch_exists_v2(["00" * 32], [sglang.PoolTransfer(sglang.PoolName.MAMBA)]).kv_hit_pages == 0
    assert injector.batch_get_v2([sglang.PoolTransfer(sglang.PoolName.MAMBA, keys=["00" * 32])]) == {"mamba": [False]}
    assert injector.get_stats() is None
    injector.clear()
    injector.close()


@pytest.mark.parametrize("name", [name for name in vars(sglang_contract.HiCacheStorage) if not name.startswith("_")])
def test_signatures_are_equal_when_the_copy_the_backend_and_sglang_are_compared(name: str) -> None:
    from peer_agent.connectors.sglang import KvdirHiCache

    def shape(cls: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(getattr(cls, name)).parameters.values()
        return [(item.name, item.default) for item in parameters]

    assert shape(sglang_contract.HiCacheStorage) == shape(sglang.HiCacheStorage) == shape(KvdirHiCache)


def test_the_copy_lacks_no_method_when_it_is_compared_with_sglang() -> None:
    def public(cls: type) -> set[str]:
        return {name for name in vars(cls) if not name.startswith("_")}

    assert public(sglang_contract.HiCacheStorage) == public(sglang.HiCacheStorage)
    assert sglang.HiCacheStorage.__abstractmethods__ == sglang_contract.HiCacheStorage.__abstractmethods__


@pytest.mark.parametrize("name", ["HiCacheStorageConfig", "HiCacheStorageExtraInfo", "PoolTransfer", "PoolTransferResult"])
def test_records_have_the_same_fields_when_the_copy_is_compared_with_sglang(name: str) -> None:
    ours, theirs = (dataclasses.fields(getattr(module, name)) for module in (sglang_contract, sglang))
    assert [field.name for field in ours] == [field.name for field in theirs]


@pytest.mark.parametrize("name", ["PoolName", "PoolHitPolicy"])
def test_names_are_sglangs_when_the_copy_is_compared(name: str) -> None:
    theirs = {item.value for item in getattr(sglang, name)}
    ours = {item.value for item in getattr(sglang_contract, name)}
    assert ours == theirs if name == "PoolHitPolicy" else ours <= theirs


@pytest.mark.parametrize("seed", range(200))
def test_our_rule_is_that_of_sglangs_file_backend_when_pages_are_sparse(seed: int) -> None:
    dice = random.Random(seed)
    kv = [dice.random() < 0.9 for _ in range(8)]
    pools = [
        (dice.choice(["all_pages", "trailing_pages"]), [dice.random() < 0.7 for _ in range(8)], dice.randint(1, 5))
        for _ in range(dice.randint(0, 3))
    ]
    names = ["mamba", "swa", "indexer"]
    keys = [f"{number:064x}" for number in range(8)]
    there = {f"{key}.bin" for key, have in zip(keys, kv, strict=True) if have}
    transfers, hits = [], []
    kv_pages = leading(bytes(kv))
    for name, (policy, present, pages) in zip(names, pools, strict=False):
        there |= {f"{key}.{name}.bin" for key, have in zip(keys, present, strict=True) if have}
        transfers.append(
            sglang.PoolTransfer(sglang.PoolName(name), keys=keys[-pages:], hit_policy=sglang.PoolHitPolicy(policy))
        )
        hits.append(PoolHits(name=name, policy=policy, present=bytes(present[:kv_pages]), pages=pages))
    theirs = _file_backend(there).batch_exists_v2(keys, transfers)
    ours = usable(kv_pages, hits)
    assert (ours.pages, ours.restorable) == (theirs.kv_hit_pages, theirs.restorable_prefix_pages)
    reached = {name: pages for name, pages in theirs.extra_pool_hit_pages.items() if name != "kv"}
    assert reached.items() <= ours.reached.items(), "theirs leaves out pools once nothing is restorable; ours tells"


def _file_backend(there: set[str]) -> Any:
    """SGLang's HiCacheFile with these files, and no disk."""
    backend = object.__new__(sglang.HiCacheFile)
    backend._collect_existing_component_keys = lambda *_: there
    backend._get_component_key = lambda key, name=None: key if name is None else f"{key}.{name}"
    return backend


def _source_of(file: str, name: str) -> ast.ClassDef:
    """A class of SGLang's that cannot be imported without CUDA, as it is written."""
    assert sglang.__file__
    tree = ast.parse((Path(sglang.__file__).parent / file).read_text())
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


@pytest.mark.parametrize(
    ("file", "name"), [("pool_host/mha.py", "MHATokenToKVPoolHost"), ("pool_host/mla.py", "MLATokenToKVPoolHost")]
)
def test_host_pools_have_what_we_call_when_their_source_is_read(file: str, name: str) -> None:
    methods = {node.name: node for node in _source_of(file, name).body if isinstance(node, ast.FunctionDef)}
    for method in ("get_page_buffer_meta", "get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page"):
        theirs = [argument.arg for argument in methods[method].args.args]
        ours = list(inspect.signature(getattr(FakeHostPool, method)).parameters)
        assert theirs == ours, method


def test_a_logical_pool_is_told_by_its_size_when_its_source_is_read() -> None:
    """The backend's rule; and that kv_buffer does not tell: K-only pools leave it None."""
    assert "self.size_per_token = 0" in ast.unparse(_source_of("memory_pool_host.py", "LogicalHostPool"))
    k_only = ast.unparse(_source_of("pool_host/mha.py", "MHATokenToKOnlyPoolHost"))
    assert "self.k_buffer = alloc_func(" in k_only
    assert FakeLogicalPool.size_per_token == 0
