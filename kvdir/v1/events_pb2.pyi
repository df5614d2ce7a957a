from kvdir.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_STORED: _ClassVar[EventKind]
    EVENT_KIND_REMOVED: _ClassVar[EventKind]
    EVENT_KIND_CLEARED: _ClassVar[EventKind]
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_STORED: EventKind
EVENT_KIND_REMOVED: EventKind
EVENT_KIND_CLEARED: EventKind

class PublishRequest(_message.Message):
    __slots__ = ("hello", "batch", "heartbeat", "snapshot", "goodbye", "replay_unavailable", "sketch", "evict_result")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    REPLAY_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    SKETCH_FIELD_NUMBER: _ClassVar[int]
    EVICT_RESULT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    batch: Batch
    heartbeat: Heartbeat
    snapshot: SnapshotChunk
    goodbye: Goodbye
    replay_unavailable: ReplayUnavailable
    sketch: Sketch
    evict_result: EvictResult
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotChunk, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., replay_unavailable: _Optional[_Union[ReplayUnavailable, _Mapping]] = ..., sketch: _Optional[_Union[Sketch, _Mapping]] = ..., evict_result: _Optional[_Union[EvictResult, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "node", "epoch", "started_unix_ms", "peer_address", "last_seq", "namespaces", "agent_version", "doubt")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DOUBT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node: str
    epoch: int
    started_unix_ms: int
    peer_address: str
    last_seq: int
    namespaces: _containers.RepeatedCompositeFieldContainer[_common_pb2.Namespace]
    agent_version: str
    doubt: Doubt
    def __init__(self, protocol_version: _Optional[int] = ..., node: _Optional[str] = ..., epoch: _Optional[int] = ..., started_unix_ms: _Optional[int] = ..., peer_address: _Optional[str] = ..., last_seq: _Optional[int] = ..., namespaces: _Optional[_Iterable[_Union[_common_pb2.Namespace, _Mapping]]] = ..., agent_version: _Optional[str] = ..., doubt: _Optional[_Union[Doubt, _Mapping]] = ...) -> None: ...

class Doubt(_message.Message):
    __slots__ = ("number", "words")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    words: str
    def __init__(self, number: _Optional[int] = ..., words: _Optional[str] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("epoch", "first_seq", "events", "replay")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first_seq: int
    events: _containers.RepeatedCompositeFieldContainer[Event]
    replay: bool
    def __init__(self, epoch: _Optional[int] = ..., first_seq: _Optional[int] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., replay: bool = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("kind", "tier", "namespace_digest", "fingerprints")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    kind: EventKind
    tier: _common_pb2.Tier
    namespace_digest: bytes
    fingerprints: _common_pb2.Fingerprints
    def __init__(self, kind: _Optional[_Union[EventKind, str]] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., namespace_digest: _Optional[bytes] = ..., fingerprints: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("epoch", "last_seq", "used_bytes", "capacity_bytes", "dropped_events", "counts", "counted", "oldest_use_ms", "read_bytes_per_s", "doubt", "reads")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_EVENTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_USE_MS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOUBT_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    last_seq: int
    used_bytes: int
    capacity_bytes: int
    dropped_events: int
    counts: _containers.RepeatedCompositeFieldContainer[OwnerCount]
    counted: bool
    oldest_use_ms: int
    read_bytes_per_s: int
    doubt: Doubt
    reads: ReadFigures
    def __init__(self, epoch: _Optional[int] = ..., last_seq: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., dropped_events: _Optional[int] = ..., counts: _Optional[_Iterable[_Union[OwnerCount, _Mapping]]] = ..., counted: bool = ..., oldest_use_ms: _Optional[int] = ..., read_bytes_per_s: _Optional[int] = ..., doubt: _Optional[_Union[Doubt, _Mapping]] = ..., reads: _Optional[_Union[ReadFigures, _Mapping]] = ...) -> None: ...

class ReadFigures(_message.Message):
    __slots__ = ("hit_local_blocks", "hit_peer_blocks", "miss_blocks", "stale_blocks", "corrupt_blocks", "late_blocks", "skipped_blocks", "read_bytes", "sources")
    HIT_LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_PEER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STALE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    hit_local_blocks: int
    hit_peer_blocks: int
    miss_blocks: int
    stale_blocks: int
    corrupt_blocks: int
    late_blocks: int
    skipped_blocks: int
    read_bytes: int
    sources: _containers.RepeatedCompositeFieldContainer[ReadSource]
    def __init__(self, hit_local_blocks: _Optional[int] = ..., hit_peer_blocks: _Optional[int] = ..., miss_blocks: _Optional[int] = ..., stale_blocks: _Optional[int] = ..., corrupt_blocks: _Optional[int] = ..., late_blocks: _Optional[int] = ..., skipped_blocks: _Optional[int] = ..., read_bytes: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[ReadSource, _Mapping]]] = ...) -> None: ...

class ReadSource(_message.Message):
    __slots__ = ("node", "blocks", "bytes")
    NODE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    node: str
    blocks: int
    bytes: int
    def __init__(self, node: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class OwnerCount(_message.Message):
    __slots__ = ("namespace_digest", "tier", "blocks", "digest")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    tier: _common_pb2.Tier
    blocks: int
    digest: bytes
    def __init__(self, namespace_digest: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., blocks: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Sketch(_message.Message):
    __slots__ = ("epoch", "request_id", "at_seq", "parts")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AT_SEQ_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    request_id: int
    at_seq: int
    parts: _containers.RepeatedCompositeFieldContainer[SketchPart]
    def __init__(self, epoch: _Optional[int] = ..., request_id: _Optional[int] = ..., at_seq: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[SketchPart, _Mapping]]] = ...) -> None: ...

class SketchPart(_message.Message):
    __slots__ = ("namespace_digest", "tier", "blocks", "digest", "encoded")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    tier: _common_pb2.Tier
    blocks: int
    digest: bytes
    encoded: bytes
    def __init__(self, namespace_digest: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., blocks: _Optional[int] = ..., digest: _Optional[bytes] = ..., encoded: _Optional[bytes] = ...) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("epoch", "snapshot_id", "at_seq", "index", "entries", "last", "total_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    AT_SEQ_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    snapshot_id: int
    at_seq: int
    index: int
    entries: _containers.RepeatedCompositeFieldContainer[Event]
    last: bool
    total_blocks: int
    def __init__(self, epoch: _Optional[int] = ..., snapshot_id: _Optional[int] = ..., at_seq: _Optional[int] = ..., index: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., last: bool = ..., total_blocks: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ReplayUnavailable(_message.Message):
    __slots__ = ("epoch", "oldest_seq")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SEQ_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    oldest_seq: int
    def __init__(self, epoch: _Optional[int] = ..., oldest_seq: _Optional[int] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("welcome", "ack", "replay_request", "snapshot_request", "fenced", "sketch_request", "namespace_refused", "evict_request")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    REPLAY_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    SKETCH_REQUEST_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_REFUSED_FIELD_NUMBER: _ClassVar[int]
    EVICT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    ack: Ack
    replay_request: ReplayRequest
    snapshot_request: SnapshotRequest
    fenced: Fenced
    sketch_request: SketchRequest
    namespace_refused: NamespaceRefused
    evict_request: EvictRequest
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., replay_request: _Optional[_Union[ReplayRequest, _Mapping]] = ..., snapshot_request: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., fenced: _Optional[_Union[Fenced, _Mapping]] = ..., sketch_request: _Optional[_Union[SketchRequest, _Mapping]] = ..., namespace_refused: _Optional[_Union[NamespaceRefused, _Mapping]] = ..., evict_request: _Optional[_Union[EvictRequest, _Mapping]] = ...) -> None: ...

class NamespaceRefused(_message.Message):
    __slots__ = ("namespace_digest", "words")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    words: str
    def __init__(self, namespace_digest: _Optional[bytes] = ..., words: _Optional[str] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("epoch", "request_id", "namespace_digest", "tier", "max_blocks", "keep_blocks", "older_than_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEEP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    request_id: int
    namespace_digest: bytes
    tier: _common_pb2.Tier
    max_blocks: int
    keep_blocks: int
    older_than_ms: int
    def __init__(self, epoch: _Optional[int] = ..., request_id: _Optional[int] = ..., namespace_digest: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., max_blocks: _Optional[int] = ..., keep_blocks: _Optional[int] = ..., older_than_ms: _Optional[int] = ...) -> None: ...

class EvictResult(_message.Message):
    __slots__ = ("epoch", "request_id", "evicted_blocks", "owner_seq", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNER_SEQ_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    request_id: int
    evicted_blocks: int
    owner_seq: int
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., request_id: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., owner_seq: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "coordinator", "resume_seq", "heartbeat_interval_ms", "credit_events", "store_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    RESUME_SEQ_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_EVENTS_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    coordinator: str
    resume_seq: int
    heartbeat_interval_ms: int
    credit_events: int
    store_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., coordinator: _Optional[str] = ..., resume_seq: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., credit_events: _Optional[int] = ..., store_id: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("seq", "state")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    state: _common_pb2.StreamState
    def __init__(self, seq: _Optional[int] = ..., state: _Optional[_Union[_common_pb2.StreamState, str]] = ...) -> None: ...

class ReplayRequest(_message.Message):
    __slots__ = ("first_seq", "last_seq")
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    first_seq: int
    last_seq: int
    def __init__(self, first_seq: _Optional[int] = ..., last_seq: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("snapshot_id", "reason")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: int
    reason: str
    def __init__(self, snapshot_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SketchRequest(_message.Message):
    __slots__ = ("request_id", "reason", "cells", "parts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    reason: str
    cells: int
    parts: _containers.RepeatedCompositeFieldContainer[OwnerPart]
    def __init__(self, request_id: _Optional[int] = ..., reason: _Optional[str] = ..., cells: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[OwnerPart, _Mapping]]] = ...) -> None: ...

class OwnerPart(_message.Message):
    __slots__ = ("namespace_digest", "tier")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    tier: _common_pb2.Tier
    def __init__(self, namespace_digest: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ...) -> None: ...

class Fenced(_message.Message):
    __slots__ = ("epoch", "newer_epoch", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEWER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    newer_epoch: int
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., newer_epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ReportStaleRequest(_message.Message):
    __slots__ = ("reporter", "node", "epoch", "owner_seq", "namespace_digest", "tier", "fingerprints")
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_SEQ_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    reporter: str
    node: str
    epoch: int
    owner_seq: int
    namespace_digest: bytes
    tier: _common_pb2.Tier
    fingerprints: _common_pb2.Fingerprints
    def __init__(self, reporter: _Optional[str] = ..., node: _Optional[str] = ..., epoch: _Optional[int] = ..., owner_seq: _Optional[int] = ..., namespace_digest: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., fingerprints: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ...) -> None: ...

class ReportStaleResponse(_message.Message):
    __slots__ = ("protocol_version", "removed", "ignored_reason")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    IGNORED_REASON_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    removed: int
    ignored_reason: str
    def __init__(self, protocol_version: _Optional[int] = ..., removed: _Optional[int] = ..., ignored_reason: _Optional[str] = ...) -> None: ...
