"""Stores four blocks on node a and loads them on node b; the README says how to start the two."""

import tomllib
from pathlib import Path

import numpy as np

import kvdir
import peer_agent

namespace = kvdir.Namespace.create(**tomllib.loads(Path(__file__).with_name("llama-3.1-8b.toml").read_text()))
fingerprints = kvdir.Fingerprints.chain([b"tokens of block 0", b"of block 1", b"of block 2", b"of block 3"])
blocks = np.random.default_rng().integers(0, 256, (4, namespace.block_bytes), np.uint8)

with peer_agent.connect("unix:/dev/shm/kvdir-a.sock", namespace=namespace) as engine:
    print("stored on a:", engine.store(fingerprints, blocks).stored)

into = np.zeros_like(blocks)
with peer_agent.connect("unix:/dev/shm/kvdir-b.sock", namespace=namespace) as engine:
    result = engine.load(fingerprints, into=into, deadline_s=0.5)
    print("loaded on b:", result)
    print("to recompute:", result.recompute, "| bytes equal:", bool((into == blocks).all()))
