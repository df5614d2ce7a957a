"""`peer-agent doctor`: looks at this node and says what is wrong and how to fix it; then at the cluster, as `kvdir doctor`.

The checks are pure (peer_agent/diagnosis, kvdir/diagnosis); here facts are gathered, each wait with a deadline. It changes
nothing: the data planes are opened on a page of memory of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvdir.cli.doctor import gather, show, why_not_reached
from kvdir.cli.output import output_option
from kvdir.cli.tls import tls_options
from kvdir.errors import ConfigError, KvdirError

if TYPE_CHECKING:
    from kvdir.diagnosis.cluster import ClusterFacts
    from kvdir.rpc.certificates import TlsFiles
    from peer_agent.diagnosis.node import AgentFacts, Endpoint, EngineFacts, NodeFacts, SharedMemory
    from peer_agent.server.config import AgentConfig

PREFIX = "PEER_AGENT_"
GREETINGS = 16
"""Agents that are asked at once."""


@click.command()
@click.argument("address", default="")
@click.option(
    "--config", "config_file", type=click.Path(dir_okay=False, path_type=Path), help="The TOML file that the agent is run with."
)
@click.option("--coordinators", default="", metavar="HOST:PORT,...", help="Instead of those in the configuration.")
@click.option("--endpoint", "endpoints", multiple=True, metavar="tcp://HOST:PORT", help="Where an engine publishes events.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0.01),
    default=2.0,
    show_default=True,
    help="Longest wait for each answer and each connection.",
)
@click.option("--cluster/--no-cluster", default=True, help="Also check what the coordinators say.")
@tls_options
@output_option
def doctor(
    address: str,
    config_file: Path | None,
    coordinators: str,
    endpoints: tuple[str, ...],
    timeout_s: float,
    cluster: bool,
    tls: TlsFiles | None,
    output: str,
) -> None:
    """Why nothing hits: checks of this node, each with what was seen, what it means, and the fix. See docs/doctor.md.

    ADDRESS is where engines attach, such as unix:/dev/shm/kvdir-node1.sock; without one, the one of the configuration.
    Exit code 1 if a check finds a fault; warnings may be as intended.

    \b
    Examples:
      peer-agent doctor --config agent.toml           all that this node is to do
      peer-agent doctor unix:/dev/shm/kvdir-a.sock --coordinators 10.0.0.1:7400
      peer-agent doctor --endpoint tcp://127.0.0.1:5557
    """
    from kvdir.diagnosis.cluster import examine
    from peer_agent.diagnosis.node import examine_node

    config, faults = _configuration(config_file)
    tls = tls or (None if faults else config.tls)
    facts = gather_node(config, faults, address=address, endpoints=endpoints, timeout_s=timeout_s, tls=tls)
    findings = examine_node(facts)
    asked = tuple(filter(None, coordinators.split(","))) or config.coordinators
    if cluster and asked:
        told = gather(asked, timeout_s=timeout_s, reach=True, tls=tls)
        findings += examine(replace(told, greeted=asyncio.run(_greet(told, timeout_s, tls))))
    show(findings, output=output)


def _configuration(file: Path | None) -> tuple[AgentConfig, tuple[str, ...]]:
    """As `peer-agent serve` would take it, or the defaults and what is wrong with it. Without any, there is nothing wrong."""
    from kvdir.config import load
    from peer_agent.server.config import AgentConfig
    from peer_agent.server.listeners import open_tls

    if file is None and not any(name.startswith(PREFIX) for name in os.environ):
        return AgentConfig(), ()
    try:
        config = load(AgentConfig, prefix=PREFIX, file=file)[0]
    except ConfigError as error:
        return AgentConfig(), tuple(error.faults)
    try:
        open_tls(config)
    except ConfigError as error:
        return config, tuple(error.faults)
    return config, ()


# -- gathering -------------------------------------------------------------------------------------------------------------


def gather_node(
    config: AgentConfig,
    faults: tuple[str, ...],
    *,
    address: str,
    endpoints: tuple[str, ...],
    timeout_s: float,
    tls: TlsFiles | None = None,
) -> NodeFacts:
    """Nothing raises: what does not answer is a fact."""
    from peer_agent.diagnosis.node import NodeFacts

    at = address or config.engine_address
    agent, streams, failure = _agent(at, timeout_s, tls)
    wanted = [*endpoints, *(_endpoints(config) if agent is None else ())]
    return NodeFacts(
        address=at,
        agent=agent,
        agent_failure=failure,
        config_faults=faults,
        insecure=config.insecure,
        memory=_shared_memory(agent.arena_path, agent.arena_bytes)
        if agent
        else _shared_memory(config.arena_file, _wanted(config)),
        planes=asyncio.run(_planes(config, timeout_s)),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        engines=tuple(_endpoint(endpoint, timeout_s) for endpoint in wanted),
        streams=streams,
    )


def _agent(address: str, timeout_s: float, tls: TlsFiles | None) -> tuple[AgentFacts | None, tuple[EngineFacts, ...], str]:
    """What the agent says of itself and of the engines it follows, or why it does not."""
    from peer_agent.cli.inventory import ask
    from peer_agent.diagnosis.node import AgentFacts, EngineFacts

    try:
        told = ask(address, timeout_s, tls)
    except KvdirError as error:
        return None, (), str(error)
    facts = AgentFacts(
        node=told["node"],
        arena_path=told["arena_path"],
        arena_bytes=told["arena_bytes"],
        sessions=told["sessions"],
        publishing=told["publishing"],
        namespaces=len(told["namespaces"]),
        committed=sum(item["committed"] for item in told["namespaces"]),
        refused=tuple((item["engine"], item["words"]) for item in told["refused"]),
    )
    streams = tuple(
        EngineFacts(
            stream=item["stream"],
            endpoint=item["endpoint"],
            batches=item["batches"],
            state=item["state"],
            findings=tuple(item["findings"]),
        )
        for item in told["engine_streams"]
    )
    return facts, streams, ""


def _wanted(config: AgentConfig) -> int:
    """Bytes that the arena will take, and the replica may."""
    arena_bytes = (config.arena_bytes if config.namespaces else 0) + config.accept_bytes * config.accept_namespaces
    return arena_bytes + (config.replica_max_bytes if config.replica else 0)


def _shared_memory(path: str, wanted_bytes: int) -> SharedMemory | None:
    """None where the directory does not exist: the configuration's faults are elsewhere."""
    from peer_agent.diagnosis.node import SharedMemory

    directory = os.path.dirname(path) or "."
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return SharedMemory(
        path=directory,
        total_bytes=found.f_frsize * found.f_blocks,
        free_bytes=found.f_frsize * found.f_bavail,
        wanted_bytes=wanted_bytes,
    )


async def _planes(config: AgentConfig, timeout_s: float) -> Mapping[str, str]:
    """Each configured plane, and why it does not open here: on any port, over a page of our own."""
    from peer_agent.memory.arena import Arena
    from peer_agent.memory.layout import SizeClass
    from peer_agent.transport.registry import PlaneOptions, open_transports

    options = PlaneOptions(allow_emulated_rma=config.allow_emulated_rma, ucp_library=config.ucp_library, tls=config.data_tls)
    out = {}
    with _place(config.arena_file) as path:
        for name in config.transports:
            try:
                with Arena.create(path, [SizeClass(bytes(32), 4096, 1)], epoch=secrets.randbits(64) or 1) as arena:
                    (plane,) = open_transports((name,), arena, options=options).values()
                    try:
                        await asyncio.wait_for(plane.export(), timeout_s)
                    finally:
                        await plane.close()
            except TimeoutError:
                out[name] = f"it did not open within {timeout_s:g} s"
            except (OSError, KvdirError) as error:
                out[name] = str(error)
            else:
                out[name] = ""
    return out


@contextlib.contextmanager
def _place(arena_file: str) -> Iterator[str]:
    """A name for a small arena beside the real one."""
    path = os.path.join(os.path.dirname(arena_file) or ".", f"kvdir-doctor-{os.getpid()}")
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


async def _greet(facts: ClusterFacts, timeout_s: float, tls: TlsFiles | None) -> Mapping[str, str]:
    """Asks the agents that could be reached who they are: two may be said to be at one address, or another service is there."""
    from kvdir.rpc.channel import client_options
    from kvdir.rpc.tls import Dialer
    from peer_agent.server.peer import PeerFailure, say_hello

    at_once, dialer = asyncio.Semaphore(GREETINGS), Dialer.of(tls)

    async def greet(node: str, address: str) -> str:
        async with at_once, dialer.aio(address, options=client_options()) as channel:
            try:
                hello, _ = await say_hello(channel, me="doctor", epoch=0, planes=(), timeout_s=timeout_s)
            except PeerFailure as failure:
                return str(failure)
        return "" if hello.node == node else f"the agent of node {hello.node} answers there"

    known = {node: view.trust.peer_address for node, view in facts.nodes().items() if view.trust.peer_address}
    asked = {node: address for node, address in known.items() if facts.reached.get(address) == ""}
    answers = await asyncio.gather(*(greet(node, address) for node, address in asked.items()))
    return dict(zip(asked, answers, strict=True))


def _endpoints(config: AgentConfig) -> list[str]:
    """Where the configured engines should be; those that connect to us are nowhere."""
    from kvdir.client.engine_options import read_engines

    out = []
    for engine in read_engines(config.engine)[0]:
        if engine.bind:
            continue
        head, _, port = engine.endpoint.rpartition(":")
        ranks = range(engine.ranks) if engine.endpoint.startswith("tcp://") and engine.rank is None else range(1)
        out += [f"{head}:{int(port) + rank}" for rank in ranks] if port.isdigit() else [engine.endpoint]
    return out


def _endpoint(text: str, timeout_s: float) -> Endpoint:
    """text: tcp://HOST:PORT as ZeroMQ writes it, or http://HOST:PORT; others cannot be tried by connecting."""
    from peer_agent.diagnosis.node import Endpoint

    scheme, _, place = text.rpartition("://")
    if scheme not in ("", "tcp", "http", "https"):
        return Endpoint(name=text, address=place, failure="")
    place = place.partition("/")[0]
    return Endpoint(name=text, address=place, failure=why_not_reached(place, timeout_s))


def _limit(kind: int) -> int | None:
    """The hard limit, which an agent raises itself to; None: there is none."""
    hard = resource.getrlimit(kind)[1]
    return None if hard == resource.RLIM_INFINITY else hard
