from kvdir.v1 import common_pb2 as _common_pb2
from kvdir.v1 import events_pb2 as _events_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ViewScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VIEW_SCOPE_UNSPECIFIED: _ClassVar[ViewScope]
    VIEW_SCOPE_NODE: _ClassVar[ViewScope]
    VIEW_SCOPE_TIER: _ClassVar[ViewScope]
    VIEW_SCOPE_NAMESPACE: _ClassVar[ViewScope]
    VIEW_SCOPE_TENANT: _ClassVar[ViewScope]
VIEW_SCOPE_UNSPECIFIED: ViewScope
VIEW_SCOPE_NODE: ViewScope
VIEW_SCOPE_TIER: ViewScope
VIEW_SCOPE_NAMESPACE: ViewScope
VIEW_SCOPE_TENANT: ViewScope

class NodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodesResponse(_message.Message):
    __slots__ = ("protocol_version", "nodes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    def __init__(self, protocol_version: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("trust", "last_seq", "announced_seq", "gaps", "replays", "snapshots", "used_bytes", "capacity_bytes", "dropped_events", "holdings", "untrusted_ms", "started_unix_ms", "sketches", "missed_events", "namespace_digests", "reads")
    TRUST_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_SEQ_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_EVENTS_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    UNTRUSTED_MS_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    SKETCHES_FIELD_NUMBER: _ClassVar[int]
    MISSED_EVENTS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    trust: _common_pb2.NodeTrust
    last_seq: int
    announced_seq: int
    gaps: int
    replays: int
    snapshots: int
    used_bytes: int
    capacity_bytes: int
    dropped_events: int
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    untrusted_ms: int
    started_unix_ms: int
    sketches: int
    missed_events: int
    namespace_digests: _containers.RepeatedScalarFieldContainer[bytes]
    reads: _events_pb2.ReadFigures
    def __init__(self, trust: _Optional[_Union[_common_pb2.NodeTrust, _Mapping]] = ..., last_seq: _Optional[int] = ..., announced_seq: _Optional[int] = ..., gaps: _Optional[int] = ..., replays: _Optional[int] = ..., snapshots: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., dropped_events: _Optional[int] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., untrusted_ms: _Optional[int] = ..., started_unix_ms: _Optional[int] = ..., sketches: _Optional[int] = ..., missed_events: _Optional[int] = ..., namespace_digests: _Optional[_Iterable[bytes]] = ..., reads: _Optional[_Union[_events_pb2.ReadFigures, _Mapping]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("namespace_digest", "tier", "blocks", "bytes", "owner_blocks", "owner_at_seq")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    OWNER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNER_AT_SEQ_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    tier: _common_pb2.Tier
    blocks: _common_pb2.CumulativeFigure
    bytes: _common_pb2.CumulativeFigure
    owner_blocks: int
    owner_at_seq: int
    def __init__(self, namespace_digest: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., blocks: _Optional[_Union[_common_pb2.CumulativeFigure, _Mapping]] = ..., bytes: _Optional[_Union[_common_pb2.CumulativeFigure, _Mapping]] = ..., owner_blocks: _Optional[int] = ..., owner_at_seq: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("protocol_version", "version", "coordinator", "uptime_ms", "warming", "blocks", "index_bytes", "streams_synced", "streams_total", "namespaces", "lookups", "lookup_blocks", "lookup_hits", "events_applied", "events_rejected", "stale_reports", "stale_reports_ignored", "partial", "restored_blocks", "evicted_blocks", "max_index_bytes", "watchers", "lookup_workers", "store", "store_fault")
    class EventsRejectedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    WARMING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAMS_SYNCED_FIELD_NUMBER: _ClassVar[int]
    STREAMS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_HITS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_REJECTED_FIELD_NUMBER: _ClassVar[int]
    STALE_REPORTS_FIELD_NUMBER: _ClassVar[int]
    STALE_REPORTS_IGNORED_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    RESTORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    STORE_FAULT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    version: str
    coordinator: str
    uptime_ms: int
    warming: bool
    blocks: int
    index_bytes: int
    streams_synced: int
    streams_total: int
    namespaces: _containers.RepeatedCompositeFieldContainer[_common_pb2.Namespace]
    lookups: int
    lookup_blocks: int
    lookup_hits: int
    events_applied: int
    events_rejected: _containers.ScalarMap[str, int]
    stale_reports: int
    stale_reports_ignored: int
    partial: bool
    restored_blocks: int
    evicted_blocks: int
    max_index_bytes: int
    watchers: int
    lookup_workers: int
    store: str
    store_fault: str
    def __init__(self, protocol_version: _Optional[int] = ..., version: _Optional[str] = ..., coordinator: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., warming: bool = ..., blocks: _Optional[int] = ..., index_bytes: _Optional[int] = ..., streams_synced: _Optional[int] = ..., streams_total: _Optional[int] = ..., namespaces: _Optional[_Iterable[_Union[_common_pb2.Namespace, _Mapping]]] = ..., lookups: _Optional[int] = ..., lookup_blocks: _Optional[int] = ..., lookup_hits: _Optional[int] = ..., events_applied: _Optional[int] = ..., events_rejected: _Optional[_Mapping[str, int]] = ..., stale_reports: _Optional[int] = ..., stale_reports_ignored: _Optional[int] = ..., partial: bool = ..., restored_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., max_index_bytes: _Optional[int] = ..., watchers: _Optional[int] = ..., lookup_workers: _Optional[int] = ..., store: _Optional[str] = ..., store_fault: _Optional[str] = ...) -> None: ...

class DumpRequest(_message.Message):
    __slots__ = ("namespace_digest", "node", "chunk_blocks")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    node: str
    chunk_blocks: int
    def __init__(self, namespace_digest: _Optional[bytes] = ..., node: _Optional[str] = ..., chunk_blocks: _Optional[int] = ...) -> None: ...

class DumpChunk(_message.Message):
    __slots__ = ("keys", "sets", "holder_sets", "nodes")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_SETS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    sets: bytes
    holder_sets: _containers.RepeatedScalarFieldContainer[bytes]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[bytes] = ..., sets: _Optional[bytes] = ..., holder_sets: _Optional[_Iterable[bytes]] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class ReconcileRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ReconcileResponse(_message.Message):
    __slots__ = ("protocol_version", "done", "trust", "blocks")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    done: bool
    trust: _common_pb2.NodeTrust
    blocks: int
    def __init__(self, protocol_version: _Optional[int] = ..., done: bool = ..., trust: _Optional[_Union[_common_pb2.NodeTrust, _Mapping]] = ..., blocks: _Optional[int] = ...) -> None: ...

class ViewsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ViewsResponse(_message.Message):
    __slots__ = ("protocol_version", "totals", "loads")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    totals: _containers.RepeatedCompositeFieldContainer[TotalView]
    loads: _containers.RepeatedCompositeFieldContainer[LoadView]
    def __init__(self, protocol_version: _Optional[int] = ..., totals: _Optional[_Iterable[_Union[TotalView, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[LoadView, _Mapping]]] = ...) -> None: ...

class TotalView(_message.Message):
    __slots__ = ("scope", "subject", "blocks", "bytes")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    scope: ViewScope
    subject: str
    blocks: _common_pb2.CumulativeFigure
    bytes: _common_pb2.CumulativeFigure
    def __init__(self, scope: _Optional[_Union[ViewScope, str]] = ..., subject: _Optional[str] = ..., blocks: _Optional[_Union[_common_pb2.CumulativeFigure, _Mapping]] = ..., bytes: _Optional[_Union[_common_pb2.CumulativeFigure, _Mapping]] = ...) -> None: ...

class LoadView(_message.Message):
    __slots__ = ("node", "used_bytes", "capacity_bytes", "oldest_use_ms", "read_bytes_per_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_USE_MS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    used_bytes: _common_pb2.ConvergentFigure
    capacity_bytes: _common_pb2.ConvergentFigure
    oldest_use_ms: _common_pb2.ConvergentFigure
    read_bytes_per_s: _common_pb2.ConvergentFigure
    def __init__(self, node: _Optional[str] = ..., used_bytes: _Optional[_Union[_common_pb2.ConvergentFigure, _Mapping]] = ..., capacity_bytes: _Optional[_Union[_common_pb2.ConvergentFigure, _Mapping]] = ..., oldest_use_ms: _Optional[_Union[_common_pb2.ConvergentFigure, _Mapping]] = ..., read_bytes_per_s: _Optional[_Union[_common_pb2.ConvergentFigure, _Mapping]] = ...) -> None: ...

class StoryRequest(_message.Message):
    __slots__ = ("node", "fingerprint", "max_entries")
    NODE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    node: str
    fingerprint: bytes
    max_entries: int
    def __init__(self, node: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., max_entries: _Optional[int] = ...) -> None: ...

class StoryResponse(_message.Message):
    __slots__ = ("protocol_version", "entries", "reaches_back_ms")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REACHES_BACK_MS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    entries: _containers.RepeatedCompositeFieldContainer[StoryEntry]
    reaches_back_ms: int
    def __init__(self, protocol_version: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[StoryEntry, _Mapping]]] = ..., reaches_back_ms: _Optional[int] = ...) -> None: ...

class StoryEntry(_message.Message):
    __slots__ = ("age_ms", "node", "epoch", "kind", "seq", "words")
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    age_ms: int
    node: str
    epoch: int
    kind: str
    seq: int
    words: str
    def __init__(self, age_ms: _Optional[int] = ..., node: _Optional[str] = ..., epoch: _Optional[int] = ..., kind: _Optional[str] = ..., seq: _Optional[int] = ..., words: _Optional[str] = ...) -> None: ...

class QuotasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QuotasResponse(_message.Message):
    __slots__ = ("protocol_version", "enforcing", "quotas", "orphans", "orphans_enforcing")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENFORCING_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_ENFORCING_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    enforcing: bool
    quotas: _containers.RepeatedCompositeFieldContainer[QuotaInfo]
    orphans: _containers.RepeatedCompositeFieldContainer[OrphanInfo]
    orphans_enforcing: bool
    def __init__(self, protocol_version: _Optional[int] = ..., enforcing: bool = ..., quotas: _Optional[_Iterable[_Union[QuotaInfo, _Mapping]]] = ..., orphans: _Optional[_Iterable[_Union[OrphanInfo, _Mapping]]] = ..., orphans_enforcing: bool = ...) -> None: ...

class QuotaInfo(_message.Message):
    __slots__ = ("subject", "limit_bytes", "used_bytes", "verdict", "words", "shares", "older_than_ms", "evicted_blocks", "refused")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_MS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    subject: str
    limit_bytes: int
    used_bytes: _common_pb2.CumulativeFigure
    verdict: str
    words: str
    shares: _containers.RepeatedCompositeFieldContainer[QuotaShare]
    older_than_ms: int
    evicted_blocks: int
    refused: int
    def __init__(self, subject: _Optional[str] = ..., limit_bytes: _Optional[int] = ..., used_bytes: _Optional[_Union[_common_pb2.CumulativeFigure, _Mapping]] = ..., verdict: _Optional[str] = ..., words: _Optional[str] = ..., shares: _Optional[_Iterable[_Union[QuotaShare, _Mapping]]] = ..., older_than_ms: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class QuotaShare(_message.Message):
    __slots__ = ("node", "namespace_digest", "tier", "max_blocks")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node: str
    namespace_digest: bytes
    tier: _common_pb2.Tier
    max_blocks: int
    def __init__(self, node: _Optional[str] = ..., namespace_digest: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class OrphanInfo(_message.Message):
    __slots__ = ("node", "epoch", "silent_ms", "blocks", "spared")
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SPARED_FIELD_NUMBER: _ClassVar[int]
    node: str
    epoch: int
    silent_ms: int
    blocks: int
    spared: str
    def __init__(self, node: _Optional[str] = ..., epoch: _Optional[int] = ..., silent_ms: _Optional[int] = ..., blocks: _Optional[int] = ..., spared: _Optional[str] = ...) -> None: ...

class DigestsRequest(_message.Message):
    __slots__ = ("node", "sketches")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SKETCHES_FIELD_NUMBER: _ClassVar[int]
    node: str
    sketches: bool
    def __init__(self, node: _Optional[str] = ..., sketches: bool = ...) -> None: ...

class DigestsResponse(_message.Message):
    __slots__ = ("protocol_version", "coordinator", "streams")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    coordinator: str
    streams: _containers.RepeatedCompositeFieldContainer[StreamDigest]
    def __init__(self, protocol_version: _Optional[int] = ..., coordinator: _Optional[str] = ..., streams: _Optional[_Iterable[_Union[StreamDigest, _Mapping]]] = ...) -> None: ...

class StreamDigest(_message.Message):
    __slots__ = ("trust", "applied_seq", "announced_seq", "parts", "exact")
    TRUST_FIELD_NUMBER: _ClassVar[int]
    APPLIED_SEQ_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_SEQ_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    trust: _common_pb2.NodeTrust
    applied_seq: int
    announced_seq: int
    parts: _containers.RepeatedCompositeFieldContainer[_events_pb2.SketchPart]
    exact: bool
    def __init__(self, trust: _Optional[_Union[_common_pb2.NodeTrust, _Mapping]] = ..., applied_seq: _Optional[int] = ..., announced_seq: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[_events_pb2.SketchPart, _Mapping]]] = ..., exact: bool = ...) -> None: ...

class WhoAmIRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WhoAmIResponse(_message.Message):
    __slots__ = ("protocol_version", "coordinator", "identity", "certificate", "roles", "tenants", "stores", "nodes", "remark")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REMARK_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    coordinator: str
    identity: str
    certificate: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    tenants: _containers.RepeatedScalarFieldContainer[str]
    stores: _containers.RepeatedScalarFieldContainer[str]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    remark: str
    def __init__(self, protocol_version: _Optional[int] = ..., coordinator: _Optional[str] = ..., identity: _Optional[str] = ..., certificate: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., tenants: _Optional[_Iterable[str]] = ..., stores: _Optional[_Iterable[str]] = ..., nodes: _Optional[_Iterable[str]] = ..., remark: _Optional[str] = ...) -> None: ...
