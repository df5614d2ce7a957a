"""Configuration of an agent: every setting once, with its consequence. See kvdir/config.py for where values come from.

Rules: nothing listens beyond loopback unless told and acknowledged; everything that grows has a limit here, and refusals name
the setting. Does not: check what only the machine knows (free memory, ports); start-up does (peer_agent/server/app.py).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass

from kvdir.client.discovery import parse
from kvdir.client.engine_options import read_engines
from kvdir.config import setting
from kvdir.errors import InvalidInput
from kvdir.obs.logs import LOG_FORMATS, LOG_LEVELS, log_faults
from kvdir.obs.tracing import trace_faults
from kvdir.rpc.certificates import TlsFiles, missing
from kvdir.rpc.channel import DEFAULT_MAX_MESSAGE_BYTES
from peer_agent.memory.pages import HugePages
from peer_agent.memory.slots import NO_SPARE, Spare

TRANSPORTS = ("shm", "tcp", "ucx", "nixl")
DEFAULT_TRANSPORTS = ("shm", "tcp")
ALL_NAMESPACES = "all"
UNIX_PATH_LIMIT_BYTES = 107
MAX_FINGERPRINTS = DEFAULT_MAX_MESSAGE_BYTES // 64
"""Records of 32 bytes in half a message; the rest is for fingerprints, nodes and framing."""


_NO_LIMIT_AT_0 = ("max_requests_per_s", "max_streams_per_identity")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """One agent. Sizes in bytes, times in seconds."""

    node: str = setting("", "Name of this node in the directory, unique in the cluster. Empty: the host's name.")
    namespaces: tuple[str, ...] = setting(
        (), "Files (TOML or JSON) that each describe one namespace to serve.", metavar="FILES"
    )
    arena_bytes: int = setting(
        1 << 30, "Memory for blocks of `namespaces`. It is taken at start, and refused if it does not fit."
    )
    accept_bytes: int = setting(
        0,
        "Memory for each namespace that an engine brings along and no file describes, taken at start for accept_namespaces of "
        "them; such an agent needs no files. 0: only what files describe is served.",
    )
    accept_namespaces: int = setting(4, "How many such namespaces; a hybrid model has one for each of its state groups.")
    prefault: bool = setting(True, "Map every page at start (seconds per 10 GiB) instead of at its first use.")
    huge_pages: str = setting(
        "auto", "Huge pages for the arena: auto, where they can be had; off; require, or no start. See docs/transports.md."
    )
    numa_node: int = setting(-1, "NUMA node that the arena's memory comes from and the agent runs on; -1: any.")
    arena_path: str = setting("", "File of the arena, on a memory file system. Empty: /dev/shm/kvdir-NODE.", metavar="PATH")
    coordinators: tuple[str, ...] = setting(
        (),
        "Coordinators to publish to and ask, all of them: host:port, dns:///name:port, k8s:///service.namespace:port. "
        "None: this node shares nothing. See docs/high-availability.md.",
        metavar="HOST:PORT,...",
    )

    engine: tuple[str, ...] = setting(
        (),
        "Engines of this host whose own events go into the directory, as streams NODE/NAME: vllm=tcp://HOST:PORT,model=NAME or "
        "vllm=http://HOST:PORT, then replay=, hash=, seed=, name=, ranks=, ...; sglang=, dynamo= likewise. Needs pyzmq. "
        "See docs/engines/events.md.",
        metavar="DIALECT=ENDPOINT,KEY=VALUE,...",
    )
    events_out: str = setting(
        "",
        "ZeroMQ address to tell what this node and its engines hold to others, in the envelope of RFC Mooncake 1527, such as "
        "tcp://127.0.0.1:7460. Empty: off. See docs/engines/events.md.",
        metavar="ENDPOINT",
    )
    events_replay: str = setting(
        "", "ZeroMQ address where readers of events_out ask for what they missed. Empty: they cannot.", metavar="ENDPOINT"
    )
    replica: bool = setting(
        False,
        "Keep a copy of the directory in shared memory, so that lookups of this node cost microseconds and no call. It takes "
        "some 25 bytes a block of all nodes, and every change travels here. See docs/replica.md.",
    )
    replica_path: str = setting("", "File of the replica, on a memory file system. Empty: ARENA_PATH.replica.", metavar="PATH")
    replica_namespaces: tuple[str, ...] = setting(
        (), "Namespaces to replicate, digests in hex, or all. Empty: those that are served here.", metavar="DIGESTS"
    )
    replica_max_bytes: int = setting(
        0, "Memory that the replica may take; what does not fit is not found in it. 0: what there is."
    )
    replica_max_lag_s: float = setting(1.0, "Loads ask the coordinators first when the replica may be further behind.")

    listen: str = setting("127.0.0.1:7410", "Where other agents reach us (gRPC); port 0 takes a free one.", metavar="HOST:PORT")
    data_listen: str = setting(
        "127.0.0.1:0", "Where the tcp plane serves blocks; port 0 takes a free one.", metavar="HOST:PORT"
    )
    tls_cert: str = setting(
        "",
        "TLS with coordinators and other agents: our certificate, PEM. All of tls_cert, tls_key and tls_ca, or none.",
        metavar="FILE",
    )
    tls_key: str = setting("", "Its key, PEM, not encrypted.", metavar="FILE")
    tls_ca: str = setting("", "Certificates of the CAs that sign certificates of coordinators and agents.", metavar="FILE")
    tls_server_name: str = setting(
        "", "Name that every server's certificate must hold. Empty: the name or address that is dialled.", metavar="NAME"
    )
    tls_peer_name: str = setting(
        "",
        "Name that another agent's certificate must hold, such as {node}.kvdir for its node. Empty: as tls_server_name.",
        metavar="NAME",
    )
    data_tls_cert: str = setting(
        "", "TLS on the tcp plane, if other files are to be used than tls_cert, ...: all three or none.", metavar="FILE"
    )
    data_tls_key: str = setting("", "Its key, PEM, not encrypted.", metavar="FILE")
    data_tls_ca: str = setting("", "Certificates of the CAs that sign our peers' certificates.", metavar="FILE")
    policy: str = setting(
        "", "Who may do what, by certificate (docs/security.md). Empty: whoever has one may everything.", metavar="FILE"
    )
    max_requests_per_s: float = setting(
        0.0, "Calls that one identity may make, 2 s of them at once; beyond it they are refused. 0: no limit."
    )
    max_streams_per_identity: int = setting(0, "Attach calls that one identity may have open. 0: no limit.")
    advertise: str = setting("", "Address of `listen` as others see it. Empty: as bound.", metavar="HOST:PORT")
    engine_listen: str = setting(
        "",
        "Where engines of this host attach (gRPC). Empty: a socket beside the arena, unix:ARENA_PATH.sock.",
        metavar="ADDRESS",
    )
    http_listen: str = setting(
        "127.0.0.1:7411", "/metrics, /healthz, /readyz; port 0 takes a free one, empty: off.", metavar="HOST:PORT"
    )
    health_listen: str = setting(
        "",
        "gRPC health service for probes (names startup, liveness, readiness), in plaintext; empty: off.",
        metavar="HOST:PORT",
    )
    insecure: bool = setting(False, "Allow addresses beyond loopback although nothing is encrypted or authenticated.")
    transports: tuple[str, ...] = setting(
        DEFAULT_TRANSPORTS,
        "Data planes to offer and to use, the preferred one first: shm, tcp, ucx, nixl (the two for RDMA).",
        metavar="NAMES",
    )
    ucp_library: str = setting(
        "", "libucp.so.0 of UCX 1.19 or newer for ucx. Empty: KVDIR_UCP_LIBRARY, or the system's.", metavar="PATH"
    )
    allow_emulated_rma: bool = setting(
        False, "TESTING ONLY: ucx, nixl without RDMA, on loopback, where any local process may read all of the arena."
    )

    devices: tuple[str, ...] = setting(
        ("cuda",), "Kinds of devices whose memory engines may register (tier gpu): cuda; fake, for tests.", metavar="NAMES"
    )

    max_fingerprints: int = setting(
        65_536, "Fingerprints in one request; more are refused. Each holds up the others for some 3 us."
    )
    max_locks: int = setting(4_096, "Locks that peers may hold at once, and engines as many again; more are refused.")
    max_read_bytes: int = setting(1 << 30, "Bytes that one load may bring from peers; the blocks beyond are misses.")
    max_chunk_bytes: int = setting(16 << 20, "Bytes of one transfer; a small load waits behind at most one of them.")
    max_flight_bytes: int = setting(64 << 20, "Bytes under way from one peer at a time.")
    max_flight_total_bytes: int = setting(256 << 20, "Bytes under way from all peers together; slow ones never take them all.")
    max_reply_bytes: int = setting(4 << 20, "Bytes that Peer.Read hands out over gRPC, for diagnosis.")
    max_lease_s: float = setting(30.0, "Longest lease of a lock or reservation; longer wishes are shortened.")
    max_pin_s: float = setting(3600.0, "Longest protection from eviction by Pin.")
    max_deadline_s: float = setting(30.0, "Longest a load may take; longer wishes are shortened.")
    connect_timeout_s: float = setting(0.5, "What a dead peer may cost a load, once per try of its circuit breaker.")
    breaker_s: float = setting(1.0, "First pause after a peer failed; doubles up to breaker_max_s.")
    breaker_max_s: float = setting(30.0, "Longest pause before a failed peer is tried again.")
    directory_timeout_s: float = setting(0.2, "Longest a load waits for the directory.")

    queue_events: int = setting(
        65_536, "Events waiting for a slow coordinator; older ones are dropped and leave a visible hole."
    )
    ring_bytes: int = setting(16 << 20, "Memory for sent events, so that lost ones can be replayed.")
    event_loss: float = setting(0.0, "TESTING ONLY: share of event batches to drop on purpose.")
    grace_s: float = setting(10.0, "On SIGTERM: how long calls under way may take to end.")
    log_level: str = setting("info", f"One of {', '.join(LOG_LEVELS)}; one line an event, on stderr.")
    log_format: str = setting("logfmt", f"How a line of the log is written: {' or '.join(LOG_FORMATS)}.")
    otlp_endpoint: str = setting(
        "",
        "Where spans go, OTLP over HTTP, such as http://127.0.0.1:4318. Empty: as OTEL_EXPORTER_OTLP_ENDPOINT says, else "
        "nowhere. See docs/observability.md.",
        metavar="URL",
    )
    trace_ratio: float = setting(0.0, "Share of requests without a trace of their caller's that begin one here.")

    @property
    def node_name(self) -> str:
        return self.node or socket.gethostname()

    @property
    def arena_file(self) -> str:
        return self.arena_path or f"/dev/shm/kvdir-{self.node_name}"

    @property
    def engine_address(self) -> str:
        return self.engine_listen or f"unix:{self.arena_file}.sock"

    @property
    def spare(self) -> Spare:
        """For namespaces that engines bring along."""
        return Spare(self.accept_bytes, self.accept_namespaces) if self.accept_bytes else NO_SPARE

    @property
    def replica_file(self) -> str:
        """Empty: none is kept."""
        return (self.replica_path or f"{self.arena_file}.replica") if self.replica else ""

    @property
    def data_tls(self) -> TlsFiles | None:
        """None: the tcp plane is plaintext."""
        return TlsFiles.given(self.data_tls_cert, self.data_tls_key, self.data_tls_ca) or self.tls

    def peer_name(self, node: str) -> str:
        """That the certificate of the agent of this node must hold; empty: as for any server."""
        return self.tls_peer_name.replace("{node}", node)

    @property
    def tls(self) -> TlsFiles | None:
        """Of the control plane. None: it is plaintext."""
        return TlsFiles.given(self.tls_cert, self.tls_key, self.tls_ca, self.tls_server_name)

    def faults(self) -> list[str]:
        """What is wrong with the whole, one sentence each."""
        out = [*self._address_faults(), *self._limit_faults(), *self._replica_faults()]
        if self.accept_bytes < 0 or self.accept_namespaces < 1:
            out.append("accept_bytes: must not be negative, and accept_namespaces at least 1")
        elif not self.namespaces and not self.accept_bytes:
            out.append(
                'namespaces: at least one file is required, such as namespaces = ["llama.toml"], or accept_bytes = "256MiB" '
                "to serve whatever engines bring along; see docs/configuration.md"
            )
        out += [f"engine: {fault}" for fault in read_engines(self.engine)[1]]
        out += self._events_faults()
        if not self.node_name or os.sep in self.node_name:
            out.append(f"node: {self.node_name!r} must not be empty or contain {os.sep!r}")
        unknown = [name for name in self.transports if name not in TRANSPORTS]
        if unknown or not self.transports:
            out.append(f"transports: {', '.join(unknown) or 'none given'}; known: {', '.join(TRANSPORTS)}")
        if not 0 <= self.event_loss < 1:
            out.append("event_loss: must be at least 0 and below 1")
        if self.coordinators:
            try:
                parse(self.coordinators)
            except InvalidInput as error:
                out.append(f"coordinators: {error}")
        for prefix in ("tls", "data_tls"):
            out += missing({name: getattr(self, name) for name in (f"{prefix}_cert", f"{prefix}_key", f"{prefix}_ca")})
        if self.policy and not self.tls_cert:
            out.append("policy: needs tls_cert, tls_key and tls_ca: without certificates nobody can be told apart")
        for name in _NO_LIMIT_AT_0:
            if getattr(self, name) < 0:
                out.append(f"{name}: must not be below 0")
        out += [
            f"{name}: needs tls_cert, tls_key and tls_ca"
            for name in ("tls_server_name", "tls_peer_name")
            if getattr(self, name) and not self.tls_cert
        ]
        if self.huge_pages not in tuple(HugePages):
            out.append(f"huge_pages: {self.huge_pages!r} is not one of {', '.join(HugePages)}")
        if self.huge_pages == HugePages.REQUIRE and not self.prefault:
            out.append("huge_pages: require needs prefault, since only memory that is there can be looked at")
        out += log_faults(self.log_level, self.log_format) + trace_faults(self.otlp_endpoint, self.trace_ratio)
        return out

    def _address_faults(self) -> list[str]:
        out = []
        for name in ("listen", "data_listen", "http_listen", "health_listen"):
            text = getattr(self, name)
            if name in ("http_listen", "health_listen") and not text:
                continue
            try:
                host, _ = split_address(text)
            except ValueError as error:
                out.append(f"{name}: {error}")
                continue
            secured = bool(self.tls_cert or (name == "data_listen" and self.data_tls_cert))
            if not self.insecure and not secured and not is_loopback(host):
                out.append(
                    f"{name}: {text} is reachable from elsewhere and nothing is encrypted: use 127.0.0.1, give tls_cert, "
                    "tls_key and tls_ca, or say --insecure"
                )
            if name == "listen" and host in ("0.0.0.0", "::") and not self.advertise:
                out.append(f"advertise: required, because listen is {text} and others cannot call that")
        return out + self._engine_faults()

    def _events_faults(self) -> list[str]:
        out = []
        if self.events_replay and not self.events_out:
            out.append("events_replay: needs events_out, whose events it repeats")
        for name in ("events_out", "events_replay"):
            text = getattr(self, name)
            scheme, _, address = text.partition("://")
            if not text or (scheme == "ipc" and address):
                continue
            try:
                host, _ = split_address(address if scheme == "tcp" else "")
            except ValueError:
                out.append(f"{name}: {text!r} is neither tcp://HOST:PORT nor ipc://PATH, such as tcp://127.0.0.1:7460")
                continue
            if not self.insecure and not is_loopback(host):
                out.append(f"{name}: {text} is reachable from elsewhere without encryption: use 127.0.0.1, or say --insecure")
        return out

    def _engine_faults(self) -> list[str]:
        address = self.engine_address
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            if len(path.encode()) > UNIX_PATH_LIMIT_BYTES:
                return [f"engine_listen: {path} is longer than {UNIX_PATH_LIMIT_BYTES} bytes, the limit of a socket's path"]
            return []
        try:
            host, _ = split_address(address)
        except ValueError as error:
            return [f"engine_listen: {error}, nor unix:PATH"]
        return [] if is_loopback(host) else [f"engine_listen: {address} must be loopback: engines map memory of this host"]

    def _replica_faults(self) -> list[str]:
        out = []
        if self.replica and not self.coordinators:
            out.append("replica: needs coordinators, whose directory it copies")
        wrong = [text for text in self.replica_namespaces if text != ALL_NAMESPACES and not is_digest(text)]
        if wrong:
            out.append(f"replica_namespaces: {', '.join(wrong)}: a digest is 64 hexadecimal digits; `kvdir status` lists them")
        if self.replica_max_bytes < 0:
            out.append("replica_max_bytes: must not be negative")
        if not self.replica_max_lag_s > 0:
            out.append("replica_max_lag_s: must be positive")
        return out

    def _limit_faults(self) -> list[str]:
        names = [name for name in self.__dataclass_fields__ if name.startswith("max_") and name not in _NO_LIMIT_AT_0]
        names += ["arena_bytes", "connect_timeout_s", "breaker_s", "breaker_max_s", "directory_timeout_s"]
        names += ["queue_events", "ring_bytes"]
        out = [f"{name}: must be positive" for name in names if getattr(self, name) <= 0]
        if self.max_fingerprints > MAX_FINGERPRINTS:
            out.append(f"max_fingerprints: must be at most {MAX_FINGERPRINTS}, or answers do not fit into a gRPC message")
        return out


def split_address(text: str) -> tuple[str, int]:
    """("127.0.0.1", 7410) from "127.0.0.1:7410" or "[::1]:7410". ValueError with the accepted form otherwise."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:7410")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_digest(text: str) -> bool:
    """Whether it is a namespace's digest in hex."""
    return len(text) == 64 and all(character in "0123456789abcdef" for character in text.lower())


def is_loopback(host: str) -> bool:
    """Whether only this host can reach it. Names other than localhost count as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
