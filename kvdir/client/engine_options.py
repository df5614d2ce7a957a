"""How engine streams are asked for, in one line each:

    vllm=tcp://10.0.0.5:5557,model=llama,replay=tcp://10.0.0.5:5558,hash=vllm:sha256_cbor,seed=0,name=vllm-0,ranks=2
    vllm=http://10.0.0.5:8000         all of that, but for hash and seed, from the engine's own server (engine_sources.py)
    vllm=bind:tcp://127.0.0.1:5557    the engine connects to us: vLLM does wherever its endpoint has no `*`

Rules: DIALECT=ENDPOINT begins an engine, KEY=VALUE after it says more about that one; so several may stand in one list, and a
list may be cut anywhere between two of them. All faults at once. Asks nobody. Formats: docs/engines/events.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvdir.core.instance import MAX_RANKS
from kvdir.engines import DIALECTS
from kvdir.errors import InvalidInput

EXAMPLE = "vllm=tcp://127.0.0.1:5557,model=NAME"
BUILTIN = "builtin"
_SCHEMES = {"vllm": "vllm:sha256", "sglang": "sglang:sha256", "dynamo": "dynamo:xxh3"}
"""What each engine hashes by unless told otherwise; of the others nobody knows."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^/:\s]+):(?P<port>[0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """One engine. endpoint: tcp://, ipc:// or http:// as written, without `bind:`.

    name: of the engine in the directory, NODE/NAME. replay: endpoint of the replay socket; "": none. ranks: data-parallel
    ranks, each at the port of the one before plus 1. rank: the only one that this is about; None: all. block_tokens: where
    events name none. salted: a sequence without a cache salt is worth a finding. quiet_s: so long an engine may say nothing
    before that is one. full_reports: the engine is run with kv_cache_report_mode=full. owner: the backend (mooncake) or worker
    (dynamo) whose events to take; "": the first that is named.
    """

    dialect: str
    endpoint: str
    name: str
    bind: bool = False
    model: str = ""
    replay: str = ""
    hash_scheme: str = "opaque"
    hash_seed: str = BUILTIN
    ranks: int = 1
    rank: int | None = None
    topic: str = ""
    block_tokens: int = 0
    salted: bool = False
    quiet_s: float = 60.0
    full_reports: bool = False
    max_blocks: int = 8 << 20
    owner: str = ""

    @property
    def discovers(self) -> bool:
        """Whether the engine's own server says where its streams are."""
        return self.endpoint.startswith(("http://", "https://"))


def read_engines(parts: Iterable[str]) -> tuple[tuple[EngineOptions, ...], list[str]]:
    """The engines of a list, and everything that is wrong with it, in words."""
    faults: list[str] = []
    described: list[dict[str, str]] = []
    for part in (piece.strip() for item in parts for piece in item.split(",")):
        key, equals, value = part.partition("=")
        if not part:
            continue
        if not equals or not value:
            faults.append(f"{part!r} is not KEY=VALUE; an engine is written {EXAMPLE}")
        elif key in DIALECTS:
            described.append({"dialect": key, "endpoint": value})
        elif not described:
            faults.append(f"{part!r} comes before any engine, which begins with one of {', '.join(f'{d}=' for d in DIALECTS)}")
        elif key in described[-1]:
            faults.append(f"{described[-1]['endpoint']}: {key} is given twice")
        else:
            described[-1][key] = value
    engines: list[EngineOptions] = []
    for fields in described:
        taken = {engine.name for engine in engines}
        engine, wrong = _engine(fields, taken)
        faults += [f"{fields['dialect']}={fields['endpoint']}: {words}" for words in wrong]
        if engine is not None and not wrong:
            engines.append(engine)
    faults += _conflicts(engines)
    return tuple(engines), faults


def parse_engine(text: str) -> EngineOptions:
    """Exactly one. Raises InvalidInput with every fault."""
    engines, faults = read_engines([text])
    if not faults and len(engines) != 1:
        faults.append(f"{text!r} describes {len(engines)} engines; one is written {EXAMPLE}")
    if faults:
        raise InvalidInput("; ".join(faults))
    return engines[0]


def conflict(one: EngineOptions, other: EngineOptions) -> str:
    """Why two engines cannot both be listened to; empty when they can."""
    where = f"{one.dialect}={one.endpoint}"
    if one.name == other.name:
        if one.rank is None or other.rank is None:
            return (
                f"{where}: another engine is called {one.name!r}: give each a name of its own, or to ranks of one engine rank=N"
            )
        if one.rank == other.rank:
            return f"{where}: rank {one.rank} of {one.name!r} is given twice"
    both = _endpoints(one.endpoint, one.ranks) & _endpoints(other.endpoint, other.ranks)
    if both:
        return f"{where}: {other.name!r} listens to {min(both)} already, so every block would be counted twice"
    return ""


def _conflicts(engines: list[EngineOptions]) -> list[str]:
    pairs = ((one, other) for at, one in enumerate(engines) for other in engines[:at])
    return [words for one, other in pairs if (words := conflict(one, other))]


def _engine(fields: Mapping[str, str], taken: set[str]) -> tuple[EngineOptions | None, list[str]]:
    dialect, faults = fields["dialect"], []
    values: dict[str, Any] = {"hash_scheme": _SCHEMES.get(dialect, "opaque")}
    for key, text in fields.items():
        if key in ("dialect", "endpoint"):
            continue
        if key not in _KEYS:
            faults.append(f"{key}= is unknown; known: {', '.join(_KEYS)}")
            continue
        name, read = _KEYS[key]
        try:
            values[name] = read(text)
        except ValueError as error:
            faults.append(f"{key}={text}: {error}")
    endpoint = fields["endpoint"]
    bind = endpoint.startswith("bind:")
    number = 0
    while f"{dialect}-{number}" in taken:
        number += 1
    values.setdefault("name", f"{dialect}-{number}")
    engine = EngineOptions(dialect=dialect, endpoint=endpoint.removeprefix("bind:"), bind=bind, **values)
    return engine, faults + _faults(engine)


def _faults(engine: EngineOptions) -> list[str]:
    out = []
    if engine.discovers:
        if engine.dialect != "vllm":
            out.append(f"{engine.dialect} has no server that says where its events are: give their endpoint, tcp://HOST:PORT")
        if engine.bind or engine.replay or engine.ranks > 1:
            out.append("with http:// the engine itself says endpoint, replay and ranks: leave out bind:, replay= and ranks=")
    else:
        out += [f"{what}: {words}" for what, words in _endpoint_faults(engine)]
        if not out and (both := _endpoints(engine.endpoint, engine.ranks) & _endpoints(engine.replay, engine.ranks)):
            out.append(f"{min(both)} would be for events and for a replay: endpoint and replay= need {engine.ranks} ports each")
        if not engine.model:
            out.append("model= is required: events do not say whose blocks they are about")
    if engine.ranks > 1 and engine.rank is not None:
        out.append("rank= names one rank, ranks= says how many there are: give one of them")
    if not _NAME.fullmatch(engine.name):
        out.append(f"name={engine.name}: must be letters, digits, '.', '_' and '-', 64 at most")
    return out


def _endpoint_faults(engine: EngineOptions) -> Iterable[tuple[str, str]]:
    for what, endpoint in (("endpoint", engine.endpoint), ("replay", engine.replay)):
        if what == "replay" and not endpoint:
            continue
        if endpoint.startswith("ipc://") and endpoint.removeprefix("ipc://"):
            if engine.ranks > 1:
                yield what, f"{endpoint}: several ranks need tcp, since each has a port of its own"
            continue
        match = _TCP.fullmatch(endpoint)
        if match is None or not 0 < int(match["port"]) <= 65_536 - engine.ranks:
            forms = "tcp://HOST:PORT, ipc://PATH" + (
                ", bind: and one of these, or http://HOST:PORT" if what == "endpoint" else ""
            )
            yield what, f"{endpoint!r} is none of {forms}"
        elif match["host"] == "*":
            yield what, f"{endpoint}: '*' is where the engine listens: write its address, or 127.0.0.1 on this host"


def _endpoints(first: str, ranks: int) -> set[str]:
    return {at_rank(first, rank) for rank in range(ranks)}


def at_rank(endpoint: str, rank: int) -> str:
    """Where the rank-th data-parallel rank publishes: the port plus its number, as vLLM does it."""
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}" if rank and endpoint.startswith("tcp://") else endpoint


def _scheme(text: str) -> str:
    from kvdir.hashing import OPAQUE, parse  # with numpy, which whoever has no engine does not need

    if text != OPAQUE:
        parse(text)
    return text.removesuffix(":low64")


def _count(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdigit() or not low <= int(text) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(text)

    return read


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError("must be a positive number of seconds")
    return value


def _flag(*, yes: str, no: str) -> Callable[[str], bool]:
    def read(text: str) -> bool:
        if text not in (yes, no):
            raise ValueError(f"must be {yes} or {no}")
        return text == yes

    return read


_KEYS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "name": ("name", str),
    "model": ("model", str),
    "replay": ("replay", str),
    "hash": ("hash_scheme", _scheme),
    "seed": ("hash_seed", str),
    "ranks": ("ranks", _count(1, 1024)),
    "rank": ("rank", _count(0, MAX_RANKS - 1)),
    "topic": ("topic", str),
    "block_tokens": ("block_tokens", _count(1, 1 << 20)),
    "salted": ("salted", _flag(yes="required", no="any")),
    "quiet_s": ("quiet_s", _seconds),
    "reports": ("full_reports", _flag(yes="full", no="new")),
    "owner": ("owner", str),
    "max_blocks": ("max_blocks", _count(1, 1 << 28)),
}


def host_of(url: str) -> str:
    """The host of an http address, as it is written in an endpoint."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host
