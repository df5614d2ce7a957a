"""Hugging Face transformers: save the KV cache of a prompt through this node's agent, and load it into another process.

    connector = hf.connect("unix:/dev/shm/kvdir-node1.sock", model)
    cache, n_tokens = connector.load(tokens)
    output = model.generate(ids, past_key_values=cache, return_dict_in_generate=True)
    connector.save(output.past_key_values, tokens)

A block is the keys and values of `block_tokens` tokens of all layers, (layer, key or value, head, token, channel).
Rules: what could make KV mean something else is in the namespace (`namespace_of`), or refused with what to do: weights that are
not in memory, adapters without a name, position encodings that depend on the length of the prompt. A cache is saved only if
every layer keeps every token (DynamicCache without a config); sliding windows, recurrent, static and quantised layers are not.
An agent that is away, a stale or corrupt block, a passed deadline: fewer tokens are loaded, the model computes the rest.
Text prompts, one at a time: pictures have the same tokens whatever they show, so a model that sees is refused unless text_only.
Tried with transformers 5.19 (docs/engines/transformers.md). Does not: batch, run the model, hook into `generate`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.hashing import BUILTIN
from kvdir.namespace import DTYPE_BYTES, Namespace
from peer_agent.client.engine import Engine
from peer_agent.client.engine import connect as connect_engine
from peer_agent.client.results import LoadResult, StoreResult

LAYOUT = "hf:layer,kv,head,token,channel"
SCHEME = "kvdir:blake3"
BLOCK_TOKENS = 16
DEADLINE_S = 5.0
"""Of a save or a load: recomputing a long prompt takes transformers longer than that."""

PIECE = 1024
"""Numbers of a tensor in each piece that its digest sees."""

_NOT_COMPUTED = frozenset(
    {"architectures", "transformers_version", "dtype", "use_cache", "return_dict", "output_attentions", "output_hidden_states"}
)
"""Of a configuration, beside tokens that end or pad a text: where it is from, what callers get. The type is a field itself."""

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on how long the whole prompt is: their keys are not those of a prefix."""


def namespace_of(
    model: Any,
    *,
    name: str = "",
    block_tokens: int = BLOCK_TOKENS,
    weights: str = "",
    adapter: str = "none",
    text_only: bool = False,
    tenant_salt: str | None = None,
    scheme: str = SCHEME,
    seed: str = BUILTIN,
) -> Namespace:
    """Under which two models of transformers may share blocks. Raises InvalidInput in words for what cannot be shared.

    model: a PreTrainedModel. name: for people, the same everywhere; empty: its class. weights: what says which weights these
    are, such as a revision; empty: the digest of its files, where it was loaded from a directory or the Hub's cache. adapter:
    of a model with PEFT adapters, name and version. text_only: the caller's word that no prompt of a model that takes pictures
    or sound, too, has any.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(model, "peft_config", None) and adapter == "none":
        raise InvalidInput("the model has PEFT adapters, which change its KV: name them with adapter=, and change it with them")
    if config is not model.config and not text_only:
        raise InvalidInput(
            "the model takes more than text, and pictures have the same tokens whatever they show: one would be taken for "
            "another. Say text_only=True if no prompt has any"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Namespace.create(
        model=name or type(model).__name__,
        weights=f"{f'stated:{weights}' if weights else _weights_digest(model)}:{_quantisation(model)}:{_config_digest(config)}",
        kv_dtype=_dtype(model.dtype),
        layout=LAYOUT,
        block_tokens=block_tokens,
        groups=[{"kind": "full", "layers": config.num_hidden_layers, "kv_heads": heads, "head_dim": head_dim}],
        position=_position(config),
        parallel="replicated",
        adapter=adapter,
        tenant_salt=tenant_salt,
        hash_scheme=scheme,
        hash_seed=seed,
        cache_policy="exact",
    )


def connect(address: str, model: Any, *, timeout_s: float = 5.0, **identity: Any) -> HfConnector:
    """Attached to the agent at `address`, which has the namespace's file or runs with --accept-bytes.

    identity: see `namespace_of`. Raises as peer_agent.connect does, and InvalidInput.
    """
    engine = connect_engine(address, namespace=namespace_of(model, **identity), engine="transformers", timeout_s=timeout_s)
    return HfConnector(engine, device=model.device)


class HfConnector:
    """Caches of one model through one agent. device: where loaded caches go. Closes the engine with itself.

    last_load: what the agent said to the newest load, with its `explanation`: why it brought less than there is.
    """

    def __init__(self, engine: Engine, *, device: torch.device | str = "cpu") -> None:
        namespace = engine.namespace
        group = namespace.groups[0]
        self.engine = engine
        self.last_load: LoadResult | None = None
        self._device = device
        self._block_tokens = namespace.block_tokens
        self._dtype: torch.dtype = getattr(torch, namespace.kv_dtype)
        self._block = (group.layers, 2, group.kv_heads, namespace.block_tokens, group.head_dim)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def save(self, cache: Any, tokens: Sequence[int], *, deadline_s: float = DEADLINE_S) -> StoreResult:
        """Stores the whole blocks of `tokens` that the cache holds; blocks that are there already are not stored again.

        cache: of this model, batch of one, as the model returned it. tokens: of the prompt, and of the answer if they are
        wanted, from the first one on, without padding. Raises InvalidInput for a cache that cannot be saved, with what to do.
        """
        layers = _plain_layers(cache, self._block, self._dtype)
        count = min(len(tokens), cache.get_seq_length()) // self._block_tokens
        blocks = torch.empty((count, *self._block), dtype=self._dtype)
        for number, layer in enumerate(layers if count else ()):
            for part, tensor in enumerate((layer.keys, layer.values)):
                blocks[:, number, part] = tensor[0, :, : count * self._block_tokens].unflatten(1, (count, -1)).transpose(0, 1)
        return self.engine.store(self._fingerprints(tokens, count), _bytes_of(blocks), deadline_s=deadline_s)

    def load(self, tokens: Sequence[int], *, deadline_s: float = DEADLINE_S) -> tuple[DynamicCache, int]:
        """A cache of the first n tokens of a prompt, and n: as many whole blocks as are there, never the last token.

        The last token is left to the model, which computes from it what comes next. An empty cache and 0 if nothing is there.
        """
        count = max(len(tokens) - 1, 0) // self._block_tokens
        fingerprints = self._fingerprints(tokens, count)
        blocks = torch.empty((count, *self._block), dtype=self._dtype)
        result = self.engine.load(fingerprints, into=_bytes_of(blocks), deadline_s=deadline_s, explain=True)
        self.last_load = result
        return self._cache(blocks[: result.prefix_hits]), result.prefix_hits * self._block_tokens

    def _fingerprints(self, tokens: Sequence[int], count: int) -> Fingerprints:
        namespace = self.engine.namespace
        return Fingerprints.from_tokens(
            tokens[: count * self._block_tokens],
            scheme=namespace.hash_scheme,
            seed=namespace.hash_seed,
            block_tokens=self._block_tokens,
        )

    def _cache(self, blocks: torch.Tensor) -> DynamicCache:
        if not len(blocks):
            return DynamicCache()
        # (block, layer, kv, head, token, channel) -> (layer, kv, batch of one, head, all tokens, channel)
        joined = blocks.permute(1, 2, 3, 0, 4, 5).flatten(3, 4).unsqueeze(2).to(self._device)
        return DynamicCache([(layer[0], layer[1]) for layer in joined])


def _plain_layers(cache: Any, block: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    """The layers of a cache that keeps every token as it is. Raises InvalidInput, with what to do."""
    if type(cache) is not DynamicCache:
        raise InvalidInput(f"a {type(cache).__name__} cannot be saved: give the model past_key_values=DynamicCache()")
    if not cache.get_seq_length():
        return []
    layers, (count, _, heads, _, head_dim) = cache.layers, block
    for number, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            raise InvalidInput(
                f"layer {number} is a {type(layer).__name__}, which does not keep the keys and values of every token: give the "
                "model past_key_values=DynamicCache() (without its config), or do not save the cache of this model"
            )
        for tensor in (layer.keys, layer.values):
            if tensor.shape[:2] != (1, heads) or tensor.shape[3] != head_dim or tensor.dtype != dtype:
                raise InvalidInput(
                    f"layer {number} holds {tensor.dtype} of shape {tuple(tensor.shape)}, the namespace says one prompt, "
                    f"{heads} heads, {head_dim} channels of {dtype}: is it a cache of this model, of one prompt at a time?"
                )
    if len(layers) != count:
        raise InvalidInput(f"the cache has {len(layers)} layers, the model {count}: is it a cache of this model?")
    return list(layers)


def _bytes_of(blocks: torch.Tensor) -> Any:
    """The same memory as a numpy array; bfloat16 has no type there."""
    return blocks.view(-1).view(torch.uint8).numpy()


def _weights_digest(model: Any) -> str:
    """Of the weights that the model has now, so that merged adapters and other changes after loading count, too.

    Name, shape, type and three pieces (first, middle, last) of every tensor: a training step changes all of them. As that of
    files (peer_agent/connectors/weights.py) it does not see a few numbers that were changed by hand.
    """
    total = hashlib.blake2b(digest_size=16, person=b"kvdir-hf-weights")
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            raise InvalidInput(f"{name} is no tensor in memory, so nobody can tell which weights these are: give weights=...")
        total.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        flat = tensor.detach().reshape(-1)
        for start in (0, len(flat) // 2, max(0, len(flat) - PIECE)):
            total.update(flat[start : start + PIECE].cpu().contiguous().view(torch.uint8).numpy())
    return f"live:{total.hexdigest()}"


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise InvalidInput(f"the model computes in {name}, which kvdir does not know; it knows {', '.join(DTYPE_BYTES)}")
    return name


def _quantisation(model: Any) -> str:
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return "none"
    return str(
        config.get("quant_method", "unnamed") if isinstance(config, dict) else getattr(config, "quant_method", "unnamed")
    )


def _config_digest(config: Any) -> str:
    """Of how the model computes with its weights: windows, scales, norms and whatever else its configuration says.

    All of it counts, so that what a new architecture brings cannot be forgotten; only names of places and releases do not.
    """
    said = {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_") and not name.endswith("_token_id") and name not in _NOT_COMPUTED
    }
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"kvdir-hf-config").hexdigest()


def _position(config: Any) -> str:
    """Position encoding with its parameters, as the model's own configuration has them."""
    named = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "alibi", "position_embedding_type")
    found = {name: value for name in named if (value := getattr(config, name, None)) is not None}
    text = json.dumps(found, sort_keys=True, separators=(",", ":"), default=str)
    for kind in _LENGTH_DEPENDENT:
        if f'"{kind}"' in text:
            raise InvalidInput(
                f"rotary embeddings of type {kind} depend on the length of the prompt: a prefix cannot be reused"
            )
    return text if found else "none"
