"""Every metric of both daemons: the one place where a name, its meaning and its bounds are. docs/metrics.md is made from it.

Rules: prefix kvdir_ or peer_agent_, base units, `_total` on counters, ratios 0 to 1; a label is never a fingerprint, a request
or a peer, and a tenant only as the digest of its salt. A collector makes its families by `family(name)` and knows no other way.
"""

from __future__ import annotations

import kvdir.obs.labels as by
from kvdir.obs.definition import Definition, Exposer, Family, Fold, Group, Label, counter, gauge, group, histogram, info

_C, _S, _A = (frozenset({exposer}) for exposer in (Exposer.COORDINATOR, Exposer.STORE, Exposer.AGENT))


def _calls(prefix: str, method: Label = by.METHOD) -> tuple[Definition, ...]:
    return (
        gauge(f"{prefix}_rpc_running", "Calls under way.", method),
        counter(f"{prefix}_rpc_calls_total", "Calls ended, by gRPC code.", method, by.CODE, at_most=128),
        histogram(f"{prefix}_rpc_duration_seconds", "From a call's arrival in Python to its end.", by.CALL_BUCKETS_S, method),
    )


def _security(prefix: str) -> tuple[Definition, ...]:
    return (
        gauge(f"{prefix}_tls_expires_timestamp_seconds", "When a certificate of ours ends, in unix time.", by.PORT),
        gauge(f"{prefix}_tls_fault", "1 while files of TLS that changed are not used, because they cannot be."),
        counter(f"{prefix}_tls_reloads_total", "Times that changed files of TLS were read.", by.RELOAD),
        gauge(f"{prefix}_policy_fault", "1 while the policy file cannot be used, and the last good one stays."),
        counter(f"{prefix}_policy_reloads_total", "Times that the policy was read anew.", by.RELOAD),
        counter(f"{prefix}_auth_refused_total", "Calls refused for who was calling.", by.REFUSAL),
        counter(f"{prefix}_limited_total", "Calls and connections refused because a limit was reached.", by.LIMIT),
        counter(f"{prefix}_audited_total", "Admin actions in the audit log.", by.AUDITED),
    )  # fmt: skip


def _process(prefix: str, *who: Label) -> tuple[Definition, ...]:
    return (
        info(f"{prefix}_build_info", "1, with what runs.", *by.BUILD, *who),
        counter(f"{prefix}_log_lines_dropped_total", "Log lines lost because whoever reads them did not."),
        counter(f"{prefix}_log_lines_suppressed_total", "Log lines left out because they repeated others."),
        counter(f"{prefix}_spans_total", "Spans of sampled requests, by what became of them.", by.SPAN),
        gauge(f"{prefix}_loop_lag_seconds", "How late the last tick of the event loop was."),
        histogram(f"{prefix}_scrape_duration_seconds", "Time that the answer to a scraper took.", by.TRANSFER_BUCKETS_S),
    )  # fmt: skip


GROUPS: tuple[Group, ...] = (
    group(
        "Calls", "How much is asked of a coordinator, how fast is it, what fails?", "Directory and trust", _C | _S,
        *_calls("kvdir"),
    ),
    group(
        "Lookups", "Do lookups find blocks, and does what they name exist?", "Directory and trust", _C | _S,
        counter("kvdir_lookups_total", "Lists looked up."),
        counter("kvdir_lookup_blocks_total", "Positions asked for in lookups."),
        counter("kvdir_lookup_hits_total", "Positions for which some node was named."),
        counter("kvdir_lookup_nodes_below_trust_total", "Nodes left out of answers: the caller asked for more trust."),
        counter("kvdir_stale_reports_total", "Reports that an owner did not hold what the directory named."),
        counter(
            "kvdir_stale_reports_ignored_total", "Of those, ignored: old epoch, unknown node, or older than a later store.",
        ),
        counter(
            "kvdir_stale_blocks_total",
            "Blocks that lookups named and owners did not hold, as reported and believed; of the lookup hits.",
        ),
    ),
    group(
        "Events and streams", "Does the directory follow its nodes, and what was lost on the way?", "Directory and trust",
        _C | _S,
        counter("kvdir_batches_total", "Batches received, duplicates included."),
        counter("kvdir_events_applied_total", "Events applied, in order or as hints."),
        counter("kvdir_events_rejected_total", "Events skipped.", by.REASON),
        counter("kvdir_snapshots_applied_total", "Snapshots that replaced what was known."),
        counter("kvdir_snapshots_refused_total", "Snapshots discarded because they contradicted themselves."),
        counter("kvdir_fenced_total", "Epochs fenced, by a newer one or by goodbye."),
        counter("kvdir_namespaces_refused_total", "Namespace announcements that could not be read or believed."),
        gauge("kvdir_namespaces", "Namespaces announced."),
        gauge("kvdir_warming", "1 while some node has not restated what it holds since the start."),
        gauge("kvdir_streams", "Streams of nodes.", by.STATE),
        gauge("kvdir_stream_age_seconds", "Since the node was last heard.", by.NODE, fold=Fold.MAX),
        gauge("kvdir_stream_lag_events", "Known sequence numbers not yet applied in order.", by.NODE),
        gauge("kvdir_stream_missing_events", "Events known lost and not repaired.", by.NODE),
        counter("kvdir_stream_missed_events_total", "Events that were missing at some time in the current epoch.", by.NODE),
        gauge("kvdir_stream_confirmed_ratio", "Share of a node's entries confirmed in sum.", by.NODE, fold=Fold.MIN),
        counter("kvdir_stream_gaps_total", "Holes seen in the current epoch.", by.NODE),
        counter("kvdir_stream_repairs_total", "Repairs asked for in this epoch.", by.NODE, by.REPAIR),
        counter(
            "kvdir_stream_untrusted_seconds_total", "Time for which the node's cumulative figures were untrusted.", by.NODE,
        ),
    ),
    group(
        "Repairs and trust", "What do losses cost, and which sums may be acted upon?", "Directory and trust", _C,
        counter("kvdir_stored_blocks_total", "Blocks that gained a holder."),
        counter("kvdir_removed_blocks_total", "Blocks that lost a holder."),
        counter("kvdir_gaps_total", "Holes seen in streams, over all nodes and epochs."),
        counter("kvdir_repairs_total", "Repairs of streams.", by.REPAIR, by.REPAIRED),
        counter("kvdir_repair_bytes_total", "Bytes of content that came to repair streams.", by.REPAIR),
        counter("kvdir_repair_seconds_total", "From asking to being whole, of repairs that succeeded.", by.REPAIR),
        counter("kvdir_sketch_failures_total", "Sketches that repaired nothing.", by.REASON),
        counter("kvdir_digest_proofs_total", "Comparisons that proved a stream equal to its owner's set."),
        counter("kvdir_digest_contradictions_total", "Comparisons that found a stream wrong though nothing was missing."),
        counter("kvdir_sketch_repaired_blocks_total", "Blocks by which streams differed when a sketch repaired them."),
        gauge("kvdir_views", "Sums of blocks, by whether they may be trusted.", by.SCOPE, by.TRUSTED),
        gauge("kvdir_view_trusted_ratio", "Share of the sums that may be trusted; 1 where there are none.", by.SCOPE),
    ),
    group(
        "Index", "How full is the directory, and does it forget for want of memory?", "Capacity", _C,
        gauge("kvdir_index_blocks", "Distinct blocks in the index."),
        gauge("kvdir_index_bytes", "Resident bytes of the index."),
        gauge("kvdir_index_max_bytes", "Bound of the index, 0 for none."),
        gauge("kvdir_index_sets", "Distinct holder sets."),
        counter(
            "kvdir_index_evicted_blocks_total",
            "Pairs of block and holder that went for max_index_bytes; what they said is unknown since.",
        ),
        gauge("kvdir_holders", "Holder numbers in use."),
        gauge("kvdir_partial_holders", "Holders of which entries were evicted that their owners may still hold."),
    ),
    group(
        "Quotas, orphans and checkpoints", "What deletes, and what survives a restart?", "Capacity", _C,
        gauge("kvdir_quota_limit_bytes", "Quota.", by.SUBJECT),
        gauge("kvdir_quota_used_bytes", "What counts against it, trusted or not.", by.SUBJECT),
        gauge("kvdir_quota_trusted", "1 while that figure may be acted upon.", by.SUBJECT, fold=Fold.MIN),
        gauge("kvdir_quota_verdict", "1 for how the quota stands.", by.SUBJECT, by.VERDICT),
        counter("kvdir_quota_evicted_blocks_total", "Blocks that agents evicted for the quota, as they said.", by.SUBJECT),
        counter("kvdir_quota_refused_total", "Looks at the quota that ended: the figure was not trusted.", by.SUBJECT),
        gauge("kvdir_orphans", "Nodes gone for long, by what becomes of their entries.", by.FATE),
        counter("kvdir_orphans_forgotten_total", "Nodes forgotten after long silence."),
        counter("kvdir_orphan_blocks_forgotten_total", "Entries forgotten with them."),
        counter("kvdir_checkpoints_written_total", "Checkpoint files written."),
        counter("kvdir_checkpoints_failed_total", "Checkpoint files that could not be written."),
        counter("kvdir_checkpoints_refused_total", "1 if the file at start was refused, and the coordinator began empty."),
        gauge("kvdir_partial", "1 while warming has ended and some live node has still not restated what it holds."),
        gauge("kvdir_checkpoint_bytes", "Size of the last checkpoint written."),
        gauge("kvdir_checkpoint_seconds", "Time that writing it took, beside other work."),
        gauge("kvdir_checkpoint_restored_blocks", "Pairs of block and holder that came from the checkpoint at start."),
        gauge("kvdir_restored_blocks", "Of those, hints that their nodes have not confirmed yet."),
    ),
    group(
        "Watchers", "Who follows the directory, and who is too slow?", "Capacity", _C,
        counter("kvdir_watch_opened_total", "Watch calls begun."),
        counter("kvdir_watch_snapshots_total", "Watch calls that began with a snapshot."),
        counter("kvdir_watch_resumed_total", "Watch calls that went on where an earlier one ended."),
        counter("kvdir_watch_cut_off_total", "Watchers cut off because they were too slow."),
        counter("kvdir_watch_refused_total", "Watchers refused because there were max_watchers."),
        counter("kvdir_watch_messages_total", "Messages sent to watchers."),
        counter("kvdir_watch_sent_bytes_total", "Bytes sent to watchers."),
        gauge("kvdir_watchers", "Replicas that watch now."),
        gauge("kvdir_watch_behind_seconds", "How long at most something has waited for the slowest watcher."),
        gauge("kvdir_watch_log_bytes", "Changes kept for watchers; none are while nobody watches."),
    ),
    group(
        "Lookup workers", "Do the processes that answer lookups live?", "Capacity", _C,
        gauge("kvdir_lookup_workers", "Lookup workers that serve."),
        counter("kvdir_lookup_worker_restarts_total", "Lookup workers that ended and were replaced."),
        counter("kvdir_lookup_worker_kills_total", "Of those, ended by us because they hung."),
        counter("kvdir_lookups_passed_on_total", "Lookups that a worker left to the main process, which counts them."),
        when="`lookup_workers` is above 0",
    ),
    group(
        "Shared store", "Does the store that coordinators share answer, and does it lose anything?", "Directory and trust",
        _S,
        *_calls("kvdir_store"),
        counter("kvdir_store_retries_total", "Retries inside calls to the store.", by.REASON),
        gauge("kvdir_sessions", "Streams that publish to this coordinator."),
        gauge("kvdir_store_up", "1 if the store answered when last asked."),
        gauge(
            "kvdir_store_breaker_open",
            "1 while lookups are answered without asking the store, because it has just not answered.",
        ),
        counter("kvdir_store_breaker_opened_total", "How often lookups stopped asking the store."),
        counter("kvdir_lookups_without_store_total", "Lookups answered without hits because the store did not answer."),
        gauge("kvdir_store_used_bytes", "Memory of the store's servers."),
        gauge("kvdir_store_max_bytes", "Their bound; 0: none, somewhere."),
        gauge("kvdir_store_evicts", "1 if the store takes blocks away when it is full."),
        gauge("kvdir_store_unreadable_nodes", "Nodes saved by another release, left out here."),
        counter("kvdir_store_evicted_total", "Keys the store's servers evicted."),
        counter("kvdir_store_lost_buckets_total", "Parts of the store found missing."),
        counter("kvdir_store_swept_blocks_total", "Blocks of dropped holders freed by this coordinator."),
        when="`store` is a Redis or Valkey",
    ),
    group(
        "Security of a coordinator", "Who is refused, and when do certificates end?", "Fleet", _C | _S,
        *_security("kvdir"),
    ),
    group("Inside a coordinator", "What runs, and is its event loop free?", "Fleet", _C | _S, *_process("kvdir")),
    group(
        "Arena", "What does a node hold, and how full is it?", "Node", _A,
        gauge("peer_agent_arena_bytes", "Size of the arena."),
        gauge("peer_agent_arena_huge_bytes", "Of the arena, when the agent started: mapped by huge pages."),
        gauge("peer_agent_slots", "Slots.", by.NAMESPACE, by.SLOT),
        gauge("peer_agent_held_bytes", "Payload bytes of visible blocks.", by.NAMESPACE),
        gauge("peer_agent_guarded_slots", "Slots that eviction may not take.", by.NAMESPACE, by.GUARD),
        gauge("peer_agent_quarantined_bytes", "Slots out of use until a late transfer can no longer write into them."),
        counter("peer_agent_evicted_blocks_total", "Blocks evicted since start.", by.NAMESPACE),
        gauge(
            "peer_agent_incomplete_blocks",
            "Visible blocks that are not published, because another rank of the split lacks its part.", by.NAMESPACE,
        ),
        gauge(
            "peer_agent_accepted_namespaces",
            "Namespaces that engines brought along (accept_bytes); room: how many more there can be.",
            by.ACCEPTED,
        ),
        gauge("peer_agent_locks", "Locks held by peers and engines."),
        gauge("peer_agent_engine_sessions", "Engines attached."),
        gauge("peer_agent_device_pools", "Pools of device memory registered now."),
        gauge("peer_agent_device_blocks", "Blocks published from devices.", by.NAMESPACE),
        counter("peer_agent_staged_blocks_total", "Blocks asked of devices, by what became of it.", by.STAGED),
    ),
    group(
        "Loads", "What do engines get, and is it worth it?", "Transfers", _A,
        counter("peer_agent_loads_total", "Loads answered."),
        counter("peer_agent_refused_loads_total", "Loads answered from here only, because too much was under way."),
        histogram("peer_agent_load_duration_seconds", "Of loads that asked peers.", by.TRANSFER_BUCKETS_S, by.PRIORITY),
        counter("peer_agent_load_blocks_total", "Blocks asked by engines, by result.", by.STATUS),
        counter("peer_agent_loaded_tokens_total", "Tokens of blocks that loads of engines found or brought.", by.SOURCE),
        counter(
            "peer_agent_metadata_calls_total", "Calls about blocks for loads; per loaded token, what a token costs.",
            by.METADATA,
        ),
        counter("peer_agent_owner_blocks_total", "Blocks that owners were asked to lock, by their answer.", by.ANSWER),
        histogram(
            "peer_agent_used_entry_age_seconds",
            "Of blocks that owners locked: how old the word of their node was when the directory named it.", by.AGE_BUCKETS_S,
        ),
        counter("peer_agent_saved_seconds_total", "Recompute time saved by blocks from peers; prefill rate known."),
        counter("peer_agent_spent_seconds_total", "Time of loads that asked peers; prefill rate known."),
        gauge("peer_agent_net_gain_seconds", "Seconds saved less spent; falls when hits cost more than they save."),
        histogram("peer_agent_load_prediction_ratio", "Of loads from peers: duration by the predicted one.", by.RATIO_BUCKETS),
        counter("peer_agent_directory_failures_total", "Loads that reached no directory in time."),
        counter("peer_agent_stale_reported_blocks_total", "Blocks reported stale to the directory."),
        counter("peer_agent_stale_unreported_blocks_total", "Stale blocks that could not be reported."),
        counter("peer_agent_no_space_blocks_total", "Blocks not read for want of a free slot."),
        counter("peer_agent_waited_blocks_total", "Blocks that somebody else was writing already."),
        counter(
            "peer_agent_prefetched_blocks_total", "Blocks that prefetches brought; of them: used, evicted unused.",
            by.PREFETCH,
        ),
    ),
    group(
        "Transfers", "How fast do bytes come, over what, and how many for nothing?", "Transfers", _A,
        counter("peer_agent_peer_read_bytes_total", "Bytes read from peers and verified."),
        histogram("peer_agent_read_duration_seconds", "Duration of single reads from peers.", by.TRANSFER_BUCKETS_S, by.PLANE),
        histogram("peer_agent_read_prediction_ratio", "Of reads: duration by the predicted one.", by.RATIO_BUCKETS, by.PLANE),
        counter("peer_agent_read_bytes_total", "Payload bytes of single reads from peers.", by.PLANE),
        gauge("peer_agent_flight_bytes", "Bytes under way from peers."),
        gauge("peer_agent_queued_reads", "Reads that wait for their turn.", by.PRIORITY),
        counter("peer_agent_peer_failures_total", "Peers that did not answer a lock."),
        counter("peer_agent_hedged_reads_total", "Reads begun at a second peer because the first was overdue."),
        counter("peer_agent_hedged_reads_won_total", "Of those, the ones that brought a block first."),
        counter("peer_agent_hedged_bytes_total", "Bytes that arrived although another peer had brought them."),
        counter("peer_agent_late_bytes_total", "Payload of blocks that were on their way and not here by the deadline."),
        counter("peer_agent_unused_bytes_total", "Bytes read from peers that no load used.", by.UNUSED),
        counter("peer_agent_quarantined_blocks_total", "Blocks whose late transfer took their slots out of use."),
        gauge("peer_agent_connected_peers", "Peers connected, by plane in use.", by.PLANE),
        gauge("peer_agent_plane_lanes", "Connections by the lane really in use.", by.PLANE, by.LANE, at_most=32),
        gauge("peer_agent_transport_info", "1 for every transport really in use.", by.PLANE, by.TRANSPORT, at_most=32),
        gauge("peer_agent_fallback_peers", "Peers connected by another plane than the first one that both sides have."),
    ),
    group(
        "Serving peers", "What does this node give to others?", "Node", _A,
        counter("peer_agent_served_reads_total", "Reads of peers that our planes served, where a plane sees them.", by.PLANE),
        counter("peer_agent_served_blocks_total", "Blocks in them.", by.PLANE),
        counter("peer_agent_served_bytes_total", "Payload bytes in them.", by.PLANE),
        counter("peer_agent_serving_faults_total", "What our planes did not serve.", by.PLANE, by.SERVING_FAULT),
        gauge("peer_agent_plane_connections", "Connections of peers open now.", by.PLANE),
        counter("peer_agent_mover_starts_total", "Mover processes started.", by.PLANE),
        counter("peer_agent_mover_kills_total", "Of those, ended by us because they were silent.", by.PLANE),
        counter("peer_agent_tls_handshakes_total", "Handshakes at the data port, by how they ended.", by.HANDSHAKE),
    ),
    group(
        "Publishing", "Does the directory hear of this node?", "Node", _A,
        counter("peer_agent_events_total", "Sequence numbers consumed."),
        gauge("peer_agent_publisher_connected", "1 if connected.", by.COORDINATOR),
        gauge("peer_agent_publisher_standby", "1 if another coordinator of the same store is spoken to.", by.COORDINATOR),
        gauge("peer_agent_unacked_events", "Events not acknowledged yet.", by.COORDINATOR, fold=Fold.MAX),
        counter("peer_agent_skipped_events_total", "Events too old to be sent.", by.COORDINATOR),
        counter("peer_agent_snapshots_total", "Snapshots sent.", by.COORDINATOR),
        counter("peer_agent_sketches_total", "Sketches sent.", by.COORDINATOR),
        counter("peer_agent_replays_total", "Replays asked for.", by.COORDINATOR),
        counter("peer_agent_lost_events_total", "Events dropped on purpose (event_loss).", by.COORDINATOR),
        gauge("peer_agent_fenced", "1 if a newer agent of this name publishes."),
    ),
    group(
        "Questions to coordinators", "Does the agent reach a directory in time?", "Directory and trust", _A,
        counter("peer_agent_directory_questions_total", "Questions to the coordinators."),
        counter("peer_agent_directory_hedges_total", "Second questions beside one that was slow."),
        counter("peer_agent_directory_hedges_won_total", "Of those, the ones that were answered first."),
        counter("peer_agent_directory_moved_on_total", "Questions to the next coordinator because one failed."),
        when="the agent has coordinators",
    ),
    group(
        "Replica", "Is the copy of the directory on this node fresh?", "Node", _A,
        counter("peer_agent_nominations_total", "Loads by who said whom to ask.", by.NOMINATOR),
        gauge("peer_agent_replica_lag_seconds", "How far the replica may be behind its coordinator."),
        gauge("peer_agent_replica_blocks", "Blocks in the replica."),
        gauge("peer_agent_replica_bytes", "Memory that the replica takes."),
        gauge("peer_agent_replica_connected", "1 if a coordinator is followed now."),
        gauge("peer_agent_replica_incomplete", "1 if entries are missing for want of memory, here or there."),
        counter("peer_agent_replica_snapshots_total", "Snapshots begun."),
        counter("peer_agent_replica_resumes_total", "Calls that went on where the last one ended."),
        counter("peer_agent_replica_faults_total", "Feeds that made no sense and were begun anew."),
        counter("peer_agent_replica_received_bytes_total", "Bytes of the feed."),
        counter("peer_agent_replica_applied_blocks_total", "Changes of blocks applied."),
        counter("peer_agent_replica_lost_blocks_total", "Blocks that did not fit."),
        when="`replica` is on",
    ),
    group(
        "Engine streams", "Does the agent follow this host's engines?", "Node", _A,
        gauge("peer_agent_engine_connected", "1 if somebody is at the other end of the subscription.", by.STREAM),
        gauge("peer_agent_engine_blocks", "Blocks that the engine is said to hold, over all tiers and groups.", by.STREAM),
        gauge("peer_agent_engine_in_doubt", "1 while nobody can vouch for what the engine holds.", by.STREAM),
        gauge("peer_agent_engine_last_event_age_seconds", "Since the last event; -1: none yet.", by.STREAM, fold=Fold.MAX),
        counter("peer_agent_engine_batches_total", "Batches of events taken.", by.STREAM),
        counter("peer_agent_engine_events_total", "Events in them.", by.STREAM),
        counter("peer_agent_engine_payload_bytes_total", "Bytes of them.", by.STREAM),
        counter("peer_agent_engine_replays_total", "Replays asked for.", by.STREAM),
        counter("peer_agent_engine_lost_batches_total", "Batches that nothing brought back.", by.STREAM),
        counter("peer_agent_engine_restarts_total", "Times that the engine began anew.", by.STREAM),
        counter("peer_agent_engine_malformed_total", "Messages that are none of an event stream.", by.STREAM),
        counter("peer_agent_engine_rejected_total", "Events not taken.", by.STREAM, by.REASON, at_most=64),
        gauge("peer_agent_engine_findings", "1 for what stands in the way.", by.STREAM, by.FINDING, at_most=64),
        when="`engine` names one",
    ),
    group(
        "Calls of an agent", "How much do engines and peers ask of it?", "Node", _A,
        *_calls("peer_agent", by.AGENT_METHOD),
        counter("peer_agent_rpc_bugs_total", "Calls that ended in an unexpected error."),
        counter("peer_agent_task_failures_total", "Background tasks that failed."),
        gauge("peer_agent_tasks", "Background tasks running."),
    ),
    group(
        "Security of an agent", "Who is refused, and when do certificates end?", "Fleet", _A,
        *_security("peer_agent"),
        counter("peer_agent_capability_refused_total", "Reads refused because what they showed proves no lock.", by.CAPABILITY),
    ),
    group("Inside an agent", "What runs, and is its event loop free?", "Fleet", _A, *_process("peer_agent", by.OWN_NODE)),
    group(
        "Process", "What does the process take? As every Prometheus client has it.", "Fleet", _C | _S | _A,
        gauge("process_virtual_memory_bytes", "Virtual memory size in bytes."),
        gauge("process_resident_memory_bytes", "Resident memory size in bytes."),
        gauge("process_start_time_seconds", "Start time of the process since unix epoch in seconds."),
        counter("process_cpu_seconds_total", "Total user and system CPU time spent in seconds."),
        gauge("process_open_fds", "Number of open file descriptors."),
        gauge("process_max_fds", "Maximum number of open file descriptors."),
    ),
)  # fmt: skip

DEFINITIONS: dict[str, Definition] = {metric.name: metric for group in GROUPS for metric in group.metrics}


def family(name: str) -> Family:
    """The family of a metric, with nothing in it but what is known beforehand. Raises KeyError: declare it above."""
    return Family(DEFINITIONS[name])


def value(name: str, amount: float) -> Family:
    """The family of a metric without labels."""
    return family(name).add(amount)


def tallied(prefix: str) -> tuple[str, ...]:
    """Names of what a Tally keeps."""
    names = [metric.name for metric in (*_security(prefix), *_process(prefix))]
    return (*names, "peer_agent_capability_refused_total") if prefix == "peer_agent" else tuple(names)


def exposed_by(exposer: Exposer, *, always: bool = False) -> tuple[Definition, ...]:
    """What a daemon has; always: without what something has to be switched on for."""
    return tuple(
        metric for group in GROUPS if exposer in group.exposers and not (always and group.when) for metric in group.metrics
    )
