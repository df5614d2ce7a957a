"""Tiny models with random weights, made by code: a Llama, and a hybrid of sliding-window and full attention (Gemma3).

Weights are drawn wide (standard deviation 0.25), so that greedy output depends on every token of the prompt: equal output then
means that the KV was right. Token ids are used as they are; there is no tokenizer.
"""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 320
WINDOW_TOKENS = 64


def make_llama(path: Path, *, seed: int = 0, layers: int = 4) -> Path:
    """4 layers, 4 heads, 2 KV heads of 32, float32: one block of 32 tokens is 64 KiB. Another seed gives other weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype="float32",
    )  # fmt: skip
    return _save(LlamaForCausalLM, config, path, seed)


def make_gemma3(path: Path, *, seed: int = 0) -> Path:
    """4 layers with a window of 64 tokens and 2 with full attention: three KV groups in vLLM."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, sliding_window=WINDOW_TOKENS, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype="float32",
    )  # fmt: skip
    return _save(Gemma3ForCausalLM, config, path, seed)


def _save(kind: type, config: object, path: Path, seed: int) -> Path:
    import torch

    generator = torch.Generator().manual_seed(seed)
    model = kind(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                # Small where it is the head as well: else a token's own embedding, not attention, decides what comes next.
                tied = "embed_tokens" in name and model.config.tie_word_embeddings
                parameter.normal_(0, 0.02 if tied else 0.25, generator=generator)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(1.0)  # Gemma adds one: sharper attention, which sees single tokens
    model.save_pretrained(path)
    return path
