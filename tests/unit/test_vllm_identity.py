"""What makes two vLLM engines share: from configurations as vLLM 0.32 has them, by attribute. No vLLM is needed here.

That the attributes are those of a real vLLM is shown by tests/vllm/test_tier.py, whose namespaces come from one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdir.errors import InvalidInput
from kvdir.namespace import Namespace
from peer_agent.connectors.vllm.identity import identify
from peer_agent.connectors.vllm.settings import Settings


@dataclass
class AttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 64


class FullAttentionSpec(AttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class RSWASpec(FullAttentionSpec):
    pass


@dataclass
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int = 128


@dataclass
class MambaSpec:
    block_size: int = 16
    page_size_bytes: int = 1000
    dtypes: tuple[str, ...] = ("torch.bfloat16",)


def hf_config(**changes: Any) -> Any:
    """As transformers has it."""
    values = {"rms_norm_eps": 1e-5, "_name_or_path": "/models/m", "text_config": {"transformers_version": "5"}} | changes
    return SimpleNamespace(to_dict=lambda: values)


def config(*, draft: Any = None, **changes: Any) -> Any:
    """As of one engine; names of changes are `model_x`, `cache_x`, `load_x`."""
    model = {
        "model": "/models/m", "served_model_name": "m", "dtype": "torch.bfloat16", "quantization": None, "revision": None,
        "seed": 0, "hf_config": hf_config(), "max_model_len": 4096,
        "hf_text_config": SimpleNamespace(rope_parameters={"rope_theta": 10000.0}),
    }  # fmt: skip
    cache = {"cache_dtype": "auto", "prefix_caching_hash_algo": "sha256_cbor"}
    load = {"load_format": "dummy"}
    parts = {"model": model, "cache": cache, "load": load}
    for name, value in changes.items():
        part, _, field = name.partition("_")
        parts[part][field] = value
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(**cache),
        load_config=SimpleNamespace(**load),
        speculative_config=draft and SimpleNamespace(draft_model_config=SimpleNamespace(**(model | draft))),
    )


def namespace(
    changes: dict[str, Any] | None = None,
    *,
    spec: Any = None,
    layers: tuple[str, ...] = ("a", "b"),
    platform: str = "cuda",
    environment: dict[str, str] | None = None,
    settings: Settings | None = None,
    form: str = "rows",
) -> Namespace:
    group = SimpleNamespace(kv_cache_spec=spec or FullAttentionSpec(), layer_names=list(layers))
    identity = identify(
        config(**(changes or {})), {0: group}, settings or Settings(agent="x"), platform=platform, environment=environment or {}
    )
    return identity.namespace(form=form, block_tokens={0: 16}, block_bytes={0: 8192})


def test_equal_configurations_share_wherever_the_model_lies():
    elsewhere = hf_config(_name_or_path="/elsewhere/m", text_config={"transformers_version": "6"})
    assert namespace() == namespace({"model_model": "/elsewhere/m", "model_hf_config": elsewhere, "model_max_model_len": 64})


def test_engines_do_not_share_when_their_draft_models_have_other_weights(tmp_path: Path):
    def made(name: str, draft: bytes | None) -> Namespace:
        for directory, content in (("target", b"target"), (name, draft or b"")):
            (tmp_path / directory).mkdir(exist_ok=True)
            (tmp_path / directory / "model.bin").write_bytes(content)
        speculative = None if draft is None else {"model": str(tmp_path / name)}
        return namespace({"load_load_format": "auto", "model_model": str(tmp_path / "target"), "draft": speculative})

    plain, one, other, same = made("x", None), made("one", b"1"), made("other", b"2"), made("same", b"1")
    assert len({plain.digest, one.digest, other.digest}) == 3
    assert same.digest == one.digest


def test_engines_do_not_share_when_states_of_one_size_have_other_element_types():
    assert namespace(spec=MambaSpec(dtypes=("torch.float16",))).digest != namespace(spec=MambaSpec()).digest


def test_engines_share_only_with_one_max_model_len_when_it_decides_the_rope_factors():
    long = {"model_hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "longrope"})}
    assert namespace(long | {"model_max_model_len": 9000}).digest != namespace(long).digest


@pytest.mark.parametrize(
    "other",
    [
        lambda: namespace({"model_served_model_name": ["n", "m"]}),
        lambda: namespace({"model_dtype": "torch.float16"}),
        lambda: namespace({"model_quantization": "fp8"}),
        lambda: namespace({"model_seed": 1}),
        lambda: namespace({"model_hf_config": hf_config(rms_norm_eps=1e-6)}),
        lambda: namespace({"cache_cache_dtype": "fp8"}),
        lambda: namespace({"cache_cache_dtype": "int8_per_token_head"}),
        lambda: namespace({"cache_prefix_caching_hash_algo": "sha256"}),
        lambda: namespace({"model_hf_text_config": SimpleNamespace(rope_parameters={"rope_theta": 500000.0})}),
        lambda: namespace(spec=FullAttentionSpec(num_kv_heads=4)),
        lambda: namespace(spec=MLAAttentionSpec()),
        lambda: namespace(layers=("b", "a")),
        lambda: namespace(platform="cpu-amx"),
        lambda: namespace(environment={"PYTHONHASHSEED": "0"}),
        lambda: namespace(settings=Settings(agent="x", weights="rev-2")),
        lambda: namespace(form="rows:ranks=2"),
    ],
)
def test_engines_do_not_share_when_anything_differs_that_changes_bytes_or_names(other: Callable[[], Namespace]):
    assert other().digest != namespace().digest


def test_attention_whose_bytes_depend_on_more_than_the_prefix_is_refused():
    with pytest.raises(InvalidInput, match="depends on where its prompt ended"):
        namespace(spec=RSWASpec())


@pytest.mark.parametrize(
    ("spec", "kind", "field", "value"),
    [
        (FullAttentionSpec(), "full", "kv_heads", 2),
        (MLAAttentionSpec(), "mla", "tensors", 1),
        (SlidingWindowSpec(), "sliding_window", "window_tokens", 128),
        (MambaSpec(), "recurrent", "state_bytes", 2000),
        (SimpleNamespace(block_size=16), None, "", 0),
    ],
)
def test_groups_have_the_kind_that_vllm_gives_them(spec: Any, kind: str | None, field: str, value: int):
    if kind is None:
        with pytest.raises(InvalidInput, match="SimpleNamespace: kvdir does not know it"):
            namespace(spec=spec)
        return
    (group,) = namespace(spec=spec).groups
    assert (group.kind, getattr(group, field)) == (kind, value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_prefix_caching_hash_algo": "xxhash"}, "Set PYTHONHASHSEED to one value everywhere, or use sha256_cbor"),
        ({"cache_calculate_kv_scales": True}, "Switch it off, or use a checkpoint with scales"),
        ({"load_load_format": "auto", "model_model": "/nowhere/at/all"}, 'say it in kv_connector_extra_config, "kvdir"'),
        ({"model_dtype": "torch.complex64"}, "computes in complex64, which kvdir does not know"),
    ],
)
def test_engine_is_refused_with_the_fix_when_nobody_could_share_with_it_safely(changes: dict[str, Any], message: str):
    with pytest.raises(InvalidInput, match=message):
        namespace(changes)
