"""Whether nodes that serve one model can share blocks: namespaces compared field by field. Pure.

Rules: two namespaces are *alike* when all is equal but rank, adapter and tenant, which differ within one healthy deployment.
Nodes of one model that have no alike namespaces never hit each other's blocks, and nothing else reports that. Blocks that
engines only announce are compared among themselves: they are for routers, and never match those that move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import combinations, islice

from kvdir.core.instance import parse
from kvdir.diagnosis.finding import Finding, Verdict, in_order
from kvdir.namespace import NO_TENANT, Namespace
from kvdir.parallel import REPLICATED

NO_ADAPTER = "none"
MAX_FINDINGS = 20
"""Pairs that are told; a cluster with more differences than that has a few causes, not many."""

_FIXES = {
    "hash_seed": (
        "give every engine of this model the same seed: for vLLM the same PYTHONHASHSEED in each server's environment, or in "
        "none; then say that seed as `hash_seed` of the namespace (builtin: none is set)"
    ),
    "hash_scheme": "give every engine the same hash algorithm (vLLM: --prefix-caching-hash-algo), and say it as hash_scheme",
    "block_tokens": "start every engine with the same block or page size (vLLM: --block-size, SGLang: --page-size)",
    "weights": "load the same weights everywhere, or serve them under another name: the bytes of their blocks differ",
    "kv_dtype": "start every engine with the same --kv-cache-dtype",
    "layout": "use the same engine version, layout and way in (connector or tier) everywhere",
    "groups": "the models differ in shape: serve them under different names",
    "cache_policy": "alter blocks everywhere in the same way, or nowhere",
}
_FIELDS = tuple(field.name for field in dataclasses.fields(Namespace))
_CHECKS = {"hash_seed": "hash seed", "hash_scheme": "hash seed", "block_tokens": "block size"}


def check_namespaces(announced: Mapping[str, Sequence[Namespace]]) -> list[Finding]:
    """announced: namespaces by the name of the stream. One finding per pair of groups of nodes that share nothing, by cause."""
    found: list[Finding] = []
    served: dict[tuple[str, bool], dict[str, list[Namespace]]] = {}
    for stream, namespaces in announced.items():
        for namespace in namespaces:
            served.setdefault((namespace.model, namespace.is_announced), {}).setdefault(stream, []).append(namespace)
    for (model, only_told), by_stream in sorted(served.items()):
        found += _strangers(model, by_stream, only_told=only_told)
    found += _beside_engines(announced)
    compared = f"models: {len({model for model, _ in served})}; no difference of this kind"
    checks = ("namespaces", "hash seed", "block size")
    found += [in_order(check, compared) for check in checks if not any(item.check == check for item in found)]
    return found[:MAX_FINDINGS]


def alike(namespace: Namespace) -> Namespace:
    """What is left when rank, adapter and tenant do not count."""
    return dataclasses.replace(namespace, parallel=REPLICATED, adapter=NO_ADAPTER, tenant=NO_TENANT)


def _strangers(model: str, by_stream: Mapping[str, Sequence[Namespace]], *, only_told: bool) -> list[Finding]:
    """Groups of streams with the same namespaces are compared once."""
    groups: dict[frozenset[Namespace], list[str]] = {}
    for stream, namespaces in sorted(by_stream.items()):
        groups.setdefault(frozenset(map(alike, namespaces)), []).append(stream)
    strangers = ((one, other) for one, other in combinations(groups, 2) if not one & other)
    return [
        _pair(model, one, groups[one], other, groups[other], only_told=only_told)
        for one, other in islice(strangers, MAX_FINDINGS)
    ]


def _pair(
    model: str,
    one: frozenset[Namespace],
    ones: Sequence[str],
    other: frozenset[Namespace],
    others: Sequence[str],
    *,
    only_told: bool,
) -> Finding:
    a, b = min(((a, b) for a in one for b in other), key=lambda pair: (len(_differing(*pair)), pair[0].digest, pair[1].digest))
    fields = _differing(a, b)
    causes = [name for name in fields if name in _CHECKS]
    check = _CHECKS[causes[0]] if causes and set(fields) <= set(_CHECKS) else "namespaces"
    meaning = (
        "a router that hashes prompts for one of them never finds the blocks of the other"
        if only_told
        else "no block of one ever hits at the other, although both serve this model"
    )
    return Finding(
        check=check,
        verdict=Verdict.FAULT,
        subject=f"{_names(ones)} and {_names(others)}",
        seen=f"{model}: " + "; ".join(Namespace.diff(a, b)),
        meaning=meaning,
        fix=". ".join(_FIXES.get(name, f"make {name} the same in the namespaces of both") for name in fields),
    )


def _beside_engines(announced: Mapping[str, Sequence[Namespace]]) -> list[Finding]:
    """Blocks of another size at a node's engine than in its agent's namespace of the same model."""
    found = []
    for stream, namespaces in sorted(announced.items()):
        node = parse(stream).node
        if not parse(stream).engine or node not in announced:
            continue
        for told in namespaces:
            moved = [item for item in announced[node] if item.model == told.model and not item.is_announced]
            sizes = sorted({item.block_tokens for item in moved})
            if sizes and told.block_tokens not in sizes:
                found.append(
                    Finding(
                        check="block size",
                        verdict=Verdict.FAULT,
                        subject=stream,
                        seen=f"{told.model}: the engine has blocks of {told.block_tokens} tokens, its agent of {sizes}",
                        meaning="what the engine announces and what the agent can move are different blocks",
                        fix="put the engine's block size into `block_tokens` of the agent's namespace file",
                    )
                )
    return found


def _differing(a: Namespace, b: Namespace) -> list[str]:
    return [name for name in _FIELDS if getattr(a, name) != getattr(b, name)]


def _names(streams: Sequence[str]) -> str:
    return streams[0] if len(streams) == 1 else f"{streams[0]} (and {len(streams) - 1} like it)"
