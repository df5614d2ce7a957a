"""The indexer API of RFC Mooncake #1403, answered from the directory: so that routers written for it ask us unchanged.

    POST /query           tokens -> every name they have in a namespace of the model -> scores -> counts by instance
    POST /query_by_hash   the same from hashes
    POST /register        follows an engine's events from here on, as an agent would; /unregister ends that at once
    GET  /workers         what is followed, and how far it can be believed
    GET  /health          whether to ask here

Rules: what a router is told is a hint with its trust beside it. Registering twice alike changes nothing; a rank or an endpoint
that is taken is refused, as is a stream too many. Registrations live as long as the process: routers repeat them, as they must
with every implementation. All of it runs on the event loop but what takes long, which has threads: reading and hashing long
prompts, adding up and writing what many instances have.
Does not: HTTP (http_server.py), follow streams (indexer_engines.py), or know the shapes of requests and answers (indexer_*.py).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs

import msgspec

from kvdir.core.instance import parse
from kvdir.core.policy import ALL, Grant
from kvdir.core.score import Scores
from kvdir.engines.events import tenant_of
from kvdir.errors import (
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    KvdirError,
    Overloaded,
    TooLarge,
    Unavailable,
    UnknownNamespace,
    Unsupported,
)
from kvdir.location import MinTrust, NodeTrust
from kvdir.rpc.interceptors import CallObserver
from kvdir.server.host_header import foreign_page
from kvdir.server.http_server import Request, Response
from kvdir.server.indexer_answers import Hit, Listener, agent_document, query_answer, worker_document
from kvdir.server.indexer_names import instance_id_of, registered_stream
from kvdir.server.indexer_requests import (
    DEFAULT_TENANT,
    Api,
    BadRequest,
    Conflict,
    NotFound,
    Query,
    Registration,
    read_body,
    read_query,
    read_registration,
    read_unregistration,
)
from kvdir.server.prompt_names import Named, Naming, Scope, by_hashes, by_tokens, names
from kvdir.server.score_source import ScoreSource, scored

ResultT = TypeVar("ResultT")

MAX_REGISTRATIONS = 256
MAX_INSTANCES = 4_096
THREAD_BYTES = 64 * 2**10
"""Bodies from this size on are read and hashed in a thread: some 10,000 tokens."""
THREAD_INSTANCES = 128
"""Answers of more are written in a thread: some 15 us each."""
_MSGPACK = frozenset(("application/msgpack", "application/x-msgpack"))


class Followed(Protocol):
    """The event streams that are followed for routers. Fakes of it are in tests; the real one is indexer_engines.py."""

    def follow(self, registration: Registration) -> None:
        """From now on. Raises KvdirError with the reason why not."""
        ...

    async def leave(self, registration: Registration) -> None:
        """Its blocks are gone for everybody when this returns, within a bounded time."""
        ...

    def listeners(self) -> Iterable[Listener]: ...


class Indexer:
    """See the module docstring. observer: calls are counted as "indexer/query" and so on. not_ready: of the coordinator, in
    words; draining: whether nobody should come any more. sees: whose namespaces are answered about: callers are nobody here, so
    it is the same for all. loopback: browsers of this machine reach it, so whose page asks is looked at.
    """

    def __init__(
        self,
        source: ScoreSource,
        followed: Followed,
        observer: CallObserver,
        *,
        max_fingerprints: int,
        not_ready: Callable[[], str],
        draining: Callable[[], bool],
        sees: Callable[[], Grant] = lambda: ALL,
        loopback: bool = False,
    ) -> None:
        self._source = source
        self._followed = followed
        self._observer = observer
        self._max_fingerprints = max_fingerprints
        self._not_ready = not_ready
        self._draining = draining
        self._sees = sees
        self._loopback = loopback
        self._registered: dict[tuple[str, str, int], Registration] = {}
        self._routes: Mapping[tuple[str, str], Callable[[Request], Any]] = {
            ("POST", "/query"): self._query,
            ("POST", "/query_by_hash"): self._query_by_hash,
            ("POST", "/register"): self._register,
            ("POST", "/unregister"): self._unregister,
            ("GET", "/workers"): self._workers,
            ("GET", "/health"): self._health,
        }

    async def answer(self, request: Request) -> Response:
        """One request: never raises for what a client may do wrong."""
        foreign = foreign_page(request.headers, loopback=self._loopback)
        if foreign:
            body = msgspec.json.encode({"error": foreign, "reason": "foreign_page"})
            return Response(HTTPStatus.FORBIDDEN, body + b"\n")
        path = request.target.partition("?")[0]
        route = self._routes.get(("GET" if request.method == "HEAD" else request.method, path))
        if route is None:
            return self._no_route(path)
        name, began_s, status = f"indexer{path}", time.perf_counter(), HTTPStatus.INTERNAL_SERVER_ERROR
        self._observer.began(name)
        try:
            status, document = await route(request)
        except KvdirError as error:
            status, document = _refusal(error)
        finally:
            self._observer.ended(name, status.name, time.perf_counter() - began_s)
        kind, encode = ("application/msgpack", msgspec.msgpack.encode) if _msgpack(request) else (None, msgspec.json.encode)
        body = encode(document)
        return Response(status, body, kind) if kind else Response(status, body + b"\n")

    def _no_route(self, path: str) -> Response:
        others = sorted(method for method, known in self._routes if known == path)
        if others:
            words, status = f"{path} takes {' or '.join(others)}", HTTPStatus.METHOD_NOT_ALLOWED
        else:
            words, status = f"try {', '.join(known for _, known in self._routes)}", HTTPStatus.NOT_FOUND
        return Response(status, msgspec.json.encode({"error": words, "reason": "no_route"}) + b"\n")

    # -- questions -------------------------------------------------------------------------------------------------------

    async def _query(self, request: Request, *, by_hash: bool = False) -> tuple[HTTPStatus, Any]:
        large = len(request.body) >= THREAD_BYTES
        query: Query = await _run(large, lambda: read_query(_body(request), by_hash=by_hash))
        scope = Scope(model=query.model, adapter=query.adapter, cache_salt=query.cache_salt, tenant_id=query.tenant)
        sees = self._sees()
        visible = [known.namespace for known in self._source.namespaces if known.namespace.tenant in sees]
        spaces = [space for space in visible if scope.holds(space)]
        if not spaces:
            self._require_model(query, {space.model for space in visible if space.tenant in scope.tenants})
        named: Named = await _run(large, lambda: names(spaces, _naming(query), block_tokens=query.block_tokens))
        scores = Scores((), ())
        if named.parts:
            scores = await scored(
                self._source,
                named.parts,
                max_instances=MAX_INSTANCES,
                max_fingerprints=self._max_fingerprints,
                tenants=sees,
            )
        sizes = {space.block_tokens for space in spaces}
        block_tokens = query.block_tokens or (sizes.pop() if len(sizes) == 1 else 0)
        hits = self._hits(query, scores)
        written = functools.partial(
            query_answer, hits, scores, skipped=named.skipped, api=query.api, tenant=query.tenant, block_tokens=block_tokens
        )
        return HTTPStatus.OK, await _run(len(hits) > THREAD_INSTANCES, written)

    async def _query_by_hash(self, request: Request) -> tuple[HTTPStatus, Any]:
        return await self._query(request, by_hash=True)

    def _hits(self, query: Query, scores: Scores) -> list[Hit]:
        """Of the tenant's instances, those with most first; registered ones and their ranks also with nothing."""
        hits: dict[str, Hit] = {}
        if tenant_of(query.tenant) not in self._sees():
            return []
        for item in scores.instances:
            tenant, instance_id = instance_id_of(item.instance)
            if tenant == query.tenant and query.instance_id in ("", instance_id):
                hits[instance_id] = Hit.of(instance_id, item, scores)
        for (tenant, instance_id, rank), known in self._registered.items():
            if (tenant, known.model) == (query.tenant, query.model) and query.instance_id in ("", instance_id):
                hits[instance_id] = hits.get(instance_id, Hit(instance_id)).with_rank(rank)
        return list(hits.values())

    def _seen(self) -> Iterator[Registration]:
        """What is registered for tenants that may be answered about: the policy may have changed since."""
        sees = self._sees()
        return (item for item in self._registered.values() if tenant_of(item.tenant) in sees)

    def _ranks(self, tenant: str, instance_id: str) -> list[Registration]:
        found = [item for key, item in self._registered.items() if key[:2] == (tenant, instance_id)]
        return sorted(found, key=lambda item: item.dp_rank or 0)

    def _require_model(self, query: Query, models: set[str]) -> None:
        """models: those that this query may know of; another tenant's are as unknown as those that nobody has."""
        models = models | {item.model for item in self._seen() if item.tenant == query.tenant}
        if query.model in models:
            return  # of another adapter: nobody has anything
        shown = ", ".join(sorted(models)[:8])
        words = f"no engine or node here serves model {query.model!r}; known: {shown or 'none yet'}"
        raise NotFound(words, reason="unknown_model", field=query.api.value)

    # -- what is followed ------------------------------------------------------------------------------------------------

    async def _register(self, request: Request) -> tuple[HTTPStatus, Any]:
        if self._draining():
            raise Unavailable("this coordinator is going down: register with another one")
        item = read_registration(_body(request))
        self._require_tenant(item.tenant)
        known = self._registered.get(item.key)
        if known is None:
            self._refuse_conflict(item)
            registered_stream(item.node, item.tenant, item.instance_id, item.dp_rank)
            self._followed.follow(item)
            self._registered[item.key] = item
        elif not known.alike(item):
            raise _conflict(f"{item.shown_key} is registered with other values: unregister it first")
        if item.api is Api.DYNAMO:
            return HTTPStatus.CREATED, {"status": "ok", "instance_id": item.given}
        return HTTPStatus.OK, {"status": "registered successfully", "instance_id": item.given}

    def _require_tenant(self, tenant: str) -> None:
        """Raises Forbidden: its namespaces could not be asked about here, and whoever calls is nobody."""
        if not self._sees().every and tenant_of(tenant) not in self._sees():
            raise Forbidden(f"tenant {tenant} is none of the indexer's: see indexer_identity and the policy file")

    def _refuse_conflict(self, item: Registration) -> None:
        for other in self._registered.values():
            if other.endpoint == item.endpoint:
                raise _conflict(f"endpoint {item.endpoint} is registered for {other.shown_key}: every block would count twice")
            if other.key[:2] == item.key[:2] and (other.model, other.node) != (item.model, item.node):
                raise _conflict(f"instance {item.instance_id} is registered for model {other.model!r}, node {other.node!r}")
            if other.key[:2] == item.key[:2] and None in (other.dp_rank, item.dp_rank):
                raise _conflict(f"instance {item.instance_id} has several ranks: register each with its dp_rank")
        if len(self._registered) >= MAX_REGISTRATIONS:
            raise Overloaded(f"{MAX_REGISTRATIONS} streams are registered here, which is the limit: unregister some")

    async def _unregister(self, request: Request) -> tuple[HTTPStatus, Any]:
        wanted = read_unregistration(_body(request))
        found = [
            item
            for item in self._ranks(wanted.tenant, wanted.instance_id)
            if wanted.dp_rank is None or (item.dp_rank or 0) == wanted.dp_rank
        ]
        if not found:
            rank = "" if wanted.dp_rank is None else f" rank {wanted.dp_rank}"
            words = f"instance {wanted.instance_id}{rank} is not registered for tenant {wanted.tenant}"
            raise NotFound(words, reason="not_found", field="instance_id")
        for item in found:
            del self._registered[item.key]
        await asyncio.gather(*(self._followed.leave(item) for item in found))
        if wanted.api is Api.DYNAMO:
            return HTTPStatus.OK, {"status": "ok"}
        removed = [item.shown_key for item in found]
        return HTTPStatus.OK, {"status": "unregistered successfully", "removed_instances": removed}

    async def _workers(self, request: Request) -> tuple[HTTPStatus, Any]:
        wanted = {name: values[-1] for name, values in parse_qs(request.target.partition("?")[2]).items()}
        model, group = wanted.get("model_name", ""), wanted.get("routing_group") or wanted.get("tenant_id", "")
        trusts = {trust.node: trust for trust in self._source.trusts()}
        listeners = {listener.stream: listener for listener in self._followed.listeners()}
        out = []
        for tenant, instance_id in dict.fromkeys(item.key[:2] for item in self._seen()):
            ranks = [item for item in self._ranks(tenant, instance_id) if model in ("", item.model)]
            if ranks and group in ("", tenant):
                named = [(item, registered_stream(item.node, item.tenant, item.instance_id, item.dp_rank)) for item in ranks]
                out.append(worker_document(named, listeners, trusts))
        if group in ("", DEFAULT_TENANT):
            out += self._agents(model, trusts)
        return HTTPStatus.OK, out

    def _agents(self, model: str, trusts: Mapping[str, NodeTrust]) -> Iterable[dict[str, Any]]:
        """Engines that agents follow, by the model they have announced blocks of."""
        found: dict[tuple[str, str], list[tuple[int, NodeTrust]]] = {}
        for stream, models, _ in self._source.serving(MinTrust.ANY, self._sees()):
            of = parse(stream)
            if of.engine and instance_id_of(of.instance)[1] == of.instance and stream in trusts:
                for name in models:
                    if model in ("", name):
                        found.setdefault((of.instance, name), []).append((of.dp_rank or 0, trusts[stream]))
        return [agent_document(instance, name, sorted(ranks)) for (instance, name), ranks in sorted(found.items())]

    async def _health(self, request: Request) -> tuple[HTTPStatus, Any]:
        if self._draining():
            return HTTPStatus.SERVICE_UNAVAILABLE, {"status": "draining"}
        return HTTPStatus.OK, {"status": "ok", "kvdir": {"remark": self._not_ready()}}


def _naming(query: Query) -> Naming:
    if query.tokens is None:
        return by_hashes(query.hashes, local=query.local)
    return by_tokens(query.tokens, adapter=query.adapter, adapter_path=query.adapter_path, cache_salt=query.cache_salt)


def _body(request: Request) -> Mapping[str, Any]:
    return read_body(request.body, msgpack=_msgpack(request))


def _msgpack(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() in _MSGPACK


async def _run(large: bool, work: Callable[[], ResultT]) -> ResultT:
    return await asyncio.to_thread(work) if large else work()


def _conflict(words: str) -> Conflict:
    return Conflict(words, reason="invalid_registration")


def _refusal(error: KvdirError) -> tuple[HTTPStatus, dict[str, str]]:
    """Status and words. reason and field as Mooncake's conductor names them; Dynamo has `error` alone."""
    document = {"error": str(error), "reason": error.code}
    match error:
        case BadRequest():
            document["reason"] = error.reason
            if error.field:
                document["field"] = error.field
            return error.status, document
        case TooLarge():
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, document
        case InvalidInput():
            return HTTPStatus.BAD_REQUEST, document
        case Forbidden():
            return HTTPStatus.FORBIDDEN, document
        case UnknownNamespace():
            return HTTPStatus.NOT_FOUND, document
        case Overloaded() | Unavailable():
            return HTTPStatus.SERVICE_UNAVAILABLE, document
        case DeadlineExceeded():
            return HTTPStatus.GATEWAY_TIMEOUT, document
        case Unsupported():
            return HTTPStatus.NOT_IMPLEMENTED, document
    return HTTPStatus.INTERNAL_SERVER_ERROR, document
