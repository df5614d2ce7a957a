from kvdir.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LookupMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOOKUP_MODE_UNSPECIFIED: _ClassVar[LookupMode]
    LOOKUP_MODE_SPARSE: _ClassVar[LookupMode]
    LOOKUP_MODE_PREFIX: _ClassVar[LookupMode]
LOOKUP_MODE_UNSPECIFIED: LookupMode
LOOKUP_MODE_SPARSE: LookupMode
LOOKUP_MODE_PREFIX: LookupMode

class LookupRequest(_message.Message):
    __slots__ = ("namespace_digest", "fingerprints", "mode", "touch", "min_trust")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    MIN_TRUST_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    fingerprints: _common_pb2.Fingerprints
    mode: LookupMode
    touch: bool
    min_trust: _common_pb2.MinTrust
    def __init__(self, namespace_digest: _Optional[bytes] = ..., fingerprints: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ..., mode: _Optional[_Union[LookupMode, str]] = ..., touch: bool = ..., min_trust: _Optional[_Union[_common_pb2.MinTrust, str]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("protocol_version", "runs", "sets", "nodes", "hits", "asked", "warming", "nodes_below_trust", "error", "lag_ms", "incomplete")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    WARMING_FIELD_NUMBER: _ClassVar[int]
    NODES_BELOW_TRUST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LAG_MS_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    runs: bytes
    sets: _containers.RepeatedCompositeFieldContainer[HolderSet]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeTrust]
    hits: int
    asked: int
    warming: bool
    nodes_below_trust: int
    error: str
    lag_ms: int
    incomplete: bool
    def __init__(self, protocol_version: _Optional[int] = ..., runs: _Optional[bytes] = ..., sets: _Optional[_Iterable[_Union[HolderSet, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeTrust, _Mapping]]] = ..., hits: _Optional[int] = ..., asked: _Optional[int] = ..., warming: bool = ..., nodes_below_trust: _Optional[int] = ..., error: _Optional[str] = ..., lag_ms: _Optional[int] = ..., incomplete: bool = ...) -> None: ...

class HolderSet(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: bytes
    def __init__(self, holders: _Optional[bytes] = ...) -> None: ...

class LookupBatchRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LookupRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[LookupRequest, _Mapping]]] = ...) -> None: ...

class LookupBatchResponse(_message.Message):
    __slots__ = ("protocol_version", "responses")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    responses: _containers.RepeatedCompositeFieldContainer[LookupResponse]
    def __init__(self, protocol_version: _Optional[int] = ..., responses: _Optional[_Iterable[_Union[LookupResponse, _Mapping]]] = ...) -> None: ...

class LookupStreamRequest(_message.Message):
    __slots__ = ("lookups",)
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    lookups: _containers.RepeatedCompositeFieldContainer[StreamedLookup]
    def __init__(self, lookups: _Optional[_Iterable[_Union[StreamedLookup, _Mapping]]] = ...) -> None: ...

class StreamedLookup(_message.Message):
    __slots__ = ("id", "lookup", "deadline_ms", "context")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    id: int
    lookup: LookupRequest
    deadline_ms: int
    context: RequestContext
    def __init__(self, id: _Optional[int] = ..., lookup: _Optional[_Union[LookupRequest, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., context: _Optional[_Union[RequestContext, _Mapping]] = ...) -> None: ...

class RequestContext(_message.Message):
    __slots__ = ("traceparent", "tracestate", "request_id")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    tracestate: str
    request_id: str
    def __init__(self, traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class LookupStreamResponse(_message.Message):
    __slots__ = ("answers", "draining")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[StreamedAnswer]
    draining: bool
    def __init__(self, answers: _Optional[_Iterable[_Union[StreamedAnswer, _Mapping]]] = ..., draining: bool = ...) -> None: ...

class StreamedAnswer(_message.Message):
    __slots__ = ("id", "lookup")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    id: int
    lookup: LookupResponse
    def __init__(self, id: _Optional[int] = ..., lookup: _Optional[_Union[LookupResponse, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("start", "credit")
    START_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    start: WatchStart
    credit: WatchCredit
    def __init__(self, start: _Optional[_Union[WatchStart, _Mapping]] = ..., credit: _Optional[_Union[WatchCredit, _Mapping]] = ...) -> None: ...

class WatchStart(_message.Message):
    __slots__ = ("protocol_version", "watcher", "log_id", "position", "namespace_digests", "credit_bytes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WATCHER_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    watcher: str
    log_id: int
    position: int
    namespace_digests: _containers.RepeatedScalarFieldContainer[bytes]
    credit_bytes: int
    def __init__(self, protocol_version: _Optional[int] = ..., watcher: _Optional[str] = ..., log_id: _Optional[int] = ..., position: _Optional[int] = ..., namespace_digests: _Optional[_Iterable[bytes]] = ..., credit_bytes: _Optional[int] = ...) -> None: ...

class WatchCredit(_message.Message):
    __slots__ = ("total_bytes",)
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    def __init__(self, total_bytes: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("welcome", "items", "position", "beat", "end")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    welcome: WatchWelcome
    items: _containers.RepeatedCompositeFieldContainer[WatchItem]
    position: int
    beat: WatchBeat
    end: WatchEnd
    def __init__(self, welcome: _Optional[_Union[WatchWelcome, _Mapping]] = ..., items: _Optional[_Iterable[_Union[WatchItem, _Mapping]]] = ..., position: _Optional[int] = ..., beat: _Optional[_Union[WatchBeat, _Mapping]] = ..., end: _Optional[_Union[WatchEnd, _Mapping]] = ...) -> None: ...

class WatchWelcome(_message.Message):
    __slots__ = ("protocol_version", "coordinator", "log_id", "snapshot", "seed", "blocks", "beat_interval_ms", "stale_after_ms", "expire_after_ms")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    STALE_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    coordinator: str
    log_id: int
    snapshot: bool
    seed: int
    blocks: int
    beat_interval_ms: int
    stale_after_ms: int
    expire_after_ms: int
    def __init__(self, protocol_version: _Optional[int] = ..., coordinator: _Optional[str] = ..., log_id: _Optional[int] = ..., snapshot: bool = ..., seed: _Optional[int] = ..., blocks: _Optional[int] = ..., beat_interval_ms: _Optional[int] = ..., stale_after_ms: _Optional[int] = ..., expire_after_ms: _Optional[int] = ...) -> None: ...

class WatchItem(_message.Message):
    __slots__ = ("node", "holder", "stored", "removed", "dropped", "page", "snapshot_end", "namespace", "heard", "namespace_gone")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_GONE_FIELD_NUMBER: _ClassVar[int]
    node: WatchNode
    holder: WatchHolder
    stored: WatchBlocks
    removed: WatchBlocks
    dropped: WatchDropped
    page: WatchPage
    snapshot_end: WatchSnapshotEnd
    namespace: _common_pb2.Namespace
    heard: WatchHeard
    namespace_gone: bytes
    def __init__(self, node: _Optional[_Union[WatchNode, _Mapping]] = ..., holder: _Optional[_Union[WatchHolder, _Mapping]] = ..., stored: _Optional[_Union[WatchBlocks, _Mapping]] = ..., removed: _Optional[_Union[WatchBlocks, _Mapping]] = ..., dropped: _Optional[_Union[WatchDropped, _Mapping]] = ..., page: _Optional[_Union[WatchPage, _Mapping]] = ..., snapshot_end: _Optional[_Union[WatchSnapshotEnd, _Mapping]] = ..., namespace: _Optional[_Union[_common_pb2.Namespace, _Mapping]] = ..., heard: _Optional[_Union[WatchHeard, _Mapping]] = ..., namespace_gone: _Optional[bytes] = ...) -> None: ...

class WatchNode(_message.Message):
    __slots__ = ("slot", "trust", "hidden", "gone")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    trust: _common_pb2.NodeTrust
    hidden: bool
    gone: bool
    def __init__(self, slot: _Optional[int] = ..., trust: _Optional[_Union[_common_pb2.NodeTrust, _Mapping]] = ..., hidden: bool = ..., gone: bool = ...) -> None: ...

class WatchHolder(_message.Message):
    __slots__ = ("number", "node_slot", "namespace_digest", "tier", "visible")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_SLOT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_FIELD_NUMBER: _ClassVar[int]
    number: int
    node_slot: int
    namespace_digest: bytes
    tier: _common_pb2.Tier
    visible: bool
    def __init__(self, number: _Optional[int] = ..., node_slot: _Optional[int] = ..., namespace_digest: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., visible: bool = ...) -> None: ...

class WatchBlocks(_message.Message):
    __slots__ = ("holder", "packed")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    holder: int
    packed: bytes
    def __init__(self, holder: _Optional[int] = ..., packed: _Optional[bytes] = ...) -> None: ...

class WatchDropped(_message.Message):
    __slots__ = ("holder",)
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    holder: int
    def __init__(self, holder: _Optional[int] = ...) -> None: ...

class WatchPage(_message.Message):
    __slots__ = ("keys", "ages", "sets", "holder_sets", "done_blocks")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    AGES_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_SETS_FIELD_NUMBER: _ClassVar[int]
    DONE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    ages: bytes
    sets: bytes
    holder_sets: _containers.RepeatedScalarFieldContainer[bytes]
    done_blocks: int
    def __init__(self, keys: _Optional[bytes] = ..., ages: _Optional[bytes] = ..., sets: _Optional[bytes] = ..., holder_sets: _Optional[_Iterable[bytes]] = ..., done_blocks: _Optional[int] = ...) -> None: ...

class WatchSnapshotEnd(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class WatchHeard(_message.Message):
    __slots__ = ("packed",)
    PACKED_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    def __init__(self, packed: _Optional[bytes] = ...) -> None: ...

class WatchBeat(_message.Message):
    __slots__ = ("head", "behind_us", "warming", "incomplete", "credit_bytes")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BEHIND_US_FIELD_NUMBER: _ClassVar[int]
    WARMING_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    head: int
    behind_us: int
    warming: bool
    incomplete: bool
    credit_bytes: int
    def __init__(self, head: _Optional[int] = ..., behind_us: _Optional[int] = ..., warming: bool = ..., incomplete: bool = ..., credit_bytes: _Optional[int] = ...) -> None: ...

class WatchEnd(_message.Message):
    __slots__ = ("reason", "begin_anew")
    REASON_FIELD_NUMBER: _ClassVar[int]
    BEGIN_ANEW_FIELD_NUMBER: _ClassVar[int]
    reason: str
    begin_anew: bool
    def __init__(self, reason: _Optional[str] = ..., begin_anew: bool = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("parts", "weights", "min_trust", "max_instances")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MIN_TRUST_FIELD_NUMBER: _ClassVar[int]
    MAX_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[ScorePart]
    weights: _containers.RepeatedCompositeFieldContainer[TierWeight]
    min_trust: _common_pb2.MinTrust
    max_instances: int
    def __init__(self, parts: _Optional[_Iterable[_Union[ScorePart, _Mapping]]] = ..., weights: _Optional[_Iterable[_Union[TierWeight, _Mapping]]] = ..., min_trust: _Optional[_Union[_common_pb2.MinTrust, str]] = ..., max_instances: _Optional[int] = ...) -> None: ...

class ScorePart(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[ScoreGroup]
    def __init__(self, groups: _Optional[_Iterable[_Union[ScoreGroup, _Mapping]]] = ...) -> None: ...

class ScoreGroup(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedCompositeFieldContainer[ScoreName]
    def __init__(self, names: _Optional[_Iterable[_Union[ScoreName, _Mapping]]] = ...) -> None: ...

class ScoreName(_message.Message):
    __slots__ = ("namespace_digest", "fingerprints")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    fingerprints: _common_pb2.Fingerprints
    def __init__(self, namespace_digest: _Optional[bytes] = ..., fingerprints: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ...) -> None: ...

class TierWeight(_message.Message):
    __slots__ = ("tier", "weight")
    TIER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    weight: float
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., weight: _Optional[float] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("protocol_version", "instances", "nodes", "warming", "incomplete", "unknown_namespaces", "nodes_below_trust")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    WARMING_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NODES_BELOW_TRUST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    instances: _containers.RepeatedCompositeFieldContainer[InstanceScore]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeTrust]
    warming: bool
    incomplete: bool
    unknown_namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    nodes_below_trust: int
    def __init__(self, protocol_version: _Optional[int] = ..., instances: _Optional[_Iterable[_Union[InstanceScore, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeTrust, _Mapping]]] = ..., warming: bool = ..., incomplete: bool = ..., unknown_namespaces: _Optional[_Iterable[bytes]] = ..., nodes_below_trust: _Optional[int] = ...) -> None: ...

class InstanceScore(_message.Message):
    __slots__ = ("instance", "score", "matched_tokens", "tiers", "ranks", "nodes")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    instance: str
    score: float
    matched_tokens: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierMatch]
    ranks: _containers.RepeatedCompositeFieldContainer[RankMatch]
    nodes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, instance: _Optional[str] = ..., score: _Optional[float] = ..., matched_tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierMatch, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankMatch, _Mapping]]] = ..., nodes: _Optional[_Iterable[int]] = ...) -> None: ...

class TierMatch(_message.Message):
    __slots__ = ("tier", "tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    tokens: int
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., tokens: _Optional[int] = ...) -> None: ...

class RankMatch(_message.Message):
    __slots__ = ("dp_rank", "tokens", "through")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    THROUGH_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    tokens: int
    through: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dp_rank: _Optional[int] = ..., tokens: _Optional[int] = ..., through: _Optional[_Iterable[int]] = ...) -> None: ...
