"""The namespaces of an agent, from their files; and the words for an engine whose namespace is none of them, or hashes
otherwise.

A file is TOML or JSON with the fields of kvdir.Namespace, and optionally `share` (its part of the arena relative to the
others, default 1), `prefill_tokens_per_s` (of engines that do not say it themselves) and `tenant_salt` or `tenant_salt_file`.
All faults of all files are reported at once.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdir.errors import ConfigError, InvalidInput, NamespaceError
from kvdir.hashing import explain_mismatch
from kvdir.namespace import Namespace

MAX_PROBE_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Served:
    """A namespace, its share of the arena relative to the others, and how fast its engines recompute (0: not known)."""

    namespace: Namespace
    share: float = 1.0
    prefill_tokens_per_s: float = 0.0


def read_namespaces(files: Sequence[str]) -> tuple[Served, ...]:
    """One per file. ConfigError lists every fault of every file."""
    served, faults = [], []
    for name in files:
        try:
            served.append(_read(Path(name)))
        except NamespaceError as error:
            faults += [f"{name}: {fault}" for fault in error.faults]
        except (OSError, ValueError, TypeError) as error:
            faults.append(f"{name}: {error}")
    seen: dict[bytes, str] = {}
    for item, name in zip(served, files, strict=False) if not faults else ():
        other = seen.setdefault(item.namespace.digest, name)
        if other != name:
            faults.append(f"{name}: describes the same namespace as {other}")
    if faults:
        raise ConfigError(faults)
    return tuple(served)


def _read(path: Path) -> Served:
    text = path.read_text()
    fields: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    if not isinstance(fields, dict):
        raise ValueError("must be a table of namespace fields")
    share = _positive(fields, "share", default=1.0)
    prefill_tokens_per_s = _positive(fields, "prefill_tokens_per_s", default=0.0)
    if "tenant_salt_file" in fields:
        fields["tenant_salt"] = (path.parent / fields.pop("tenant_salt_file")).read_text().strip()
    return Served(Namespace.create(**fields), share, prefill_tokens_per_s)


def _positive(fields: dict[str, Any], name: str, *, default: float) -> float:
    value = fields.pop(name, None)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}: must be a positive number, is {value!r}")
    return float(value)


def check_probe(probe: bytes, namespace: Namespace) -> None:
    """Raises InvalidInput, with what to set, if an engine's fingerprint of the probe is not what the namespace's scheme gives.

    An empty probe, schemes that cannot be computed here (`opaque`, names of others), and blocks of more than MAX_PROBE_TOKENS,
    whose length an engine may make up, are let through.
    """
    if not probe or namespace.block_tokens > MAX_PROBE_TOKENS:
        return
    words = explain_mismatch(
        probe,
        scheme=namespace.hash_scheme,
        seed=namespace.hash_seed,
        block_tokens=namespace.block_tokens,
        model=namespace.model,
    )
    if words:
        raise InvalidInput(f"namespace {namespace.short}: {words}")


def explain_unknown(digest: bytes, canonical: bytes, known: Iterable[Namespace]) -> str:
    """Why this namespace is not served: the differences to the nearest one that is."""
    candidates = list(known)
    names = ", ".join(namespace.short for namespace in candidates) or "none yet"
    try:
        asked = Namespace.from_canonical(canonical)
    except NamespaceError as error:
        return f"namespace {digest.hex()[:16]} is not served here (here: {names}), and its description cannot be read: {error}"
    if asked.digest != digest:
        return (
            f"digest {digest.hex()[:16]} is not that of the description sent ({asked.short}): both sides need the same release"
        )
    if not candidates:
        return f"namespace {asked.short} is not served here, nor any other yet"
    nearest = min(candidates, key=lambda namespace: len(Namespace.diff(asked, namespace)))
    differences = "; ".join(Namespace.diff(asked, nearest))
    return f"namespace {asked.short} is not served here; the nearest one, {nearest.short}, differs: {differences}"
