"""How registered instances are called in the directory, so that any coordinator can answer for them by the name alone.

    instance "vllm-prefill-node1", rank 0      /~vllm-prefill-node1@0
    the same, with tenant "acme"               /~acme|vllm-prefill-node1@0
    the same, beside the agent of node n1      n1/~vllm-prefill-node1@0

Percent-encoded but for letters, digits and "-._~:". The tilde tells them from engines that an agent follows, whose names have
none. Pure.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from kvdir.core.instance import parse, stream_name
from kvdir.server.indexer_requests import DEFAULT_TENANT

_MARK = "~"
_SAFE = "-._~:"


def engine_name(tenant: str, instance_id: str) -> str:
    """Of an instance that a router registered; reads back with `instance_id_of`."""
    text = quote(instance_id, safe=_SAFE)
    return _MARK + (text if tenant == DEFAULT_TENANT else f"{quote(tenant, safe=_SAFE)}|{text}")


def registered_stream(node: str, tenant: str, instance_id: str, dp_rank: int | None) -> str:
    """Node name of the stream. Raises InvalidInput for a node that cannot be one."""
    return stream_name(node, engine_name(tenant, instance_id), dp_rank)


def instance_id_of(instance: str) -> tuple[str, str]:
    """(tenant, what a router calls it); an instance that nobody registered is the default tenant's, under its own name."""
    engine = parse(instance).engine
    if not engine.startswith(_MARK):
        return DEFAULT_TENANT, instance
    tenant, bar, instance_id = engine.removeprefix(_MARK).partition("|")
    return (unquote(tenant), unquote(instance_id)) if bar else (DEFAULT_TENANT, unquote(tenant))
