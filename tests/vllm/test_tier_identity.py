"""Whose blocks an engine may use: a name is not enough, and a reset may mean other weights. In a file of its own, since the
engines of test_tier.py live as long as their module, and there is one at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvdir.namespace import Namespace
from tests.vllm.engines import BLOCK_TOKENS, Engine, shared_prompts
from tests.vllm.models import make_llama
from tests.vllm.nodes import Nodes, wait_for
from tests.vllm.world import tier


def test_nothing_is_shared_when_the_model_has_the_same_name_and_other_weights(
    tiny_llama: Path, tmp_path: Path, shared_memory: Path
):
    """Also: an engine whose external caches were reset shares nothing any more, since its weights may have changed."""
    (shared_memory / "weights").mkdir()
    nodes, prompt = Nodes(shared_memory / "weights"), shared_prompts(1)[0]
    try:
        nodes.start_coordinator()
        nodes.start_agent("node")
        first = Engine(tiny_llama, connector=tier(nodes.engine("node"), share_after_reset=False))
        (right,) = first.generate(prompt)
        wait_for(lambda: nodes.held_blocks("node") == len(prompt) // BLOCK_TOKENS, "all blocks stored")
        first.forget()
        (after_reset,) = first.generate(prompt)
        assert (after_reset.tokens, after_reset.cached) == (right.tokens, 0)
        mine = first.connector._tier.namespaces[0]
        first.close()
        second = Engine(make_llama(tmp_path / "same-name", seed=1), connector=tier(nodes.engine("node")))
        (other,) = second.generate(prompt)
        theirs = second.connector._tier.namespaces[0]
        second.close()
        assert other.tokens != right.tokens
        assert other.cached == 0
        assert mine.model == theirs.model
        assert [each.split(":")[0] for each in Namespace.diff(mine, theirs)] == ["weights"]
    finally:
        nodes.close()


def test_device_and_attention_backend_are_told_apart_where_they_decide_how_a_page_lies(monkeypatch: pytest.MonkeyPatch):
    from vllm.config import AttentionConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from peer_agent.connectors.vllm import v0_32_offloading as shim

    def made(name: str, capability: tuple[int, int], backend: AttentionBackendEnum | None = None) -> str:
        device = SimpleNamespace(device_name=name, get_device_capability=lambda: DeviceCapability(*capability))
        monkeypatch.setattr(shim, "current_platform", device)
        return shim.platform(SimpleNamespace(attention_config=AttentionConfig(backend=backend)), {})

    flash = AttentionBackendEnum.FLASH_ATTN
    assert len({made("cuda", (8, 0)), made("cuda", (9, 0)), made("rocm", (9, 0)), made("cuda", (9, 0), flash)}) == 4
    assert made("cuda", (8, 0), flash) == made("cuda", (9, 0), flash)
