"""Two engines on two nodes: a computes a prompt, b loads its KV from a instead of computing it again.

docs/engines/transformers.md says how to start the nodes. The model is made on the spot, with random weights.
"""

import sys
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from peer_agent.connectors import hf

A, B = sys.argv[1:] or ("unix:/dev/shm/kvdir-a.sock", "unix:/dev/shm/kvdir-b.sock")

torch.manual_seed(0)
config = LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2)
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(0, config.vocab_size, (1, 2000))
tokens = prompt[0].tolist()


def answer(cache):
    began_s = time.monotonic()
    output = model.generate(prompt, past_key_values=cache, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    return output.sequences[0, len(tokens) :].tolist(), output.past_key_values, time.monotonic() - began_s


with hf.connect(A, model) as a:
    recomputed, cache, recompute_s = answer(DynamicCache())
    print("blocks stored on a:", a.save(cache, tokens).stored)

with hf.connect(B, model) as b:
    began_s = time.monotonic()
    cache, n_tokens = b.load(tokens)
    load_s = time.monotonic() - began_s
    loaded, _, rest_s = answer(cache)

print(f"recomputed:  {recompute_s:.2f} s for {len(tokens)} tokens and the answer")
print(f"loaded on b: {load_s:.2f} s for {n_tokens} of them, {rest_s:.2f} s for the rest and the answer")
print("answers are equal:", loaded == recomputed)
