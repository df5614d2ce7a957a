"""For each alert: series that are well, are ill for some minutes, and are well again. Read by test_rules.py.

Each case has a namespace of its own, so that all of them share one run.

Every alert must be silent before, must not fire in the first minute when it has a `for`, must fire at the end of the ill
minutes with the labels given, and must be silent at the end. No other alert may fire, except those named in `also`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WELL_MIN, AFTER_MIN = 40, 65
"""Before, and after: longer than the longest window of a rule in which something ill could still be seen, an hour."""
FLEET = 'cluster="c", namespace="n"'
PROCESS = f'{FLEET}, job="j", instance="i:1"'
LABELS = {"instance": "i:1", "namespace": "n"}
FLEET_LABELS = {"namespace": "n"}
KVDIR, AGENT = f"kvdir_build_info{{{PROCESS}}}", f"peer_agent_build_info{{{PROCESS}}}"


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value while well, and while ill; None: not scraped."""

    well: float | None
    ill: float | None

    def values(self, ill_min: int) -> list[float | None]:
        """One for each minute."""
        return [self.well] * WELL_MIN + [self.ill] * ill_min + [self.well] * AFTER_MIN


@dataclass(frozen=True, slots=True)
class Counter:
    """How much it counts in a minute, while well, and while ill."""

    well: float
    ill: float

    def values(self, ill_min: int) -> list[float | None]:
        """One for each minute."""
        out, value = [], 0.0
        for step in [self.well] * WELL_MIN + [self.ill] * ill_min + [self.well] * AFTER_MIN:
            value += step
            out.append(value)
        return list(out)


@dataclass(frozen=True, slots=True)
class Ends:
    """A time that is well ahead, fixed from some minute on while ill, and renewed afterwards. In seconds from the start."""

    left_s: float

    def values(self, ill_min: int) -> list[float | None]:
        """One for each minute. ill: it is left_s away at the end of the ill minutes, and does not move."""
        far = [3000.0 * 86400 + 60 * minute for minute in range(WELL_MIN)]
        end_s = 60.0 * (WELL_MIN + ill_min) + self.left_s
        return [*far, *[end_s] * ill_min, *[3000.0 * 86400 + 60 * minute for minute in range(AFTER_MIN)]]


@dataclass(frozen=True, slots=True)
class Case:
    """series: by selector. labels: of the alert."""

    alert: str
    ill_min: int
    series: Mapping[str, Gauge | Counter | Ends]
    labels: Mapping[str, str] = field(default_factory=lambda: dict(LABELS))
    also: tuple[str, ...] = ()


def of(name: str, **labels: str) -> str:
    """A series of one process."""
    own = (f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{', '.join((PROCESS, *own))}}}"


UP, HERE = of("up"), Gauge(1, 1)
IDLE = Counter(0, 0)

PROCESSES = (
    Case("KvdirCoordinatorDown", 90, {UP: Gauge(1, 0), KVDIR: Gauge(1, None)}),
    Case("KvdirAgentDown", 90, {UP: Gauge(1, 0), AGENT: Gauge(1, None)}),
    Case(
        "KvdirAgentDownEngineUp", 4,
        {
            f'up{{{PROCESS}, pod="p"}}': Gauge(1, 0), f'peer_agent_build_info{{{PROCESS}, pod="p"}}': Gauge(1, None),
            'vllm:num_requests_running{cluster="c", namespace="n", job="v", instance="i:2", pod="p"}': Gauge(3, 3),
        },
        labels={"pod": "p", "instance": "i:1"}, also=("KvdirAgentDown",),
    ),
    Case("KvdirRestartsOften", 12, {of("process_start_time_seconds"): Counter(0, 60), AGENT: Gauge(1, None), UP: HERE}),
    Case("KvdirNotReady", 12, {of("kvdir_warming"): Gauge(0, 1)}),
    Case("KvdirLoopLag", 9, {of("kvdir_loop_lag_seconds"): Gauge(0.01, 0.6)}),
    Case("KvdirLoopLag", 9, {of("peer_agent_loop_lag_seconds"): Gauge(0.01, 0.6)}),
    Case("KvdirLookupWorkersRestart", 10, {of("kvdir_lookup_worker_restarts_total"): Counter(0, 0.5)}),
    Case("KvdirUnexpectedErrors", 5, {of("kvdir_rpc_calls_total", method="Lookup", code="INTERNAL"): Counter(0, 1)}),
    Case("KvdirUnexpectedErrors", 5, {of("kvdir_rpc_calls_total", method="Hello", code="INTERNAL"): Gauge(None, 1)}),
    Case("KvdirUnexpectedErrors", 5, {of("peer_agent_rpc_bugs_total"): Counter(0, 1)}),
    Case("KvdirUnexpectedErrors", 5, {of("peer_agent_task_failures_total"): Counter(0, 1)}),
    Case("KvdirLogLinesDropped", 15, {of("peer_agent_log_lines_dropped_total"): Counter(0, 30)}),
    Case("KvdirLogLinesDropped", 15, {of("kvdir_log_lines_dropped_total"): Counter(0, 30)}),
)  # fmt: skip

_CONNECTED = {"coordinator": "c:7400"}


def _heard(node: str, ago_s: float) -> dict[str, Gauge]:
    return {of("kvdir_stream_age_seconds", node=node): Gauge(ago_s, ago_s)}


DIRECTORY = (
    Case(
        "KvdirNoCoordinator", 4, {of("peer_agent_publisher_connected", **_CONNECTED): Gauge(1, 0)}, labels=FLEET_LABELS,
    ),
    Case(
        "KvdirPublisherNotConnected", 8,
        {
            of("peer_agent_publisher_connected", **_CONNECTED): Gauge(1, 0),
            of("peer_agent_publisher_standby", **_CONNECTED): Gauge(0, 0),
            of("peer_agent_publisher_connected", coordinator="d:7400"): Gauge(1, 1),
            of("peer_agent_publisher_standby", coordinator="d:7400"): Gauge(0, 0),
        },
        labels=LABELS | _CONNECTED,
    ),
    Case("KvdirPublisherBehind", 12, {of("peer_agent_skipped_events_total", **_CONNECTED): Counter(0, 100)}),
    Case(
        "KvdirStreamUntrusted", 20,
        {of("kvdir_stream_untrusted_seconds_total", node="a"): Counter(0, 60)} | _heard("a", 1)
        | {of("kvdir_stream_untrusted_seconds_total", node="gone"): Counter(60, 60)} | _heard("gone", 3600),
        labels=LABELS | {"node": "a"},
    ),
    Case(
        "KvdirGapNotRepaired", 8,
        {of("kvdir_stream_missing_events", node="a"): Gauge(0, 7)} | _heard("a", 1)
        | {of("kvdir_stream_missing_events", node="gone"): Gauge(7, 7)} | _heard("gone", 3600),
        labels=LABELS | {"node": "a"},
    ),
    Case(
        "KvdirRepairsFail", 12,
        {
            of("kvdir_repairs_total", kind="replay", outcome="asked"): Counter(2, 2),
            of("kvdir_repairs_total", kind="replay", outcome="failed"): Counter(0.2, 1.5),
        },
        labels=LABELS | {"kind": "replay"},
    ),
    Case("KvdirDigestContradictions", 30, {of("kvdir_digest_contradictions_total"): Counter(0, 0.2)}),
    Case("KvdirFenced", 3, {of("peer_agent_fenced"): Gauge(0, 1)}),
    Case(
        "KvdirStale", 25,
        {
            of("peer_agent_owner_blocks_total", answer="held"): Counter(600, 600),
            of("peer_agent_owner_blocks_total", answer="stale"): Counter(12, 600),
        },
        labels=FLEET_LABELS,
    ),
    Case(
        "KvdirDirectoryUnanswered", 18,
        {of("peer_agent_directory_failures_total"): Counter(0, 60), of("peer_agent_loads_total"): Counter(600, 600)},
        labels=FLEET_LABELS,
    ),
    Case("KvdirReplicaLag", 8, {of("peer_agent_replica_lag_seconds"): Gauge(0.01, 9)}),
    Case("KvdirReplicaIncomplete", 18, {of("peer_agent_replica_incomplete"): Gauge(0, 1)}),
    Case("KvdirWatchersCutOff", 10, {of("kvdir_watch_cut_off_total"): Counter(0, 1)}),
    Case(
        "KvdirEngineInDoubt", 12, {of("peer_agent_engine_in_doubt", stream="a/vllm"): Gauge(0, 1)},
        labels=LABELS | {"stream": "a/vllm"},
    ),
)  # fmt: skip

_OTHER = of("kvdir_store_up").replace("i:1", "i:2")
STORE = (
    Case("KvdirStoreDown", 3, {of("kvdir_store_up"): Gauge(1, 0)}, labels=FLEET_LABELS, also=("KvdirStoreUnreachable",)),
    Case("KvdirStoreUnreachable", 4, {of("kvdir_store_up"): Gauge(1, 0), _OTHER: HERE}),
    Case("KvdirStoreBreakerOpens", 5, {of("kvdir_store_breaker_open"): Gauge(0, 1)}),
    Case("KvdirStoreBreakerOpens", 8, {of("kvdir_store_breaker_opened_total"): Counter(0, 1)}),
    Case("KvdirStoreFull", 12, {of("kvdir_store_used_bytes"): Gauge(50, 95), of("kvdir_store_max_bytes"): Gauge(100, 100)}),
    Case("KvdirStoreLosesBlocks", 5, {of("kvdir_store_lost_buckets_total"): Counter(0, 1)}),
    Case("KvdirStoreLosesBlocks", 5, {of("kvdir_store_evicted_total"): Counter(0, 10)}),
)  # fmt: skip


def _blocks(status: str, well: float, ill: float) -> dict[str, Counter]:
    return {of("peer_agent_load_blocks_total", status=status): Counter(well, ill)}


TRANSFERS = (
    Case("KvdirCorruptBlocks", 5, _blocks("corrupt", 0, 1)),
    Case("KvdirFallbackTransport", 12, {of("peer_agent_fallback_peers"): Gauge(0, 3)}),
    Case("KvdirLateBlocks", 18, _blocks("hit_peer", 600, 600) | _blocks("late", 0, 100), labels=FLEET_LABELS),
    Case(
        "KvdirPeersDoNotAnswer", 18,
        {of("peer_agent_peer_failures_total"): Counter(0, 60), of("peer_agent_loads_total"): Counter(600, 600)},
        labels=FLEET_LABELS,
    ),
    Case(
        "KvdirQuarantineGrows", 18,
        {of("peer_agent_quarantined_bytes"): Gauge(0, 50), of("peer_agent_arena_bytes"): Gauge(1000, 1000)},
    ),
    Case(
        "KvdirLocksGrow", 18,
        {
            of("peer_agent_guarded_slots", kv_namespace="m", by="lock"): Gauge(5, 400),
            of("peer_agent_slots", kv_namespace="m", state="committed"): Gauge(1000, 1000),
        },
    ),
    Case("KvdirNoRoom", 24, {of("peer_agent_no_space_blocks_total"): Counter(0, 300)} | _blocks("miss", 600, 600)),
    Case(
        "KvdirCostsMoreThanItSaves", 40,
        {of("peer_agent_saved_seconds_total"): Counter(30, 1), of("peer_agent_spent_seconds_total"): Counter(3, 3)},
        labels=FLEET_LABELS,
    ),
    Case(
        "KvdirPredictionsWrong", 60,
        {
            of("peer_agent_load_prediction_ratio_bucket", le="1.0"): Counter(600, 0),
            of("peer_agent_load_prediction_ratio_bucket", le="4.0"): Counter(600, 60),
            of("peer_agent_load_prediction_ratio_bucket", le="8.0"): Counter(600, 600),
            of("peer_agent_load_prediction_ratio_bucket", le="+Inf"): Counter(600, 600),
            of("peer_agent_load_prediction_ratio_count"): Counter(600, 600),
        },
        labels=FLEET_LABELS,
    ),
)  # fmt: skip

CAPACITY = (
    Case("KvdirIndexNearBound", 18, {of("kvdir_index_bytes"): Gauge(50, 95), of("kvdir_index_max_bytes"): Gauge(100, 100)}),
    Case(
        "KvdirQuotaNotTrusted", 35, {of("kvdir_quota_verdict", subject="none", verdict="untrusted"): Gauge(0, 1)},
        labels=LABELS | {"subject": "none"},
    ),
    Case("KvdirCheckpointFails", 8, {of("kvdir_checkpoints_failed_total"): Counter(0, 1)}),
    Case(
        "KvdirOpenFiles", 12,
        {of("process_open_fds"): Gauge(100, 900), of("process_max_fds"): Gauge(1000, 1000), KVDIR: HERE},
    ),
)  # fmt: skip

SECURITY = (
    Case("KvdirCertificateExpiresSoon", 10, {of("kvdir_tls_expires_timestamp_seconds", port="grpc"): Ends(120)}),
    Case("KvdirCertificateExpiresSoon", 10, {of("peer_agent_tls_expires_timestamp_seconds", port="data"): Ends(120)}),
    Case(
        "KvdirCertificateExpired", 10, {of("kvdir_tls_expires_timestamp_seconds", port="grpc"): Ends(-120)},
        also=("KvdirCertificateExpiresSoon",),
    ),
    Case(
        "KvdirCertificateExpired", 10, {of("peer_agent_tls_expires_timestamp_seconds", port="data"): Ends(-120)},
        also=("KvdirCertificateExpiresSoon",),
    ),
    Case("KvdirTlsFilesRefused", 8, {of("kvdir_tls_fault"): Gauge(0, 1)}),
    Case("KvdirTlsFilesRefused", 8, {of("peer_agent_tls_fault"): Gauge(0, 1)}),
    Case("KvdirPolicyRefused", 8, {of("kvdir_policy_fault"): Gauge(0, 1)}),
    Case("KvdirPolicyRefused", 8, {of("peer_agent_policy_fault"): Gauge(0, 1)}),
    Case("KvdirCallsRefused", 8, {of("kvdir_auth_refused_total", reason="role"): Counter(0, 10)}),
    Case("KvdirCallsRefused", 8, {of("peer_agent_auth_refused_total", reason="tenant"): Counter(0, 10)}),
    Case("KvdirCapabilitiesRefused", 8, {of("peer_agent_capability_refused_total", reason="expired"): Counter(0, 10)}),
    Case("KvdirLimitsHit", 15, {of("kvdir_limited_total", limit="rate"): Counter(0, 5)}, labels=LABELS | {"limit": "rate"}),
    Case("KvdirLimitsHit", 15, {of("peer_agent_limited_total", limit="rate"): Counter(0, 5)}),
)  # fmt: skip

CASES = (*PROCESSES, *DIRECTORY, *STORE, *TRANSFERS, *CAPACITY, *SECURITY)
