"""vLLM 0.32: KvdirTier, the cluster's blocks as a secondary tier below vLLM's host pool.

Translates between vLLM's interface and tier_lookup.py and tier_transfers.py, where the rules are. All methods run on the
scheduler's thread and never wait, but for `drain_jobs` and `shutdown`, where vLLM says so. vLLM pins rows, copies between them
and the device, and recomputes what a load did not bring (vllm/v1/kv_offload/tiering/base.py).
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvdir.errors import InvalidInput, KvdirError
from kvdir.namespace import Namespace
from peer_agent.client.engine import Engine
from peer_agent.connectors.vllm.identity import Identity
from peer_agent.connectors.vllm.settings import Settings
from peer_agent.connectors.vllm.tier_lookup import Lookups, Verdict
from peer_agent.connectors.vllm.tier_transfers import Ended, Job, Transfers

log = logging.getLogger("vllm.kvdir")

ATTACH_S = 2.0
"""At start, to say at once what is wrong with the agent or the namespace; the engine goes on without it."""

METRIC = "vllm:kvdir_"
COUNTERS = {
    "lookup_hits": "blocks asked for that some node is said to hold",
    "lookup_misses": "blocks asked for that nobody is said to hold",
    "load_hit_local": "blocks loaded from this node's agent",
    "load_hit_peer": "blocks loaded from other nodes",
    "load_miss": "blocks promised that nobody had",
    "load_stale": "blocks promised whose owner had them no more",
    "load_corrupt": "blocks that failed verification, and were recomputed",
    "load_late": "blocks that were not there in time, and were recomputed",
    "load_skipped": "blocks that are computed faster than they are fetched",
    "peer_bytes": "bytes that came from other nodes for loads",
    "store_stored": "blocks copied to this node's agent",
    "store_present": "blocks that it had already",
    "store_refused": "blocks for which it had no room",
    "refused_loads": "loads refused: max_flight_bytes, or an agent that did not answer lately",
    "refused_stores": "stores refused, for the same reasons",
    "errors": "transfers that failed for a reason that is in the log",
}


class KvdirTier(SecondaryTierManager):
    """identity, settings and rows (row_form) come from KvdirOffloadingConnector."""

    medium = Medium.CPU
    cache_hit_source = CacheHitSource.P2P

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        identity: Identity | None = None,
        settings: Settings | None = None,
        rows: str = "",
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if identity is None or settings is None:
            raise InvalidInput(
                "KvdirTier was loaded by vLLM's OffloadingConnector, which does not tell a tier the model's weights or hash "
                'function: use "kv_connector": "KvdirOffloadingConnector" with "kv_connector_module_path": '
                '"peer_agent.connectors.vllm", and drop KvdirTier from secondary_tiers'
            )
        pool = np.asarray(primary_kv_view).view(np.uint8)
        self.namespaces = _namespaces(offloading_spec.config, identity, rows=rows, row_bytes=pool.shape[1])
        self._sessions = {
            group: Engine(
                settings.agent,
                namespace=namespace,
                engine=f"vllm-{offloading_spec.config.engine_id}",
                check=settings.check,
                prefill_tokens_per_s=settings.prefill_tokens_per_s,
                probe=_probe(offloading_spec.config, identity, namespace),
            )
            for group, namespace in self.namespaces.items()
        }
        self._lookups = Lookups(self._sessions, lookup_s=settings.lookup_ms / 1000)
        self._transfers = Transfers(
            self._sessions,
            pool,
            load_s=settings.load_s,
            store_s=settings.store_s,
            max_flight_bytes=settings.max_flight_bytes,
        )
        self._sharing = True
        self._hits = self._misses = 0
        self._told: dict[str, int] = {}
        self._attach()

    def _attach(self) -> None:
        try:
            for session in self._sessions.values():
                session.attach(timeout_s=ATTACH_S)
        except KvdirError as error:
            log.warning("kvdir: nothing is shared yet, the engine runs without it and goes on trying: %s", error)
            return
        names = ", ".join(namespace.short for namespace in self.namespaces.values())
        log.info("kvdir: attached to %s with namespaces %s", next(iter(self._sessions.values())).address, names)

    def describe(self, request_id: str, *, adapter: bytes, excluded: bool) -> None:
        """What vLLM does not tell tiers of a request: digest of its LoRA's weights; whether it shares nothing."""
        self._lookups.describe(request_id, adapter=adapter, excluded=excluded)

    def stop_sharing(self) -> None:
        """For good: nothing is offered or stored any more, and what is under way counts as not loaded."""
        self._sharing = False

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._sharing:
            return LookupResult.MISS
        match self._lookups.look(req_context.req_id, key, req_context._offload_key_positions):
            case Verdict.HIT:
                self._hits += 1
                return LookupResult.HIT
            case Verdict.MISS:
                self._misses += 1
                return LookupResult.MISS
            case Verdict.WAIT:
                return LookupResult.RETRY

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, is_load=True)

    def _submit(self, transfer: TransferJob, *, is_load: bool) -> None:
        request_id = transfer.req_context.req_id
        rows, adapter = np.asarray(transfer.chunk_ids, np.int64), self._lookups.adapter(request_id)
        job = Job(transfer.job_id, tuple(transfer.keys), rows, is_load, request_id, adapter)
        if self._sharing and not self._lookups.excluded(request_id):
            self._transfers.submit(job)
        else:
            self._transfers.refuse(job)

    def get_finished_jobs(self) -> list[JobResult]:
        return [self._result(ended) for ended in self._transfers.finished()]

    def _result(self, ended: Ended) -> JobResult:
        job = ended.job
        good = ended.good if self._sharing else frozenset()  # of a load that was under way when the weights changed
        complete = ended.complete and self._sharing
        partial = job.is_load and not complete
        if partial:
            self._lookups.failed(job.request_id, [key for key in job.keys if key not in good])
        return JobResult(
            job_id=job.number,
            success=complete,
            successful_keys=[OffloadKey(key) for key in good] if partial else None,
            transfer_time=ended.took_s,
            transfer_bytes=ended.bytes_moved,
        )

    def has_pending_work(self) -> bool:
        return self._transfers.pending > 0

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget(req_context.req_id)

    def drain_jobs(self) -> None:
        self._transfers.drain()

    def shutdown(self) -> None:
        self._transfers.close()
        for session in self._sessions.values():
            session.close()
        self._lookups.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {METRIC + name: OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()}

    def counts(self) -> dict[str, int]:
        """Since the start, by the names of COUNTERS."""
        return self._transfers.counts() | {"lookup_hits": self._hits, "lookup_misses": self._misses}

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        counts = self.counts()
        for name in COUNTERS.keys() & counts.keys():
            if more := counts[name] - self._told.get(name, 0):
                stats.increase_counter(METRIC + name, more)
        self._told = counts
        return stats


def _namespaces(config: OffloadingConfig, identity: Identity, *, rows: str, row_bytes: int) -> dict[int, Namespace]:
    """Of the rows of the host pool: a block is a row, with the parts of all ranks side by side. rows: see row_form."""
    parallel = config.parallel
    if config.canonical_layout:
        order = "canonical"
    else:
        sizes = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, int(config.replicated_layout))
        order = "ranks=" + ".".join(map(str, sizes))
    digest = hashlib.blake2b(rows.encode(), digest_size=8, person=b"kvdir-rows").hexdigest()
    chunk, every = config.cache.blocks_per_chunk, config.cache.tokens_per_hash
    block_tokens = {group.group_id: group.tokens_per_block * chunk for group in config.groups}
    if set(block_tokens.values()) != {every}:
        identity = replace(identity, hash_scheme=f"{identity.hash_scheme}@{every}")
    whole = identity.namespace(
        form=f"vllm-row:{config.kv_cache_layout}:{order}:blocks={chunk}:{digest}",
        block_tokens=block_tokens,
        block_bytes={group.group_id: row_bytes for group in config.groups},
    )
    return identity.parts(whole)


def _probe(config: OffloadingConfig, identity: Identity, namespace: Namespace) -> bytes:
    """vLLM's own hash of the tokens 1, 2, ... block_tokens: the last one of their chain."""
    function = get_hash_fn_by_name(identity.hash_scheme.removeprefix("vllm:"))
    init_none_hash(function)  # the engine does so itself, after it has made its connector
    every, last = config.cache.tokens_per_hash, b""
    for start in range(1, namespace.block_tokens + 1, every):
        last = bytes(hash_block_tokens(function, last, range(start, start + every)))
    return last
