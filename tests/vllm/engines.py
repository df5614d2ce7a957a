"""Real vLLM engines inside the test's process, and prompts for them.

One engine after another: an engine that was closed keeps its memory until it is collected, but the worker's connector, a
singleton of the process, is gone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32
"""vLLM's CPU attention wants a multiple of 32."""

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: greedy. cached: prompt tokens that were not computed. took_s: of this prompt, or of its batch, less the time
    that the machine had no processor for this thread.
    """

    tokens: tuple[int, ...]
    cached: int
    took_s: float


class Engine:
    """One LLM. connector: kv_transfer_config, as for the server. Close it before the next is made."""

    def __init__(
        self, model: Path, *, connector: dict[str, Any] | None = None, cache_bytes: int = 32 << 20, **options: Any
    ) -> None:
        from vllm import LLM

        values: dict[str, Any] = {
            "enforce_eager": True, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": cache_bytes, "enable_prefix_caching": True, "seed": 0, "skip_tokenizer_init": True,
            "served_model_name": "tiny", "disable_log_stats": False,
        }  # fmt: skip
        if connector is not None:
            values["kv_transfer_config"] = connector
        self.llm = LLM(model=str(model), **(values | options))

    def generate(self, *prompts: Prompt, tokens: int = 16, salt: str | None = None, lora: Any = None) -> list[Answer]:
        """All at once, greedily; the end-of-text token does not end them."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked: list[Any] = [{"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
        began_s = time.monotonic() - _kept_waiting_s()
        answers = self.llm.generate(asked, how, use_tqdm=False, lora_request=lora)
        took_s = time.monotonic() - _kept_waiting_s() - began_s
        return [Answer(tuple(item.outputs[0].token_ids), item.num_cached_tokens or 0, took_s) for item in answers]

    def one_by_one(self, prompts: Sequence[Prompt], *, forget: bool = False, tokens: int = 16) -> list[Answer]:
        """forget: drop what the engine caches itself after each, so that the next can come only from elsewhere."""
        out = []
        for prompt in prompts:
            out += self.generate(prompt, tokens=tokens)
            if forget:
                self.forget()
        return out

    def forget(self) -> None:
        """Empties the engine's own caches: prefix cache and host pool."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    def close(self) -> None:
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del self.llm
        gc.collect()


def _kept_waiting_s() -> float:
    """How long this thread has been ready to run and did not, since it began (Linux, /proc/[pid]/schedstat)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def shared_prompts(count: int = 8) -> list[Prompt]:
    """Prompts that begin alike for 100 to 256 tokens and go on differently, of lengths on and off block boundaries."""
    common = [(7 * n * n + 3 * n) % 256 + 4 for n in range(256)]
    lengths = (200, 256, 100, 224, 256, 128, 190, 256)
    tails = (0, 0, 60, 37, 5, 96, 130, 72)
    made = []
    for number in range(count):
        length, tail = lengths[number % 8], tails[number % 8] + number // 8
        made.append(common[:length] + [(13 * n + 5 + 11 * number) % 256 + 4 for n in range(tail)])
    return made
