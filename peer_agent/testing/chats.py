"""A small trace for demos in tests."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_chats(path: Path) -> Path:
    """60 requests of 10 chats that grow and share their first block, so that peers have what a node lacks."""
    rng, lengths, lines = random.Random(5), dict.fromkeys(range(10), 3), []
    for number in range(60):
        chat = rng.randrange(10)
        lengths[chat] += rng.randrange(3)
        blocks = [0, *(1000 * (chat + 1) + at for at in range(lengths[chat]))]
        lines.append(
            json.dumps({"timestamp": number, "input_length": 512 * len(blocks), "output_length": 1, "hash_ids": blocks})
        )
    path.write_text("\n".join(lines))
    return path
