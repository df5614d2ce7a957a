"""Configuration: one frozen dataclass per process, read once, handed down.

Rules: each setting is declared in one place (type, default, unit in the name, one sentence of consequence), and flags,
environment, TOML keys, `--help` and docs/configuration.md come from that. Precedence: defaults < file < environment < flags.
Unknown keys and values that do not parse are refused at start, all of them at once. Nothing else reads the environment.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvdir.errors import ConfigError

T = TypeVar("T")

_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)$")
"""Variables that Kubernetes sets in every pod of a namespace for a Service of our name, such as KVDIR_PORT."""

_ELSEWHERE = frozenset({"KVDIR_CACHE", "KVDIR_CUDA_LIBRARY", "KVDIR_SGLANG_SITE", "KVDIR_UCP_LIBRARY"})
"""Of the project, and no settings: where scripts keep what they fetch, and which libraries are loaded (docs/transports.md)."""

_USERINFO = re.compile(r"://[^/\s]*@")
_SECRET_OPTION = re.compile(r"([\w-]*(?:password|secret|token|salt)[\w-]*=)[^&,\s]*", re.IGNORECASE)


def setting(default: Any, help: str, *, metavar: str = "") -> Any:
    """Declares one setting of a config dataclass. Lists default to () and take comma-separated values as text; a TOML table is
    taken for a list of key=value, and a list of tables for one of all of them in turn."""
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar})


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting, as `settings()` reports it. kind: bool, int, float, str or tuple (of str)."""

    name: str
    kind: type
    default: Any
    help: str
    metavar: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def settings(cls: type) -> list[Setting]:
    """The settings of a config dataclass, in order."""
    hints = typing.get_type_hints(cls)
    return [
        Setting(
            field.name,
            _kind(hints[field.name]),
            field.default,
            field.metadata["help"],
            field.metadata["metavar"],
        )
        for field in dataclasses.fields(cls)
    ]


def load(
    cls: type[T],
    *,
    prefix: str,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> tuple[T, dict[str, str]]:
    """The configuration and, per setting, where its value came from ("default", "file", "environment", "flag").

    prefix: of the environment variables, such as "KVDIR_". flags: None values mean "not given". A `faults()` method of `cls`,
    if there is one, returns further faults of the whole. Raises ConfigError with every fault.
    """
    known = {item.name: item for item in settings(cls)}
    values: dict[str, Any] = {}
    sources = dict.fromkeys(known, "default")
    faults: list[str] = []

    def take(name: str, raw: Any, source: str, where: str) -> None:
        try:
            values[name] = _parse(known[name].kind, raw)
            sources[name] = source
        except ValueError as error:
            faults.append(f"{where}: {error}")

    for key, raw in _read_file(file, faults).items():
        if key in known:
            take(key, raw, "file", f"{file}: {key}")
        else:
            faults.append(f"{file}: unknown key {key!r}{_suggest(key, known)}")
    for key, text in (os.environ if environ is None else environ).items():
        name = key.removeprefix(prefix).lower()
        if not key.startswith(prefix) or key.startswith(f"{prefix}_"):
            continue
        if name in known:
            take(name, text, "environment", key)
        elif key not in _ELSEWHERE and not _SERVICE_LINK.search(key):
            faults.append(f"environment: unknown variable {key}{_suggest(key, [prefix + item.upper() for item in known])}")
    for name, raw in (flags or {}).items():
        if raw is not None and raw != ():
            take(name, raw, "flag", known[name].flag)
    config = cls(**values)
    check: Callable[[], list[str]] | None = getattr(config, "faults", None)
    if check is not None and not faults:
        faults += check()
    if faults:
        raise ConfigError(faults)
    return config, sources


def changed(config: object) -> dict[str, Any]:
    """The settings that differ from their defaults, masked, for the log."""
    values = {item.name: (getattr(config, item.name), item.default) for item in settings(type(config))}
    return {name: masked(value) for name, (value, default) in values.items() if value != default}


def masked(value: Any) -> Any:
    """A value without what is secret in it: user and password of URLs, and options that are called like a secret."""
    if isinstance(value, tuple):
        return tuple(map(masked, value))
    return _SECRET_OPTION.sub(r"\1***", _USERINFO.sub("://***@", value)) if isinstance(value, str) else value


def parse_bytes(text: str) -> int:
    """Bytes from "128KiB", "1.5 GiB", "4096" or decimal units ("10MB"); never negative. ValueError with the accepted forms."""
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    body = text.strip().lower().replace(" ", "")
    digits = body.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        count = int(float(digits) * units[body[len(digits) :]])
    except (KeyError, ValueError, OverflowError):
        count = -1
    if count < 0:
        raise ValueError(f"{text!r} is not a size; write 4096, 128KiB, 1.5GiB or 10MB")
    return count


def show_bytes(count: float) -> str:
    """For people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _kind(hint: Any) -> type:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    kind: type = typing.get_origin(hint) or hint
    return kind


def _read_file(file: Path | None, faults: list[str]) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        faults.append(f"{file}: cannot be read: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        faults.append(f"{file}: not valid TOML: {error}")
    return {}


def _parse(kind: type, raw: Any) -> Any:
    if kind is tuple:
        return _parse_list(raw)
    if kind is bool:
        return _parse_bool(raw)
    if kind is int and isinstance(raw, str):
        return parse_bytes(raw) if raw.strip()[-1:].isalpha() else _number(int, raw)
    if kind in (int, float):
        return _number(kind, raw)
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} must be text")
    return raw


def _parse_list(raw: Any) -> tuple[str, ...]:
    if isinstance(raw, dict):
        raw = [f"{key}={value}" for key, value in raw.items()]
    if isinstance(raw, str):
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    if isinstance(raw, list | tuple):
        raw = [",".join(_parse_list(part)) if isinstance(part, dict) else part for part in raw]
        if all(isinstance(part, str) for part in raw):
            return tuple(raw)
    raise ValueError(f"{raw!r} must be a list of texts")


def _parse_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        return raw.lower() in ("1", "true", "yes", "on")
    raise ValueError(f"{raw!r} is not true or false")


def _number(kind: type, raw: Any) -> Any:
    if isinstance(raw, bool) or (kind is int and isinstance(raw, float)):
        raise ValueError(f"{raw!r} must be a whole number")
    try:
        number = kind(raw)
    except (TypeError, ValueError):
        raise ValueError(f"{raw!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{raw!r} must be a finite number")
    return number


def _suggest(name: str, known: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"
