"""Figures of scores: one prompt scored at many instances, beside the lookup it is made of, in the same rounds.

Owns the measuring; `kvdir bench score` prints it. Every instance has a prefix of its own length of the prompt in GPU memory and
a longer one in host memory: as many different holder sets as there can be, which is the worst that a prompt can meet. Parts are
timed by the thread's CPU time, because the machine may be doing something else. Does not: judge a figure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median
from time import thread_time
from typing import Any

from kvdir.core.admission import Welcomed
from kvdir.core.best_tiers import Answered
from kvdir.core.directory import Directory, Hello, Limits
from kvdir.core.event import Event
from kvdir.core.namespaces import Announced
from kvdir.core.score import score
from kvdir.core.serving import Engines, Serving
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch, open_index
from kvdir.location import Tier
from kvdir.namespace import Namespace
from kvdir.rpc.lookup_codec import encode_lookup
from kvdir.rpc.score_codec import encode_scores

__all__ = ["run_score_bench"]

ASKED = 1_024
INSTANCES = (4, 64, 256)
ROUNDS = 30
COLD_ROUNDS = 5
SPACE = Namespace.announced(model="bench", block_tokens=16, hash_scheme="vllm:sha256", hash_seed="builtin")

Advance = Callable[..., None]


def run_score_bench(*, advance: Advance = lambda n=1.0, text=None: None) -> dict[str, Any]:
    """rows: by instances, CPU microseconds. lookup_new_us: when the lookup meets its holder sets for the first time."""
    rng = random.Random(1)
    prompt = Fingerprints(rng.randbytes(ASKED * 32), 32)
    rows = []
    for instances in INSTANCES:
        rows.append(_row(instances, prompt, rng))
        advance(1.0 / len(INSTANCES), f"{instances} instances")
    return {"asked_blocks": ASKED, "rows": rows}


def _row(instances: int, prompt: Fingerprints, rng: random.Random) -> dict[str, Any]:
    names = [f"n{number // 4}/vllm-{number % 4}" for number in range(instances)]
    directory = _filled(names, prompt, rng)
    serving = Engines(Serving(name, frozenset({SPACE.model})) for name in names)
    answer = directory.lookup(SPACE.digest, prompt, now_s=1.0)
    scores = score([[[Answered(SPACE, answer)]]], serving)

    def cold() -> None:
        directory.holders.touch()  # as when a stream came or went
        directory.lookup(SPACE.digest, prompt, now_s=1.0)

    def known() -> None:
        directory.lookup(SPACE.digest, prompt, now_s=1.0)

    def scored() -> None:
        score([[[Answered(SPACE, answer)]]], serving)

    cold_us = _us(cold, COLD_ROUNDS)
    lookup_us = _us(known, ROUNDS) + _us(lambda: encode_lookup(answer).SerializeToString(), ROUNDS)
    score_us = _us(scored, ROUNDS)
    return {
        "instances": instances,
        "holder_sets": len(answer.sets),
        "lookup_new_us": cold_us,
        "lookup_and_encoding_us": lookup_us,
        "score_us": score_us,
        "score_encoding_us": _us(lambda: encode_scores(scores).SerializeToString(), ROUNDS),
        "score_of_lookup": score_us / lookup_us,
    }


def _filled(names: list[str], prompt: Fingerprints, rng: random.Random) -> Directory:
    directory = Directory(open_index(seed=1), Sketch, Limits(), now_s=0.0)
    announced = (Announced(SPACE.digest, SPACE.canonical().encode(), SPACE.block_bytes),)
    for number, name in enumerate(names):
        hello = Hello(node=name, epoch=number + 1, started_unix_ms=0, peer_address="", last_seq=0, namespaces=announced)
        welcomed = directory.hello(hello, now_s=0.0)
        assert isinstance(welcomed, Welcomed)
        held = rng.randrange(1, ASKED + 1)
        gpu = prompt.slice(0, rng.randrange(1, held + 1))
        events = [Event.stored(Tier.GPU, SPACE.digest, gpu), Event.stored(Tier.CPU, SPACE.digest, prompt.slice(0, held))]
        directory.batch(welcomed.stream, 1, events, now_s=0.0)
    return directory


def _us(work: Callable[[], object], rounds: int) -> float:
    spent = []
    for _ in range(rounds):
        started_s = thread_time()
        work()
        spent.append(thread_time() - started_s)
    return median(spent) * 1e6
