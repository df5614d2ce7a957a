"""The engine streams that routers registered with this coordinator: followed here, published to itself like anybody's.

Rules: a stream is one of the directory's own (epoch, cursor, trust), so a registered engine is trusted, doubted and fenced as
one that an agent follows; `leave` returns when its blocks are gone. Without pyzmq the first registration says what to install.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from kvdir.client.engine_life import Publishing
from kvdir.client.engine_options import EngineOptions
from kvdir.client.engine_streams import EngineStreams
from kvdir.hashing import OPAQUE, parse
from kvdir.server.indexer_answers import Listener
from kvdir.server.indexer_names import engine_name
from kvdir.server.indexer_requests import BadRequest, Registration

_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^/:\s*]+):(?P<port>[0-9]{1,5})|ipc:///?[^\s*]+", re.ASCII)
_SCHEMES = {"vllm": "vllm:sha256", "sglang": "sglang:sha256", "dynamo": "dynamo:xxh3", "mooncake": "dynamo:xxh3"}
"""What each hashes by unless the registration says otherwise; the hash of RFC Mooncake #1527 is Dynamo's."""


class RegisteredEngines:
    """server.indexer.Followed. publishing: to this coordinator."""

    def __init__(self, publishing: Publishing) -> None:
        self._publishing = publishing
        self._by_node: dict[str, EngineStreams] = {}

    def follow(self, registration: Registration) -> None:
        """Raises InvalidInput for an endpoint nobody can connect to or an unknown scheme, and what EngineStreams.add raises."""
        for field, endpoint in (("endpoint", registration.endpoint), ("replay_endpoint", registration.replay)):
            form = _ENDPOINT.fullmatch(endpoint)
            if endpoint and (form is None or not 0 < int(form["port"] or 1) < 65_536):
                words = f"{field} {endpoint!r} is neither tcp://HOST:PORT nor ipc://PATH; '*' is where the engine listens"
                raise BadRequest(words, reason="invalid_value", field=field)
        options = _options(registration)
        if options.hash_scheme != OPAQUE:
            parse(options.hash_scheme)
        node = registration.node
        streams = self._by_node.get(node) or EngineStreams(node, self._publishing)
        streams.add(options)
        self._by_node[node] = streams

    async def leave(self, registration: Registration) -> None:
        node = registration.node
        streams = self._by_node.get(node)
        if streams is None:
            return
        await streams.remove(engine_name(registration.tenant, registration.instance_id), registration.dp_rank)
        if not len(streams) and self._by_node.get(node) is streams:
            del self._by_node[node]

    def listeners(self) -> Iterable[Listener]:
        for streams in tuple(self._by_node.values()):
            found = {item.stream: item.words for item in streams.findings()}
            for item in streams.figures():
                yield Listener(item.stream, item.connected, found.get(item.stream, item.doubt))

    async def close(self) -> None:
        await asyncio.gather(*(streams.close() for streams in self._by_node.values()))


def _options(registration: Registration) -> EngineOptions:
    return EngineOptions(
        dialect=registration.dialect,
        endpoint=registration.endpoint,
        name=engine_name(registration.tenant, registration.instance_id),
        model=registration.model,
        replay=registration.replay,
        hash_scheme=registration.hash_scheme or _SCHEMES[registration.dialect],
        hash_seed=registration.hash_seed or "builtin",
        rank=registration.dp_rank,
        block_tokens=registration.block_tokens,
    )
