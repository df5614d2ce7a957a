"""KvdirHiCache over real agents: pages of SGLang's host pools on one node, found and loaded on another, byte for byte.

Against a copy of SGLang's signatures and numpy arrays, or, in `make test-sglang`, against the real ones and torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdir.errors import ConfigError
from kvdir.namespace import Namespace, StateKind
from peer_agent.testing import LocalCluster, local_cluster, sglang_contract
from peer_agent.testing.sglang_pools import (
    FakeHostPool,
    FakeKeyPool,
    FakeLatentPool,
    FakeLogicalPool,
    FakeStatePool,
    page_keys,
    slots,
    storage_config,
)

sglang = sglang_contract.use()
PoolName, PoolTransfer = sglang.PoolName, sglang.PoolTransfer
from peer_agent.connectors.sglang import KvdirHiCache  # noqa: E402
from peer_agent.connectors.sglang.identity import pool_namespace  # noqa: E402
from peer_agent.connectors.sglang.pages import pages_of  # noqa: E402
from peer_agent.connectors.sglang.settings import read_settings  # noqa: E402


def namespace_of(name: str, pool: Any, settings: Any, page_tokens: int = 4, *, runs: bool = True) -> Namespace:
    pages = pages_of(pool, runs=runs)
    return pool_namespace(
        name, pool, page_bytes=pages.page_bytes, page_tokens=page_tokens, form=pages.form, config=settings,
        settings=read_settings(settings.extra_config),
    )  # fmt: skip


class Rig:
    """Two nodes; a backend on each, with pools of its own."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.backends: list[Any] = []

    async def backend(self, node: str, pools: dict[str, Any], extra: dict[str, Any] | None = None, **fields: Any) -> Any:
        agent = {"agent": self.cluster.agents[node].ready.engine}
        made = KvdirHiCache(storage_config(agent | (extra or {}), **fields), {})
        self.backends.append(made)

        def register() -> None:
            made.register_mem_pool_host(pools["kv"])
            for name, pool in pools.items():
                made.register_mem_host_pool_v2(pool, PoolName(name))
            made.on_host_pools_registered()

        await asyncio.to_thread(register)
        return made


def sample_pools() -> dict[str, Any]:
    return {"kv": FakeHostPool(), "swa": FakeHostPool(layers=2), "mamba": FakeStatePool(layers=1)}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Agents a and b, which know no namespace until a backend brings one along."""
    async with local_cluster(tmp_path, "a", "b", namespaces=(), accept_bytes=1 << 20, accept_namespaces=8) as cluster:
        made = Rig(cluster)
        try:
            yield made
        finally:
            for backend in made.backends:
                await asyncio.to_thread(backend.close)


async def known(rig: Rig, node: str) -> None:
    await rig.cluster.wait_known(node)


@pytest.mark.parametrize(
    ("pool_type", "options"), [(FakeHostPool, {}), (FakeHostPool, {"layout": "layer_first"}), (FakeLatentPool, {})]
)
async def test_pages_arrive_on_another_node_when_stored_in_place(rig: Rig, pool_type: Any, options: dict[str, Any]) -> None:
    here, there = pool_type(**options), pool_type(**options)
    mla = pool_type is FakeLatentPool
    writer = await rig.backend("a", {"kv": here}, is_mla_model=mla)
    reader = await rig.backend("b", {"kv": there}, is_mla_model=mla)
    names, pages = page_keys(6), [3, 9, 1, 0, 7, 30]
    here.fill([page * 4 for page in pages], seed=1)
    assert await asyncio.to_thread(writer.batch_set_v1, names, slots(here, pages)) == [True] * 6
    await known(rig, "a")
    assert await asyncio.to_thread(reader.batch_exists, [*names, *page_keys(2, root="else")]) == 6
    into = [5, 6, 8, 2, 4, 31]
    assert await asyncio.to_thread(reader.batch_get_v1, names, slots(there, into)) == [True] * 6
    for source, target in zip(pages, into, strict=True):
        assert there.page_bytes(target * 4) == here.page_bytes(source * 4)
    assert not any(there.page_bytes(0)), "a page that nobody asked for was written"
    figures = reader.figures()["kv"]
    assert (figures.loaded, figures.missed) == (6, 0)


async def test_only_pages_that_are_there_are_written_when_some_are_missing(rig: Rig) -> None:
    pool = FakeHostPool()
    backend = await rig.backend("a", {"kv": pool})
    names = page_keys(3)
    pool.fill([0, 8], seed=2)
    assert await asyncio.to_thread(backend.batch_set_v1, [names[0], names[2]], slots(pool, [0, 2])) == [True, True]
    before = pool.page_bytes(5 * 4)
    assert await asyncio.to_thread(backend.batch_exists, names) == 1
    assert await asyncio.to_thread(backend.batch_get_v1, names, slots(pool, [4, 5, 6])) == [True, False, True]
    assert (pool.page_bytes(16), pool.page_bytes(24)) == (pool.page_bytes(0), pool.page_bytes(8))
    assert pool.page_bytes(5 * 4) == before


async def test_flat_pages_go_and_come_when_the_interface_is_the_old_one(rig: Rig) -> None:
    here, there = FakeHostPool(), FakeHostPool()
    writer = await rig.backend("a", {"kv": here}, {"interface_v1": 0})
    reader = await rig.backend("b", {"kv": there}, {"interface_v1": 0})
    here.fill([0, 4], seed=3)
    names = page_keys(3)
    values = [here.get_data_page(0), here.get_data_page(4)]
    assert await asyncio.to_thread(writer.batch_set, names[:2], values)
    assert await asyncio.to_thread(writer.exists, names[1])
    await known(rig, "a")
    got = await asyncio.to_thread(reader.batch_get, names, [there.get_dummy_flat_data_page() for _ in names])
    assert [item is not None for item in got] == [True, True, False]
    assert [np.asarray(item).tobytes() for item in got[:2]] == [np.asarray(value).tobytes() for value in values]
    assert await asyncio.to_thread(reader.get, names[2], there.get_dummy_flat_data_page()) is None
    assert await asyncio.to_thread(writer.set, names[2], values[0])
    again = await asyncio.to_thread(writer.get, names[2], there.get_dummy_flat_data_page())
    assert np.asarray(again).tobytes() == np.asarray(values[0]).tobytes()


async def test_the_longest_legal_prefix_is_found_when_state_is_sparse(rig: Rig) -> None:
    """KV pages 0..7, a state at pages 3 and 5, the window of the last two pages around 5: 6 pages, not 8."""
    pools = sample_pools()
    backend = await rig.backend("a", pools)
    names = page_keys(8)
    transfers = [
        PoolTransfer(PoolName.KV, slots(pools["kv"], list(range(8))), keys=names),
        PoolTransfer(PoolName.MAMBA, slots(pools["mamba"], [0, 1]), keys=[names[3], names[5]]),
        PoolTransfer(PoolName.SWA, slots(pools["swa"], [0, 1, 2, 3]), keys=[names[2], names[3], names[4], names[5]]),
    ]
    for name in ("kv", "mamba", "swa"):
        pools[name].fill(range(0, 4 * pools[name].page_size, pools[name].page_size), seed=4)
    stored = await asyncio.to_thread(backend.batch_set_v2, transfers)
    assert stored == {"kv": [True] * 8, "mamba": [True] * 2, "swa": [True] * 4}
    trailing = sglang.PoolHitPolicy.TRAILING_PAGES
    asked = [
        PoolTransfer(PoolName.MAMBA, keys=names[-1:], hit_policy=trailing),
        PoolTransfer(PoolName.SWA, keys=names[-2:], hit_policy=trailing),
    ]
    found = await asyncio.to_thread(backend.batch_exists_v2, names, asked)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [4, 6])
    assert found.extra_pool_hit_pages == {"kv": 8, "mamba": 6, "swa": 6}
    got = await asyncio.to_thread(
        backend.batch_get_v2,
        [PoolTransfer(PoolName.MAMBA, slots(pools["mamba"], [9, 10]), keys=[names[5], names[6]])],
    )
    assert got == {"mamba": [True, False]}
    assert pools["mamba"].page_bytes(9) == pools["mamba"].page_bytes(1) != pools["mamba"].page_bytes(10)


async def test_side_pools_decide_alone_when_the_kv_pool_is_logical(rig: Rig) -> None:
    pools: dict[str, Any] = {"kv": FakeLogicalPool(), "swa": FakeHostPool(layers=2)}
    backend = await rig.backend("a", pools)
    names = page_keys(3)
    assert await asyncio.to_thread(backend.batch_exists, names) == 0
    assert (await asyncio.to_thread(backend.batch_exists_v2, names)).kv_hit_pages == 0
    stored = await asyncio.to_thread(
        backend.batch_set_v2, [PoolTransfer(PoolName.SWA, slots(pools["swa"], [0, 1]), keys=names[:2])]
    )
    assert stored == {"swa": [True, True]}
    found = await asyncio.to_thread(backend.batch_exists_v2, names, [PoolTransfer(PoolName.SWA)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])


async def test_bytes_are_moved_when_a_pool_has_them_elsewhere_than_in_its_kv_buffer(rig: Rig) -> None:
    pool = FakeKeyPool()
    backend = await rig.backend("a", {"kv": pool})
    pool.fill([0], seed=6)
    assert await asyncio.to_thread(backend.batch_get_v1, page_keys(1), slots(pool, [2])) == [False]
    assert await asyncio.to_thread(backend.batch_set_v1, page_keys(1), slots(pool, [0])) == [True]
    assert await asyncio.to_thread(backend.batch_get_v1, page_keys(1), slots(pool, [2])) == [True]
    assert pool.page_bytes(8) == pool.page_bytes(0)


async def test_nothing_is_found_when_a_pool_was_never_registered(rig: Rig) -> None:
    pools = {"kv": FakeHostPool()}
    backend = await rig.backend("a", pools)
    names = page_keys(2)
    await asyncio.to_thread(backend.batch_set_v1, names, slots(pools["kv"], [0, 1]))
    found = await asyncio.to_thread(backend.batch_exists_v2, names, [PoolTransfer(PoolName.SWA)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    moved = await asyncio.to_thread(backend.batch_set_v2, [PoolTransfer(PoolName.SWA, slots(pools["kv"], [0]), keys=names[:1])])
    assert moved == {"swa": [False]}
    assert await asyncio.to_thread(backend.batch_set_v1, names, slots(pools["kv"], [0])) == [False, False], "too few slots"


async def test_nothing_is_found_and_nothing_raised_when_a_policy_makes_no_sense(rig: Rig, caplog: Any) -> None:
    """The storage threads of SGLang would end with it."""
    pools = {"kv": FakeHostPool(), "swa": FakeHostPool(layers=2)}
    backend = await rig.backend("a", pools)
    names = page_keys(2)
    assert await asyncio.to_thread(backend.batch_set_v1, names, slots(pools["kv"], [0, 1])) == [True, True]
    groups = PoolTransfer(PoolName.SWA, keys=names, hit_policy=sglang.PoolHitPolicy.BLOCK_GROUPS)
    found = await asyncio.to_thread(backend.batch_exists_v2, names, [groups])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    assert "needs block_pages" in caplog.text


async def test_pages_of_other_weights_are_never_found_when_all_else_is_equal(rig: Rig) -> None:
    pool = FakeHostPool()
    pool.fill([0, 4], seed=5)
    first = await rig.backend("a", {"kv": pool})
    other = await rig.backend("a", {"kv": pool}, {"weights": "rev-2"})
    names = page_keys(2)
    assert await asyncio.to_thread(first.batch_set_v1, names, slots(pool, [0, 1])) == [True, True]
    assert await asyncio.to_thread(first.batch_exists, names) == 2
    assert await asyncio.to_thread(other.batch_exists, names) == 0
    assert await asyncio.to_thread(other.batch_get_v1, names, slots(pool, [2, 3])) == [False, False]


async def test_the_engine_starts_and_sees_misses_when_the_agent_does_not_serve_its_namespace(
    tmp_path: Path, caplog: Any
) -> None:
    pool = FakeHostPool()
    async with local_cluster(tmp_path, "a", namespace=namespace_of("kv", pool, storage_config())) as cluster:
        backend = await Rig(cluster).backend("a", {"kv": pool}, {"weights": "rev-2", "attach_timeout_s": 5.0})
        assert "weights: 'rev-2' here, 'rev-1' there" in caplog.text
        assert await asyncio.to_thread(backend.batch_set_v1, page_keys(1), slots(pool, [0])) == [False]
        assert await asyncio.to_thread(backend.batch_exists, page_keys(1)) == 0
        await asyncio.to_thread(backend.close)


async def test_ranks_of_one_split_are_found_only_together_when_their_pages_are_parts(rig: Rig) -> None:
    """Two tensor-parallel ranks on one node: what rank 0 alone has stored, no other node is told of."""
    pools = [FakeHostPool(), FakeHostPool()]
    ranks = [await rig.backend("a", {"kv": pools[rank]}, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    reader = await rig.backend("b", {"kv": FakeHostPool()}, tp_rank=0, tp_size=2)
    names = page_keys(2)
    assert await asyncio.to_thread(ranks[0].batch_set_v1, names, slots(pools[0], [0, 1])) == [True, True]
    assert await asyncio.to_thread(ranks[1].batch_set_v1, names[:1], slots(pools[1], [0])) == [True]
    await eventually_true(lambda: reader.batch_exists(names) == 1, "the page that both ranks have is found")
    assert await asyncio.to_thread(reader.batch_exists, names) == 1, "the one of rank 0 alone is not"


async def test_calls_end_in_time_as_misses_when_the_agent_is_gone(rig: Rig) -> None:
    pool = FakeHostPool()
    backend = await rig.backend("a", {"kv": pool}, {"deadline_s": 0.3})
    names = page_keys(2)
    assert await asyncio.to_thread(backend.batch_set_v1, names, slots(pool, [0, 1])) == [True, True]
    await rig.cluster.stop_agent("a")
    began_s = time.monotonic()
    assert await asyncio.to_thread(backend.batch_exists, names) == 0
    assert await asyncio.to_thread(backend.batch_get_v1, names, slots(pool, [2, 3])) == [False, False]
    assert await asyncio.to_thread(backend.batch_set_v1, names, slots(pool, [0, 1])) == [False, False]
    assert time.monotonic() - began_s < 1.5
    await rig.cluster.start_agent("a")
    await eventually_true(lambda: all(backend.batch_set_v1(names, slots(pool, [0, 1]))), "the agent is back, and noticed")


async def eventually_true(condition: Callable[[], bool], what: str) -> None:
    """condition: blocks, so it runs in a thread."""
    end_s = time.monotonic() + 20
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < end_s, what


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"weights": ""}, "weights: required"),
        ({"weights": "", "model_path": "/nowhere"}, "model_path: /nowhere has no weight files"),
        ({"agent": ""}, "agent: required"),
        ({"wieghts": "x"}, "did you mean weights?"),
        ({"deadline_s": "soon"}, "deadline_s: must be seconds"),
        ({"kv_dtype": "fp8"}, "kv_dtype: 'fp8' is unknown"),
        ({"window_tokens": -1}, "window_tokens: must be a whole number"),
    ],
)
def test_the_backend_is_refused_in_words_when_the_extra_config_is_wrong(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", "\\?")):
        KvdirHiCache(storage_config(extra), {})


def test_models_are_told_apart_when_their_weights_or_their_configurations_differ(tmp_path: Path) -> None:
    def weights() -> str:
        return read_settings({"agent": "unix:/nowhere", "model_path": str(tmp_path)}).weights

    (tmp_path / "model.bin").write_bytes(bytes(8192))
    said = [weights()]
    for config in ('{"rope_theta": 1e4}', '{"rope_theta": 1e6}'):
        (tmp_path / "config.json").write_text(config)
        said.append(weights())
        assert weights() == said[-1]
    (tmp_path / "model.bin").write_bytes(bytes(8191) + b"x")
    said.append(weights())
    assert len(set(said)) == 4


def test_registering_is_refused_when_the_host_pool_hides_the_element_type() -> None:
    backend = KvdirHiCache(storage_config({"attach_timeout_s": 0}), {})
    with pytest.raises(ConfigError, match="kv_dtype: the host pool keeps uint8"):
        backend.register_mem_pool_host(FakeHostPool(dtype="uint8"))
    told = KvdirHiCache(storage_config({"attach_timeout_s": 0, "kv_dtype": "fp8_e4m3"}), {})
    told.register_mem_pool_host(FakeHostPool(dtype="uint8"))
    told.close()


def test_namespaces_differ_when_ranks_layouts_or_forms_do() -> None:
    pool, base = FakeHostPool(), storage_config()
    namespaces = [
        namespace_of("kv", pool, base),
        namespace_of("kv", pool, base, runs=False),
        namespace_of("swa", pool, base),
        namespace_of("kv", FakeHostPool(layout="layer_first"), base),
        namespace_of("kv", pool, storage_config(tp_size=2)),
        namespace_of("kv", pool, storage_config(tp_size=2, tp_rank=1)),
        namespace_of("kv", pool, storage_config(pp_size=2)),
        namespace_of("kv", pool, storage_config(attn_cp_size=2)),
    ]
    assert len({item.digest for item in namespaces}) == len(namespaces)
    assert namespaces[4].parallel == "tp=0/2"


def test_ranks_share_what_is_replicated_and_only_that_when_the_model_is_mla() -> None:
    zero, one = (storage_config(is_mla_model=True, tp_size=2, tp_rank=rank) for rank in (0, 1))
    latent, state, plain = FakeLatentPool(), FakeStatePool(), FakeHostPool()
    assert namespace_of("kv", latent, zero) == namespace_of("kv", latent, one)
    assert namespace_of("kv", latent, zero).groups[0].kind == StateKind.MLA
    assert namespace_of("mamba", state, zero) != namespace_of("mamba", state, one)
    assert namespace_of("draft", plain, zero) != namespace_of("draft", plain, one), "heads of a draft model may be split"
    assert namespace_of("draft", latent, zero) == namespace_of("draft", latent, one)
