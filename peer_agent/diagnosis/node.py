"""Checks of one node: its agent, the memory and limits it runs under, its data planes, its engines. Pure.

Facts come from peer_agent/cli/doctor.py; what a check says is a Finding of kvdir/diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvdir.client.engine_findings import FindingKind
from kvdir.config import show_bytes
from kvdir.diagnosis.finding import Finding, Verdict, in_order

DOCKER_SHM_BYTES = 64 << 20
"""What a container gets for /dev/shm unless told otherwise (Docker, containerd)."""

FEW_FILES = 1024
"""Open files that a busy agent may well need: sockets of peers and engines."""

RDMA_PLANES = ("ucx", "nixl")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """What a running agent said of itself. publishing: in words, as in `peer-agent inventory`. committed: blocks it holds.

    refused: engines that it did not let in lately, and why.
    """

    node: str
    arena_path: str
    arena_bytes: int
    sessions: int
    publishing: str
    namespaces: int
    committed: int
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """The file system that the arena lies on, or would. wanted_bytes: arena and replica as configured."""

    path: str
    total_bytes: int
    free_bytes: int
    wanted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where something should listen. failure: why nobody could be reached there; empty: somebody serves it."""

    name: str
    address: str
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """One stream of an engine, as the agent follows it. state: in words, with the fix where something stands in the way.

    findings: kinds of what does (kvdir/client/engine_findings.py).
    """

    stream: str
    endpoint: str
    batches: int
    state: str
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """agent: None when it did not answer, and agent_failure says why. config_faults: of the configuration, in words.

    planes: configured ones, by name, with why they do not open; empty words: they do. memlock_bytes, open_files: limits of this
    process, None for none. engines: endpoints where engines should publish. streams: what the agent says of those it follows.
    """

    address: str
    agent: AgentFacts | None = None
    agent_failure: str = ""
    config_faults: tuple[str, ...] = ()
    insecure: bool = False
    memory: SharedMemory | None = None
    planes: Mapping[str, str] | None = None
    memlock_bytes: int | None = None
    open_files: int | None = None
    engines: tuple[Endpoint, ...] = ()
    streams: tuple[EngineFacts, ...] = ()


def examine_node(facts: NodeFacts) -> list[Finding]:
    """Every check, in the order in which people should look."""
    return [finding for check in CHECKS for finding in check(facts)]


def check_configuration(facts: NodeFacts) -> list[Finding]:
    """configuration: would `peer-agent serve` take it; is anything allowed that should not be."""
    out = [
        Finding(
            check="configuration",
            verdict=Verdict.FAULT,
            seen=fault,
            meaning="the agent does not start with it",
            fix="correct the setting; docs/configuration.md has them all",
        )
        for fault in facts.config_faults
    ]
    if facts.insecure:
        out.append(
            _warning(
                "configuration", "insecure is set", "peers are not authenticated, and blocks travel in the clear over tcp",
                "only in a network that is trusted; give certificates instead (tls_cert, tls_key, tls_ca; docs/security.md)",
            )
        )  # fmt: skip
    return out or [in_order("configuration", "no faults")]


def check_agent(facts: NodeFacts) -> list[Finding]:
    """agent: does it answer; publishing: does anybody hear it; engines: do they attach, and store."""
    agent = facts.agent
    if agent is None:
        return [
            Finding(
                check="agent",
                verdict=Verdict.FAULT,
                subject=facts.address,
                seen=facts.agent_failure or "no answer",
                meaning="engines of this host see misses, and peers cannot read from it",
                fix="start it (`peer-agent serve`), or give the address under `engines attach at` that it printed",
            )
        ]
    out = [in_order("agent", f"node {agent.node}, {agent.namespaces} namespaces", subject=facts.address), _publishing(agent)]
    out += [
        Finding(
            check=_refusal_check(words),
            verdict=Verdict.FAULT,
            subject=engine,
            seen=f"it was refused: {words}",
            meaning="it goes on without its agent: it stores nothing, and sees misses",
            fix="make what differs equal; or let the agent serve what engines bring along (`accept_bytes`)",
        )
        for engine, words in agent.refused
    ]
    if agent.refused and not agent.sessions:
        return out
    if not agent.sessions:
        out.append(
            _warning(
                "engines", f"no engine is attached now; {agent.committed:,} blocks here", "nothing is stored or loaded here",
                "start the engine with its connector (docs/engines); if it tried, its log says why: an unknown namespace?",
            )
        )  # fmt: skip
    elif not agent.committed:
        out.append(
            _warning(
                "engines", f"{agent.sessions} sessions, and not one block is stored",
                "an engine attached, and never handed over a block",
                "send a request that is longer than one block; is the connector's threshold higher than that?",
            )
        )  # fmt: skip
    else:
        out.append(in_order("engines", f"{agent.sessions} sessions, {agent.committed:,} blocks"))
    return out


def _refusal_check(words: str) -> str:
    """The check whose matter it is, by the words of a refusal (Namespace.diff, kvdir/hashing/probing.py)."""
    if any(text in words for text in ("hash_seed", "hash_scheme", "the engine's fingerprint")):
        return "hash seed"
    return "block size" if "block_tokens:" in words else "engines"


def _publishing(agent: AgentFacts) -> Finding:
    said = agent.publishing
    if said == "synced":
        return in_order("publishing", said)
    if "fenced" in said:
        return Finding(
            check="publishing",
            verdict=Verdict.FAULT,
            subject=agent.node,
            seen=said,
            meaning="another agent runs under this node's name, and this one is no longer in the directory",
            fix="give every agent a `node` name of its own (containers on one host share its name), then restart this one",
        )
    if "no coordinator" in said:
        return Finding(
            check="publishing",
            verdict=Verdict.WARNING,
            subject=agent.node,
            seen=said,
            meaning="this node shares nothing: nobody finds its blocks, and it finds nobody's",
            fix="name a coordinator in `coordinators`, unless that is what you want",
        )
    return Finding(
        check="publishing",
        verdict=Verdict.FAULT,
        subject=agent.node,
        seen=said,
        meaning="what this node stores is not found by others",
        fix="is the coordinator up, and reached from here? `kvdir doctor ADDRESS` says; if it was just started, look again",
    )


def check_memory(facts: NodeFacts) -> list[Finding]:
    """shared memory: is there room for arena and replica; Docker gives 64 MiB."""
    memory = facts.memory
    if memory is None:
        return []
    seen = (
        f"{memory.path} has {show_bytes(memory.total_bytes)}, {show_bytes(memory.free_bytes)} free; "
        f"the arena takes {show_bytes(memory.wanted_bytes)}"
    )
    fix = "give the container more (docker --shm-size=2g, Kubernetes: an emptyDir with medium Memory), or lower `arena_bytes`"
    small = memory.total_bytes <= DOCKER_SHM_BYTES
    if facts.agent is None and memory.free_bytes < memory.wanted_bytes:
        meaning = "the agent does not start" + (": this is a container's default of 64 MiB" if small else "")
        return [Finding(check="shared memory", verdict=Verdict.FAULT, seen=seen, meaning=meaning, fix=fix)]
    if small:
        return [_warning("shared memory", seen, "that is a container's default, and holds next to no blocks", fix)]
    return [in_order("shared memory", seen)]


def check_planes(facts: NodeFacts) -> list[Finding]:
    """data planes: do those that are configured really open here; RDMA pins memory, and may not be allowed to."""
    if facts.planes is None:
        return []
    out = [
        Finding(
            check="data planes",
            verdict=Verdict.FAULT,
            subject=name,
            seen=failure,
            meaning="the agent does not start with this plane, or peers fall back to a slower one",
            fix="do as it says, or leave it out of `transports`; `peer-agent probe PEER` shows which plane a peer offers",
        )
        for name, failure in facts.planes.items()
        if failure
    ]
    arena_bytes = facts.memory.wanted_bytes if facts.memory is not None else 0
    rdma = [name for name in facts.planes if name in RDMA_PLANES]
    if rdma and facts.memlock_bytes is not None and facts.memlock_bytes < arena_bytes:
        out.append(
            _warning(
                "data planes",
                f"{', '.join(rdma)} pins {show_bytes(arena_bytes)}; {show_bytes(facts.memlock_bytes)} may be locked",
                "RDMA cannot register the arena, unless the process has the capability IPC_LOCK",
                "ulimit -l unlimited; systemd LimitMEMLOCK=infinity; docker --ulimit memlock=-1",
            )
        )  # fmt: skip
    return out or [in_order("data planes", ", ".join(facts.planes))]


def check_limits(facts: NodeFacts) -> list[Finding]:
    """limits: open files."""
    if facts.open_files is None or facts.open_files > FEW_FILES:
        return [in_order("limits", "open files: enough")]
    return [
        _warning(
            "limits", f"at most {facts.open_files} open files", "many peers and engines at once find no socket",
            "ulimit -n 65536, systemd LimitNOFILE=65536, docker --ulimit nofile=65536",
        )
    ]  # fmt: skip


def check_engines(facts: NodeFacts) -> list[Finding]:
    """engine events: is there somebody at each endpoint, and what do the streams themselves say."""
    out = [
        Finding(
            check="engine events",
            verdict=Verdict.FAULT,
            subject=endpoint.name,
            seen=f"nobody can be reached at {endpoint.address}: {endpoint.failure}",
            meaning="nothing that this engine holds is in the directory",
            fix="start the engine with its events on (vLLM: --kv-events-config), or correct the endpoint (rank r: port + r)",
        )
        for endpoint in facts.engines
        if endpoint.failure
    ]
    out += [_stream(stream) for stream in facts.streams if stream.findings]
    if not facts.engines and not facts.streams:
        return [in_order("engine events", "no engine's events are listened to here")]
    batches = sum(stream.batches for stream in facts.streams)
    return out or [in_order("engine events", f"{len(facts.streams)} streams, {batches:,} batches")]


def _stream(stream: EngineFacts) -> Finding:
    """Under the name of the check whose matter it is."""
    kinds = set(stream.findings)
    check = next((name for kind, name in _CHECK_OF.items() if kind in kinds), "engine events")
    return Finding(
        check=check,
        verdict=Verdict.WARNING if kinds <= _MILD else Verdict.FAULT,
        subject=stream.stream,
        seen=f"{stream.state} ({', '.join(sorted(kinds))}; {stream.endpoint or 'no endpoint yet'})",
        meaning="what this engine holds is not, or not all, found in the directory",
        fix=_FIX_OF.get(check, "as the words say; `peer-agent inventory` shows how it goes on"),
    )


_CHECK_OF = {FindingKind.PROBE: "hash seed", FindingKind.BLOCK_SIZE: "block size", FindingKind.REJECTED: "refused events"}
_MILD = {FindingKind.SILENT, FindingKind.REJECTED, FindingKind.LOST, FindingKind.ADAPTER}
"""Kinds that an idle or old engine has, too."""
_FIX_OF = {
    "hash seed": "start the engine with the PYTHONHASHSEED and hash algorithm of `engine` (seed=, hash=), or correct those",
    "block size": "start the engine with the agent's block size, or give its block size to the namespace file",
    "refused events": "a medium or event that is unknown counts for nothing: the metric peer_agent_engine_rejected names it",
}


CHECKS: Sequence[Callable[[NodeFacts], Iterable[Finding]]] = (
    check_configuration, check_agent, check_memory, check_planes, check_limits, check_engines,
)  # fmt: skip


def _warning(check: str, seen: str, meaning: str, fix: str) -> Finding:
    return Finding(check=check, verdict=Verdict.WARNING, seen=seen, meaning=meaning, fix=fix)
