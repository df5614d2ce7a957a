"""The namespace of one HiCache pool: what must be equal before two SGLang servers may share its pages byte for byte.

Rules: every pool of a model (kv, swa, mamba, ...) is a namespace of its own, with one state group; what SGLang does not tell a
backend (weights, the logical type behind uint8) the operator says, and nothing is guessed. The byte order inside a page is in
`layout`: the host pool's, and whether a page is kept as its runs in host memory or flattened by the pool.
Does not: import SGLang, so that it can be read from fakes; works on attributes.
"""

from __future__ import annotations

from typing import Any

from kvdir.errors import ConfigError
from kvdir.namespace import DTYPE_BYTES, Namespace, StateGroup, StateKind
from kvdir.parallel import REPLICATED
from peer_agent.connectors.sglang.keys import SCHEME, SEED
from peer_agent.connectors.sglang.settings import Settings

KV = "kv"
_FP8 = {"float8_e4m3fn": "fp8_e4m3", "float8_e4m3fnuz": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "float8_e5m2fnuz": "fp8_e5m2"}


def pool_kind(name: str, *, replicated: bool) -> StateKind:
    """What the pages of a pool mean, by SGLang's name for it."""
    if "mamba" in name or name.endswith("_state"):
        return StateKind.RECURRENT
    if "draft" in name:
        return StateKind.DRAFT
    if "swa" in name:
        return StateKind.SLIDING_WINDOW
    if "indexer" in name:
        return StateKind.INDEX
    return StateKind.MLA if replicated else StateKind.FULL


def pool_namespace(
    name: str, pool: Any, *, page_bytes: int, page_tokens: int, form: str, config: Any, settings: Settings
) -> Namespace:
    """pool: SGLang's HostKVCache. config: its HiCacheStorageConfig. page_bytes: of one page, as stored. page_tokens: of the KV
    pool, for all pools: what a page stands for. form: of peer_agent.connectors.sglang.pages.

    Raises ConfigError where something is not known, NamespaceError where it does not make sense.
    """
    kind = pool_kind(name, replicated=config.is_mla_model)
    model = settings.model or config.model_name
    if not model:
        raise ConfigError(["model: SGLang names none (--served-model-name); give `model` in the extra config"])
    stored = str(getattr(pool, "dtype", "")).removeprefix("torch.") or "none"
    return Namespace.create(
        model=model,
        weights=settings.weights,
        kv_dtype=_logical_dtype(stored, settings),
        layout=_layout(name, pool, form, stored),
        block_tokens=page_tokens,
        groups=(_group(kind, pool, page_bytes, page_tokens, settings),),
        position=settings.position,
        parallel=_parallel(config, kind, pool),
        adapter=settings.adapter,
        hash_scheme=SCHEME,
        hash_seed=SEED,
        cache_policy="exact",
        bytes_override=page_bytes,
    )


def _layout(name: str, pool: Any, form: str, stored: str) -> str:
    """Byte order and place: two pipelines that cut a model differently may hold as many layers, and other ones."""
    first, last = getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)
    parts = ["sglang", name, getattr(pool, "layout", None), form, stored, getattr(pool, "storage_format_tag", None)]
    parts.append(f"L{first}-{last}" if first is not None else None)
    return ":".join(str(part) for part in parts if part)


def _logical_dtype(stored: str, settings: Settings) -> str:
    """fp8 variants are kept as uint8 and must never match each other, so the operator says which it is."""
    if settings.kv_dtype:
        return settings.kv_dtype
    known = _FP8.get(stored, stored)
    if known in DTYPE_BYTES and known not in ("uint8", "int8"):
        return known
    raise ConfigError(
        [
            f"kv_dtype: the host pool keeps {stored}, which does not say what is in it; give `kv_dtype` in the extra config, "
            "such as fp8_e4m3: what --kv-cache-dtype comes to"
        ]
    )


def _group(kind: StateKind, pool: Any, page_bytes: int, page_tokens: int, settings: Settings) -> StateGroup:
    layers = int(getattr(pool, "layer_num", 0) or 1)
    if kind is StateKind.RECURRENT:
        return StateGroup(kind=kind, layers=layers, state_bytes=page_bytes)
    return StateGroup(
        kind=kind,
        layers=layers,
        kv_heads=int(getattr(pool, "head_num", 0) or 1),
        head_dim=int(getattr(pool, "head_dim", 0) or 1),
        tensors=1 if kind in (StateKind.MLA, StateKind.INDEX) else 2,
        window_tokens=(settings.window_tokens or page_tokens) if kind is StateKind.SLIDING_WINDOW else 0,
    )


def _parallel(config: Any, kind: StateKind, pool: Any) -> str:
    """The split this rank has.

    Of a model whose KV is the same on every tensor-parallel rank, recurrent state is split all the same, and draft state may
    be: one that is not known to be latent counts as split, which costs hits and never bytes. Context-parallel ranks hold slices
    of every page. Data-parallel ranks are replicas: they are not named.
    """
    split = kind is StateKind.RECURRENT or (kind is StateKind.DRAFT and not hasattr(pool, "kv_lora_rank"))
    shared = config.is_mla_model and not split
    axes = [
        ("tp", 0 if shared else config.tp_rank, 1 if shared else config.tp_size),
        ("pp", config.pp_rank, config.pp_size),
        ("cp", config.attn_cp_rank, config.attn_cp_size),
    ]
    return ",".join(f"{name}={rank}/{size}" for name, rank, size in axes if size > 1) or REPLICATED
