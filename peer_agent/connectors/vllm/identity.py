"""Which blocks a vLLM engine may share: its identity, from vLLM's own configuration and the files of its weights.

Rules: everything that changes the bytes of a block is in it, by its effective value; what cannot be told (weights that are
nowhere on this node, a random hash seed, scales that each engine makes for itself) is refused, and the message says what to do.
Two engines share exactly if their namespaces are equal.
The KV cache groups of a hybrid model use the same block hashes for different layers, so each group is a part of the namespace.
LoRA and cache_salt are in vLLM's hash chain, not here: requests that differ in them have different hashes. The chain names an
adapter by name and path, so its weights are mixed into the fingerprint (tier_keys.py).
Reads vLLM's objects by attribute and imports none of it; they are those of 0.32 (vllm/config, v1/kv_cache_interface.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvdir.errors import InvalidInput
from kvdir.namespace import DTYPE_BYTES, Namespace, StateGroup, StateKind
from peer_agent.connectors.vllm.settings import Settings
from peer_agent.connectors.weights import weights_digest

SEED_VARIABLE = "PYTHONHASHSEED"
BUILTIN_SEED = "builtin"

_CACHE_DTYPES = {
    "float16": "float16", "bfloat16": "bfloat16", "float32": "float32", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}  # fmt: skip
"""vLLM's cache_dtype to ours, where a block is plain elements of it; others are bytes in a form named by the cache policy."""

_NOT_OF_THE_MODEL = frozenset({"name_or_path", "transformers_version", "dtype", "torch_dtype"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One KV cache group, as one rank has it. layers: their names, in order. pages: what their pages hold, as vLLM writes its
    specification down: element types of a recurrent state, packing, quantisation, padding.
    """

    number: int
    state: StateGroup
    block_tokens: int
    layers: tuple[str, ...]
    pages: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What all groups have in common, and the groups. platform: what computes the KV and packs it, "cuda" or "cpu-amx"."""

    model: str
    weights: str
    kv_dtype: str
    cache_policy: str
    position: str
    hash_scheme: str
    hash_seed: str
    platform: str
    groups: tuple[Group, ...]

    def namespace(
        self, *, form: str, block_tokens: Mapping[int, int], block_bytes: Mapping[int, int], parallel: str = "replicated"
    ) -> Namespace:
        """Of all groups; `parts` gives those whose blocks are stored. form: how the connector lays a block out.

        block_tokens, block_bytes: of one block, by number of the group.
        """
        layers = hashlib.blake2b(digest_size=8, person=b"kvdir-layers")
        for group in self.groups:
            layers.update(f"{group.number}:{','.join(group.layers)}:{group.pages};".encode())
        states = tuple(
            replace(group.state, block_tokens=block_tokens[group.number], bytes_override=block_bytes[group.number])
            for group in self.groups
        )
        return Namespace.create(
            model=self.model,
            weights=self.weights,
            kv_dtype=self.kv_dtype,
            layout=f"{form}:{self.platform}:{layers.hexdigest()}",
            block_tokens=math.lcm(*block_tokens.values()),
            groups=states,
            position=self.position,
            parallel=parallel,
            adapter="none",
            hash_scheme=self.hash_scheme,
            hash_seed=self.hash_seed,
            cache_policy=self.cache_policy,
        )

    def parts(self, namespace: Namespace) -> dict[int, Namespace]:
        """Of that namespace, by number of the KV cache group."""
        return {group.number: part for group, part in zip(self.groups, namespace.parts(), strict=True)}


def identify(
    vllm_config: Any,
    groups: Mapping[int, Any],
    settings: Settings,
    *,
    platform: str,
    environment: Mapping[str, str],
) -> Identity:
    """Raises InvalidInput for what cannot be shared safely, in words.

    groups: by number, those of vLLM's KV cache groups that are to be shared. environment: of the process that hashes.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise InvalidInput(
            "calculate_kv_scales is on: each engine takes its scales from the first request it happens to see, so blocks of "
            "two engines do not mean the same. Switch it off, or use a checkpoint with scales"
        )
    kv_dtype, policy = _cache_type(str(cache.cache_dtype), model)
    return Identity(
        model=settings.model or _served_name(model),
        weights=_weights(vllm_config, settings),
        kv_dtype=kv_dtype,
        cache_policy=policy,
        position=_position(model),
        hash_scheme=f"vllm:{cache.prefix_caching_hash_algo}",
        hash_seed=_seed(str(cache.prefix_caching_hash_algo), environment),
        platform=platform,
        groups=tuple(_group(number, item) for number, item in sorted(groups.items())),
    )


def _served_name(model: Any) -> str:
    name = model.served_model_name
    return str(name[0] if isinstance(name, list | tuple) else name or model.model)


def _weights(vllm_config: Any, settings: Settings) -> str:
    """What computes the KV: the weights, and how they are used. A draft model's layers are among those of the groups."""
    model = vllm_config.model_config
    made = _use(model)
    if settings.weights:
        return f"stated:{settings.weights}:{made}"
    if str(vllm_config.load_config.load_format) == "dummy":
        return f"dummy:seed={model.seed}:{made}"
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None and draft.model != model.model:  # else it proposes without weights, or they are among the model's
        made += f":draft={_digest(draft)}:{_use(draft)}"
    return f"blake2b:{_digest(model)}:{made}"


def _use(model: Any) -> str:
    """How weights are used: precision, and the model's own configuration with what overrides it (norms, activations, ...)."""
    digest = hashlib.blake2b(digest_size=8, person=b"kvdir-config")
    digest.update(json.dumps(_plain(model.hf_config.to_dict()), sort_keys=True).encode())
    return f"{_dtype(model.dtype)}:{model.quantization or 'none'}:config={digest.hexdigest()}"


def _plain(value: Any) -> Any:
    """A configuration as JSON, without what says nothing of the model: where it came from, and which software wrote it."""
    if isinstance(value, Mapping):
        names = {str(name): each for name, each in value.items()}
        return {name: _plain(each) for name, each in names.items() if name[:1] != "_" and name not in _NOT_OF_THE_MODEL}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _digest(model: Any) -> str:
    path = Path(model.model)
    return weights_digest(path if path.exists() else _snapshot(model))


def _snapshot(model: Any) -> Path:
    """Where the Hub's client has put the model's files; vLLM has loaded them by now."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except Exception as error:
        raise InvalidInput(
            f"the weights of {model.model} are not in the Hub's cache of this node ({type(error).__name__}), so nobody can "
            'tell which they are: say it in kv_connector_extra_config, "kvdir": {"weights": "..."}, the same text exactly '
            "where the weights are the same, such as the revision"
        ) from error


def _cache_type(name: str, model: Any) -> tuple[str, str]:
    """(element type, cache policy)."""
    if name == "auto":
        name = _dtype(model.dtype)
    known = _CACHE_DTYPES.get(name)
    if known is None:
        return "uint8", f"vllm:{name}"
    return known, "exact"


def _dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise InvalidInput(f"the model computes in {name}, which kvdir does not know; it knows {', '.join(DTYPE_BYTES)}")
    return name


def _position(model: Any) -> str:
    """Position encoding with all its parameters, as the model's own configuration has them."""
    config = model.hf_text_config
    rope = ("rope_parameters",) if getattr(config, "rope_parameters", None) else ("rope_scaling", "rope_theta")
    named = (*rope, "partial_rotary_factor", "alibi", "position_embedding_type")
    found = {name: value for name in named if (value := getattr(config, name, None)) is not None}
    if "longrope" in str(found):  # vLLM takes the long factors for every position as soon as max_model_len may need them
        found["max_model_len"] = model.max_model_len
    return json.dumps(found, sort_keys=True, separators=(",", ":"), default=str) if found else "none"


def _seed(algorithm: str, environment: Mapping[str, str]) -> str:
    """As vLLM resolves it (v1/core/kv_cache_utils.py, resolve_none_hash_seed)."""
    seed = environment.get(SEED_VARIABLE)
    if seed is not None:
        return seed
    if algorithm.startswith("xxhash"):
        raise InvalidInput(
            f"prefix_caching_hash_algo is {algorithm} and {SEED_VARIABLE} is not set: vLLM then draws a random seed in each "
            f"process, and no two engines name a block alike. Set {SEED_VARIABLE} to one value everywhere, or use sha256_cbor"
        )
    return BUILTIN_SEED


def _group(number: int, group: Any) -> Group:
    spec = group.kv_cache_spec
    names = tuple(group.layer_names)
    state = _state(spec, len(names))
    return Group(number=number, state=state, block_tokens=int(spec.block_size), layers=names, pages=repr(spec))


def _state(spec: Any, layers: int) -> StateGroup:
    """One rank's part of a group. A group of mixed layers (UniformTypeKVCacheSpecs) is described by its first."""
    kinds = {kind.__name__ for kind in type(spec).__mro__}
    if "UniformTypeKVCacheSpecs" in kinds:
        return _state(next(iter(spec.kv_cache_specs.values())), layers)
    if "MambaSpec" in kinds:
        return StateGroup(kind=StateKind.RECURRENT, layers=layers, state_bytes=int(spec.page_size_bytes) * layers)
    if "RSWASpec" in kinds:
        raise InvalidInput(
            "attention with a reference window (R-SWA): the KV of an answer's tokens depends on where its prompt ended, which "
            "block hashes do not say, so it is not shared"
        )
    if not {"AttentionSpec", "FullAttentionSpec"} & kinds:
        raise InvalidInput(f"KV cache of kind {type(spec).__name__}: kvdir does not know it, so it is not shared")
    made = StateGroup(kind=StateKind.FULL, layers=layers, kv_heads=int(spec.num_kv_heads), head_dim=int(spec.head_size))
    if {"SlidingWindowSpec", "ChunkedLocalAttentionSpec"} & kinds:
        window = spec.sliding_window if "SlidingWindowSpec" in kinds else spec.attention_chunk_size
        return replace(made, kind=StateKind.SLIDING_WINDOW, window_tokens=int(window))
    if "MLAAttentionSpec" in kinds:
        return replace(made, kind=StateKind.MLA, tensors=1)
    return made
