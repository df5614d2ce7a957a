"""One block from one agent to another, as engines do it: shows that a fleet works, from inside of two pods.

    python exchange.py store unix:/run/kvdir/agent.sock SEED      in the one
    python exchange.py load  unix:/run/kvdir/agent.sock SEED      in the other: exit code 0 if it came, and came right

SEED: any word, the same in both; another one each time, or the second agent still has the block. Bytes follow from it.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np

import kvdir
import peer_agent

ATTEMPTS, DEADLINE_S = 50, 0.5
"""The directory hears of a block some milliseconds after it was stored."""


def main() -> int:
    verb, address, seed = sys.argv[1:]
    namespace = kvdir.Namespace.create(
        model="exchange",
        weights="none",
        kv_dtype="uint8",
        layout="NHD",
        block_tokens=16,
        position="none:0",
        parallel="replicated",
        adapter="none",
        hash_scheme="kvdir:sha256",
        hash_seed="0",
        cache_policy="exact",
        groups=[{"kind": "full", "layers": 1, "kv_heads": 1, "head_dim": 128}],
    )
    fingerprints = kvdir.Fingerprints.chain([seed.encode()])
    bytes_of = hashlib.shake_256(seed.encode()).digest(namespace.block_bytes)
    expected = np.frombuffer(bytes_of, np.uint8).reshape(1, -1)
    with peer_agent.connect(address, namespace=namespace) as engine:
        if verb == "store":
            stored = engine.store(fingerprints, expected.copy())
            print(f"stored: {stored.stored}")
            return 0
        into = np.zeros_like(expected)
        for _ in range(ATTEMPTS):
            result = engine.load(fingerprints, into=into, deadline_s=DEADLINE_S)
            if not len(result.recompute):
                break
        equal = bool((into == expected).all())
        print(f"loaded: {result}; bytes equal: {equal}")
        return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
