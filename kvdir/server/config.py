"""Settings of `kvdir serve`. Declared once; flags, environment (KVDIR_), TOML keys and docs come from here."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from kvdir.config import setting, show_bytes
from kvdir.core.directory import Limits
from kvdir.core.quota import Quota, parse_quota
from kvdir.core.quota_keeper import QuotaPolicy
from kvdir.core.repair import RepairPolicy
from kvdir.errors import ConfigError
from kvdir.index import LEAST_MAX_BYTES
from kvdir.obs.logs import LOG_FORMATS, LOG_LEVELS, log_faults
from kvdir.obs.tracing import trace_faults
from kvdir.rpc.certificates import TlsFiles, missing
from kvdir.rpc.gate import CallLimits
from kvdir.store.url import StoreUrl

MAX_WORKERS = 64
MAX_EXPECTED_BLOCKS = 2**31
"""As many as an index takes."""
MEMORY = "memory"
_ALWAYS_PLAIN = {
    "indexer_listen": "",
    "page_listen": "listen on 127.0.0.1 and reach it by `kubectl port-forward` or `ssh -L`, or ",
}
"""Settings of addresses that have no TLS, with what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """See `kvdir serve --help`."""

    listen: str = setting("127.0.0.1:7400", "Address of the gRPC services; port 0 takes a free one.", metavar="HOST:PORT")
    http_listen: str = setting(
        "127.0.0.1:7401",
        "Address of /metrics, /healthz and /readyz, and if it is loopback of the live page, /; empty turns them off.",
        metavar="HOST:PORT",
    )
    page_listen: str = setting(
        "",
        "Address of the live page (docs/page.md), where http_listen is not loopback; it shows every tenant. Empty: none.",
        metavar="HOST:PORT",
    )
    indexer_listen: str = setting(
        "",
        "Address of the indexer API for routers (RFC Mooncake #1403, docs/engines/routers.md); empty: none.",
        metavar="HOST:PORT",
    )
    health_listen: str = setting(
        "",
        "Address of the gRPC health service for probes (names startup, liveness, readiness), in plaintext; empty: none.",
        metavar="HOST:PORT",
    )
    insecure: bool = setting(False, "Allow plaintext on addresses other than loopback: anybody who reaches them may ask.")
    tls_cert: str = setting(
        "", "TLS on `listen`: our certificate, PEM. All of tls_cert, tls_key and tls_ca, or none.", metavar="FILE"
    )
    tls_key: str = setting("", "Its key, PEM, not encrypted.", metavar="FILE")
    tls_ca: str = setting("", "Certificates of the CAs that sign the certificates of those who may call.", metavar="FILE")
    tls_server_name: str = setting(
        "", "Name that clients expect in our certificate whatever they dial; checked at start. Empty: any.", metavar="NAME"
    )
    policy: str = setting(
        "",
        "Who may do what, by certificate (docs/security.md); empty: every certificate of tls_ca may everything.",
        metavar="FILE",
    )
    indexer_identity: str = setting(
        "",
        "Identity of the policy whose tenants the indexer answers about, since its callers show no certificate. Empty: with a "
        "policy only namespaces without a salt, without one all.",
        metavar="NAME",
    )
    max_requests_per_s: float = setting(
        0.0, "Calls and streamed lookups that one identity may make in each process, 2 s of them at once; 0: no limit."
    )
    max_streams_per_identity: int = setting(
        0, "Publish, Watch and LookupStream calls that one identity may have open in each process; 0: no limit."
    )
    name: str = setting("", "Name of this coordinator in answers and logs; empty takes the host name.")
    lookup_workers: int = setting(
        0,
        "Processes beside this one that answer lookups on the same port, from an index in shared memory (/dev/shm); "
        "worth it when lookups keep a core busy.",
    )
    expected_blocks: int = setting(0, "Blocks the index makes room for at start; it grows without it, in steps.")
    max_index_bytes: int = setting(
        0, "Most memory the index takes; beyond it the entries used least lately go, unknown from then on. 0: no bound."
    )
    max_fingerprints: int = setting(65_536, "Fingerprints in one lookup; longer lists are refused.")
    max_message_bytes: int = setting(16 * 2**20, "Largest gRPC message, in and out.")
    max_streams: int = setting(4_096, "Nodes that may be known at once.")
    max_lookup_streams: int = setting(
        1_024, "LookupStream calls open at once; a client beyond it asks call by call, which costs both ends more."
    )
    max_namespaces: int = setting(1_024, "Namespaces that may be known at once.")
    max_sketches: int = setting(
        32, "Sketches asked for at the same time; a coordinator that finds more streams wrong lets them wait."
    )
    max_watchers: int = setting(1_024, "Replicas that may watch at once (Directory.Watch).")
    watch_log_bytes: int = setting(
        64 * 2**20, "Changes kept for replicas, while there are any; one that falls behind them is cut off and begins anew."
    )
    watch_stall_s: float = setting(10.0, "A replica that takes nothing for so long although something waits for it is cut off.")
    max_snapshots: int = setting(4, "Snapshots taken in at the same time; others wait, flagged untrusted.")
    heartbeat_interval_ms: int = setting(1_000, "How often agents are asked to send heartbeats.")
    credit_events: int = setting(8_192, "Events an agent may have under way without an acknowledgement.")
    stale_after_s: float = setting(5.0, "A node not heard for so long is flagged stale, and its figures untrusted.")
    expire_after_s: float = setting(60.0, "A node not heard for so long is left out of lookups.")
    forget_after_s: float = setting(600.0, "A node not heard for so long is an orphan: its blocks may be forgotten.")
    forget_enforce: bool = setting(False, "Forget orphans; without it `kvdir quota` only says which ones would go.")
    quota: tuple[str, ...] = setting(
        (),
        "Most bytes of a tenant (none, salt:<digest>) or namespace (namespace:<hex>) in all agents together; in TOML a table.",
        metavar="SUBJECT=SIZE",
    )
    quota_enforce: bool = setting(False, "Evict what is beyond a quota; without it `kvdir quota` only says what would go.")
    quota_interval_s: float = setting(5.0, "How often totals are held against quotas.")
    quota_max_blocks: int = setting(4_096, "Blocks evicted for one quota in one interval, over all nodes.")
    store: str = setting(
        MEMORY,
        "Where the directory lies: memory, or a Redis or Valkey that any number of coordinators share (docs/redis.md): "
        "redis://, rediss://, redis+cluster:// or redis+sentinel://.",
        metavar="URL",
    )
    store_timeout_s: float = setting(1.0, "Longest one call to the store may take; a stream whose write fails is resumed.")
    store_lookup_s: float = setting(0.1, "Longest a lookup waits for the store; then it is answered without hits.")
    checkpoint: str = setting(
        "", "File that keeps the directory over a restart, as hints; empty: none is kept.", metavar="FILE"
    )
    checkpoint_every_s: float = setting(60.0, "How often the checkpoint is written, beside at the end.")
    replay_idle_s: float = setting(
        1.0, "A repair without progress for so long has failed; twice what the last answer took if that is more, up to 10 s."
    )
    warm_limit_s: float = setting(30.0, "Longest time that /readyz says warming while nodes restate what they hold.")
    max_deadline_s: float = setting(10.0, "Longest time one call may take, whatever its client asks for.")
    grace_s: float = setting(5.0, "Time for calls under way to finish after SIGTERM.")
    log_level: str = setting("info", f"One of {', '.join(LOG_LEVELS)}.")
    log_format: str = setting("logfmt", f"How a line of the log is written: {' or '.join(LOG_FORMATS)}.")
    otlp_endpoint: str = setting(
        "",
        "Where spans go, OTLP over HTTP, such as http://127.0.0.1:4318. Empty: as OTEL_EXPORTER_OTLP_ENDPOINT says, else "
        "nowhere. See docs/observability.md.",
        metavar="URL",
    )
    trace_ratio: float = setting(0.0, "Share of requests without a trace of their caller's that begin one here.")

    def faults(self) -> list[str]:
        """What cannot work, all at once."""
        out = []
        out += self._address_faults()
        out += missing({name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")})
        if self.policy and not self.tls_cert:
            out.append("policy: needs tls_cert, tls_key and tls_ca: without certificates nobody can be told apart")
        if self.indexer_identity and not self.policy:
            out.append("indexer_identity: is an identity of the policy, and there is none: give --policy, or leave it out")
        out += [
            f"{name}: must not be below 0"
            for name in ("max_requests_per_s", "max_streams_per_identity")
            if getattr(self, name) < 0
        ]
        if self.tls_server_name and not self.tls_cert:
            out.append("tls_server_name: needs tls_cert, tls_key and tls_ca")
        if not 0 < self.stale_after_s < self.expire_after_s < self.forget_after_s:
            out.append("stale_after_s < expire_after_s < forget_after_s must hold, all above 0")
        if self.heartbeat_interval_ms < 10 or self.heartbeat_interval_ms / 1000 * 2 > self.stale_after_s:
            out.append("heartbeat_interval_ms: must be at least 10 and at most half of stale_after_s, or nodes flap")
        if self.max_fingerprints * 32 > self.max_message_bytes:
            out.append("max_message_bytes: too small for max_fingerprints of 32 bytes each")
        for field in (
            "max_fingerprints",
            "max_streams",
            "max_lookup_streams",
            "max_namespaces",
            "max_sketches",
            "max_snapshots",
            "max_watchers",
            "watch_stall_s",
            "credit_events",
            "max_deadline_s",
        ):
            if getattr(self, field) <= 0:
                out.append(f"{field}: must be above 0")
        for field in ("warm_limit_s", "grace_s", "max_requests_per_s", "max_streams_per_identity"):
            if getattr(self, field) < 0:
                out.append(f"{field}: must not be below 0")
        if not 0 <= self.expected_blocks <= MAX_EXPECTED_BLOCKS:
            out.append(f"expected_blocks: must be 0 to {MAX_EXPECTED_BLOCKS}")
        if self.watch_log_bytes < 2**20:
            out.append("watch_log_bytes: must be at least 1048576, or replicas are cut off at every burst")
        for field in ("quota_interval_s", "quota_max_blocks", "checkpoint_every_s", "replay_idle_s"):
            if getattr(self, field) <= 0:
                out.append(f"{field}: must be above 0")
        if 0 < self.max_index_bytes < LEAST_MAX_BYTES or self.max_index_bytes < 0:
            out.append(f"max_index_bytes: the least that works is {show_bytes(LEAST_MAX_BYTES)}; 0 for no bound")
        if self.checkpoint and not Path(self.checkpoint).absolute().parent.is_dir():
            out.append(f"checkpoint: {Path(self.checkpoint).absolute().parent} is not a directory: make it first")
        for text in self.quota:
            try:
                parse_quota(text)
            except ValueError as error:
                out.append(f"quota: {error}")
        if not 0 <= self.lookup_workers <= MAX_WORKERS:
            out.append(f"lookup_workers: must be 0 to {MAX_WORKERS}")
        out += self._store_faults()
        out += log_faults(self.log_level, self.log_format) + trace_faults(self.otlp_endpoint, self.trace_ratio)
        return out

    def _address_faults(self) -> list[str]:
        """Probes and metrics are plaintext, but tell nothing of blocks: they may be public where the rest is encrypted."""
        out = []
        for field in ("listen", "http_listen", "page_listen", "health_listen", "indexer_listen"):
            value = getattr(self, field)
            if field != "listen" and not value:
                continue
            try:
                host, _ = split_address(value)
            except ConfigError as error:
                out += [f"{field}: {fault}" for fault in error.faults]
                continue
            secured = bool(self.tls_cert) and field not in _ALWAYS_PLAIN
            if not self.insecure and not secured and not is_loopback(host):
                fix = _ALWAYS_PLAIN.get(field, "give tls_cert, tls_key and tls_ca, or ")
                out.append(f"{field}: {value} is not loopback, and there is no encryption: {fix}add --insecure")
        return out

    @property
    def call_limits(self) -> CallLimits:
        """The part the gate needs."""
        return CallLimits(max_requests_per_s=self.max_requests_per_s, max_streams=self.max_streams_per_identity)

    @property
    def tls(self) -> TlsFiles | None:
        """None: everything is plaintext."""
        return TlsFiles.given(self.tls_cert, self.tls_key, self.tls_ca, self.tls_server_name)

    def _store_faults(self) -> list[str]:
        """Never with the URL in it: that may hold a password."""
        if self.store == MEMORY:
            return []
        scheme = self.store.partition("://")[0]
        out: list[str] = []
        try:
            StoreUrl.parse(self.store)
        except ConfigError as error:
            out += error.faults
        out += [f"{field}: must be above 0" for field in ("store_timeout_s", "store_lookup_s") if getattr(self, field) <= 0]
        if self.store_timeout_s > self.heartbeat_interval_ms / 500:
            out.append("store_timeout_s: must be at most two heartbeats, or agents give this coordinator up while it waits")
        for field, why in (
            ("quota", "quotas are kept by coordinators with a directory of their own"),
            ("checkpoint", "the store outlives coordinators, none is needed"),
            ("lookup_workers", "run more coordinators, each answers for all"),
            ("max_index_bytes", "the bound is the servers' own, maxmemory"),
        ):
            if getattr(self, field):
                out.append(f"{field}: not with --store {scheme}: {why}")
        return out

    def limits(self) -> Limits:
        """The part the core needs."""
        return Limits(
            stale_after_s=self.stale_after_s,
            expire_after_s=self.expire_after_s,
            forget_after_s=self.forget_after_s,
            forget=self.forget_enforce,
            warm_up_s=min(2 * self.heartbeat_interval_ms / 1000, self.warm_limit_s),
            warm_limit_s=self.warm_limit_s,
            max_fingerprints=self.max_fingerprints,
            max_streams=self.max_streams,
            max_namespaces=self.max_namespaces,
            max_index_bytes=self.max_index_bytes,
            max_sketches=self.max_sketches,
            max_snapshots=self.max_snapshots,
            repair=RepairPolicy(idle_s=self.replay_idle_s),
        )

    def quotas(self) -> QuotaPolicy:
        """The part the quota keeper needs."""
        quotas: tuple[Quota, ...] = tuple(parse_quota(text) for text in self.quota)
        return QuotaPolicy(
            quotas=quotas, enforce=self.quota_enforce, interval_s=self.quota_interval_s, max_blocks=self.quota_max_blocks
        )


def split_address(text: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[v6]:port". Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError([f"{text!r} is not an address: write HOST:PORT, such as 127.0.0.1:7400"])
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. Names are resolved; one that does not resolve counts as public."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        return all(ipaddress.ip_address(item[4][0]).is_loopback for item in socket.getaddrinfo(host, None))
    except OSError:
        return False
