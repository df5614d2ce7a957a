"""Where the event streams of an engine are: as written, or as the engine's own HTTP server says.

    GET /kv_event_sources    vLLM since 0.20: {rank: {"endpoint", "replay_endpoint", "publisher", "topic", ...}}; empty: none
    GET /v1/models           OpenAI's list; a LoRA adapter has a `parent`, the model itself has none

Rules: one question has a deadline and at most MAX_BYTES of answer; what cannot be used is refused in words that say what to
set. Blocking: call it off the event loop. Source: vllm/entrypoints/serve/instrumentator/basic.py 0.32.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from kvdir.client.engine_options import EngineOptions, at_rank, host_of
from kvdir.errors import RemoteProtocolError, Unavailable, Unsupported

ASK_S = 2.0
MAX_BYTES = 4 << 20
MAX_SOURCES = 1024
_RANK = re.compile(r"0|[1-9][0-9]{0,3}", re.ASCII)
_CHUNK_BYTES = 64 << 10
_VLLM = '"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"'
_SGLANG = '"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"'


def switch_on(dialect: str) -> str:
    """How an engine is told to publish its events, for people."""
    settings = {"vllm": _VLLM, "sglang": _SGLANG}.get(dialect)
    return f"start it with --kv-events-config '{{{settings}}}'" if settings else "switch on its KV events over ZMQ"


@dataclass(frozen=True, slots=True)
class EngineSource:
    """The stream of one data-parallel rank. rank: None where there is only one. replay: "" for none."""

    rank: int | None
    endpoint: str
    bind: bool
    replay: str
    topic: str
    model: str


def written(engine: EngineOptions) -> tuple[EngineSource, ...]:
    """The sources of an engine that says where they are itself."""
    if engine.ranks == 1:
        return (EngineSource(engine.rank, engine.endpoint, engine.bind, engine.replay, engine.topic, engine.model),)
    return tuple(
        EngineSource(
            rank, at_rank(engine.endpoint, rank), engine.bind, at_rank(engine.replay, rank), engine.topic, engine.model
        )
        for rank in range(engine.ranks)
    )


def discover(engine: EngineOptions, *, timeout_s: float = ASK_S) -> tuple[EngineSource, ...]:
    """Asks the engine's server. Raises Unavailable (nobody answers), Unsupported (no events there), RemoteProtocolError."""
    base = engine.endpoint.rstrip("/")
    said = _get(f"{base}/kv_event_sources", timeout_s)
    if not isinstance(said, dict):
        raise RemoteProtocolError(f"{base}/kv_event_sources: not an object: is this vLLM's server?")
    if len(said) > MAX_SOURCES:
        raise RemoteProtocolError(f"{base}/kv_event_sources: {len(said)} ranks, at most {MAX_SOURCES} are followed")
    if not said:
        raise Unsupported(f"{base}: this engine publishes no events: {switch_on('vllm')}")
    model = engine.model or _model(base, timeout_s)
    sources = [_source(base, key, value, model, alone=len(said) == 1) for key, value in said.items()]
    if engine.rank is not None:
        sources = [source for source in sources if (source.rank or 0) == engine.rank]
        if not sources:
            raise Unsupported(
                f"{base}: this engine has no rank {engine.rank}, but {', '.join(sorted(said))[:80]}: correct rank="
            )
    if len({source.endpoint for source in sources}) != len(sources):
        raise RemoteProtocolError(f"{base}: two ranks of this engine have one endpoint, so one of them cannot be heard")
    return tuple(sorted(sources, key=lambda source: source.rank or 0))


def _source(base: str, key: str, value: Any, model: str, *, alone: bool) -> EngineSource:
    well = isinstance(value, Mapping) and _RANK.fullmatch(key) and isinstance(value.get("endpoint"), str)
    if not well or not isinstance(value.get("replay_endpoint") or "", str):
        raise RemoteProtocolError(f"{base}/kv_event_sources: rank {key!r} is not described as vLLM does it")
    if value.get("publisher") != "zmq" or value.get("enable_kv_cache_events") is False:
        raise Unsupported(f"{base}: rank {key} publishes no events over ZMQ: {switch_on('vllm')}")
    host = host_of(base)
    endpoint, replay = value["endpoint"], value.get("replay_endpoint") or ""
    listens = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
    # vLLM resolves "*:0" to an address of its own; any other address without "*" is one that it connects to.
    bind = not listens and not _binds_itself(endpoint, host)
    return EngineSource(
        None if alone else int(key),
        _from_here(endpoint, host),
        bind,
        _from_here(replay, host),
        str(value.get("topic", "")),
        model,
    )


def _binds_itself(endpoint: str, host: str) -> bool:
    return endpoint.startswith("tcp://") and not endpoint.startswith(("tcp://127.", "tcp://localhost", "tcp://[::1]"))


def _from_here(endpoint: str, host: str) -> str:
    return endpoint.replace("://*:", f"://{host}:").replace("://[::]:", f"://{host}:")


def _model(base: str, timeout_s: float) -> str:
    said = _get(f"{base}/v1/models", timeout_s)
    models = said.get("data") if isinstance(said, dict) else None
    for model in models if isinstance(models, list) else ():
        if isinstance(model, dict) and isinstance(model.get("id"), str) and not model.get("parent"):
            return str(model["id"])
    raise RemoteProtocolError(f"{base}/v1/models names no model: say it with model=")


def _get(url: str, timeout_s: float) -> Any:
    end_s = time.monotonic() + timeout_s
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return json.loads(_read(answer, end_s))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise Unsupported(
                f"{url}: not known there (404): this server is older; give the endpoint, tcp://HOST:PORT"
            ) from error
        raise Unavailable(f"{url}: HTTP {error.code}") from error
    except (OSError, HTTPException) as error:
        raise Unavailable(f"{url}: nobody answers: {getattr(error, 'reason', error)}") from error
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"{url}: the answer is not JSON: is this vLLM's server?") from error


def _read(answer: Any, end_s: float) -> bytes:
    """The body, as far as it may go; a server that drips costs no more than one that says nothing."""
    body = b""
    while len(body) < MAX_BYTES and (chunk := answer.read1(_CHUNK_BYTES)):
        body += chunk
        if time.monotonic() > end_s:
            raise TimeoutError("no whole answer in time")
    return body
