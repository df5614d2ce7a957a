"""The namespaces of an agent, from their files; and the words for an engine whose namespace is none of them.

A file is TOML or JSON with the fields of kvdir.Namespace, and optionally `share` (its part of the arena relative to the
others, default 1) and `tenant_salt` or `tenant_salt_file`. All faults of all files are reported at once.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdir.errors import ConfigError, NamespaceError
from kvdir.namespace import Namespace


@dataclass(frozen=True, slots=True)
class Served:
    """A namespace and its share of the arena, relative to the others."""

    namespace: Namespace
    share: float = 1.0


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
    share = fields.pop("share", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or share <= 0:
        raise ValueError(f"share: must be a positive number, is {share!r}")
    if "tenant_salt_file" in fields:
        fields["tenant_salt"] = (path.parent / fields.pop("tenant_salt_file")).read_text().strip()
    return Served(Namespace.create(**fields), float(share))


def explain_unknown(digest: bytes, canonical: bytes, known: Iterable[Namespace]) -> str:
    """Why this namespace is not served: the differences to the nearest one that is."""
    candidates = list(known)
    names = ", ".join(namespace.short for namespace in candidates)
    try:
        asked = Namespace.from_canonical(canonical)
    except NamespaceError as error:
        return f"namespace {digest.hex()[:16]} is not served here (here: {names}), and its description cannot be read: {error}"
    if asked.digest != digest:
        return (
            f"digest {digest.hex()[:16]} is not that of the description sent ({asked.short}): both sides need the same release"
        )
    nearest = min(candidates, key=lambda namespace: len(Namespace.diff(asked, namespace)))
    differences = "; ".join(Namespace.diff(asked, nearest))
    return f"namespace {asked.short} is not served here; the nearest one, {nearest.short}, differs: {differences}"
