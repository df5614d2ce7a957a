from kvdir.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_ABSENT: _ClassVar[BlockState]
    BLOCK_STATE_PRESENT: _ClassVar[BlockState]
    BLOCK_STATE_RESERVED: _ClassVar[BlockState]
    BLOCK_STATE_NO_SPACE: _ClassVar[BlockState]
    BLOCK_STATE_BUSY: _ClassVar[BlockState]

class LoadResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_RESULT_MISS: _ClassVar[LoadResult]
    LOAD_RESULT_HIT_LOCAL: _ClassVar[LoadResult]
    LOAD_RESULT_HIT_PEER: _ClassVar[LoadResult]
    LOAD_RESULT_STALE: _ClassVar[LoadResult]
    LOAD_RESULT_CORRUPT: _ClassVar[LoadResult]
    LOAD_RESULT_LATE: _ClassVar[LoadResult]
    LOAD_RESULT_SKIPPED: _ClassVar[LoadResult]
BLOCK_STATE_ABSENT: BlockState
BLOCK_STATE_PRESENT: BlockState
BLOCK_STATE_RESERVED: BlockState
BLOCK_STATE_NO_SPACE: BlockState
BLOCK_STATE_BUSY: BlockState
LOAD_RESULT_MISS: LoadResult
LOAD_RESULT_HIT_LOCAL: LoadResult
LOAD_RESULT_HIT_PEER: LoadResult
LOAD_RESULT_STALE: LoadResult
LOAD_RESULT_CORRUPT: LoadResult
LOAD_RESULT_LATE: LoadResult
LOAD_RESULT_SKIPPED: LoadResult

class AttachRequest(_message.Message):
    __slots__ = ("protocol_version", "engine", "namespace_digest", "namespace_canonical_json", "prefill_tokens_per_s", "probe")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_CANONICAL_JSON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    engine: str
    namespace_digest: bytes
    namespace_canonical_json: bytes
    prefill_tokens_per_s: float
    probe: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., engine: _Optional[str] = ..., namespace_digest: _Optional[bytes] = ..., namespace_canonical_json: _Optional[bytes] = ..., prefill_tokens_per_s: _Optional[float] = ..., probe: _Optional[bytes] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("protocol_version", "node", "epoch", "session", "arena_path", "arena_id", "arena_bytes", "block_bytes", "block_tokens", "slots", "max_fingerprints", "replica_path", "coordinators")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_PATH_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node: str
    epoch: int
    session: int
    arena_path: str
    arena_id: bytes
    arena_bytes: int
    block_bytes: int
    block_tokens: int
    slots: int
    max_fingerprints: int
    replica_path: str
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., node: _Optional[str] = ..., epoch: _Optional[int] = ..., session: _Optional[int] = ..., arena_path: _Optional[str] = ..., arena_id: _Optional[bytes] = ..., arena_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., block_tokens: _Optional[int] = ..., slots: _Optional[int] = ..., max_fingerprints: _Optional[int] = ..., replica_path: _Optional[str] = ..., coordinators: _Optional[_Iterable[str]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session", "fingerprints", "lease_ms", "release", "from_device")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    FROM_DEVICE_FIELD_NUMBER: _ClassVar[int]
    session: int
    fingerprints: _common_pb2.Fingerprints
    lease_ms: int
    release: _containers.RepeatedScalarFieldContainer[int]
    from_device: bool
    def __init__(self, session: _Optional[int] = ..., fingerprints: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ..., lease_ms: _Optional[int] = ..., release: _Optional[_Iterable[int]] = ..., from_device: bool = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("protocol_version", "reservation", "blocks", "lease_ms")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    reservation: int
    blocks: bytes
    lease_ms: int
    def __init__(self, protocol_version: _Optional[int] = ..., reservation: _Optional[int] = ..., blocks: _Optional[bytes] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "reservation", "checksums", "positions")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    session: int
    reservation: int
    checksums: bytes
    positions: bytes
    def __init__(self, session: _Optional[int] = ..., reservation: _Optional[int] = ..., checksums: _Optional[bytes] = ..., positions: _Optional[bytes] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("protocol_version", "committed", "rejected")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    committed: int
    rejected: int
    def __init__(self, protocol_version: _Optional[int] = ..., committed: _Optional[int] = ..., rejected: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session", "reservation")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    session: int
    reservation: int
    def __init__(self, session: _Optional[int] = ..., reservation: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class EngineLookupRequest(_message.Message):
    __slots__ = ("session", "fingerprints", "deadline_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session: int
    fingerprints: _common_pb2.Fingerprints
    deadline_ms: int
    def __init__(self, session: _Optional[int] = ..., fingerprints: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class EngineLookupResponse(_message.Message):
    __slots__ = ("protocol_version", "local", "nominated", "nodes", "directory_reached")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    NOMINATED_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_REACHED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    local: bytes
    nominated: bytes
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeTrust]
    directory_reached: bool
    def __init__(self, protocol_version: _Optional[int] = ..., local: _Optional[bytes] = ..., nominated: _Optional[bytes] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeTrust, _Mapping]]] = ..., directory_reached: bool = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("session", "fingerprints", "deadline_ms", "lease_ms", "local_only", "release", "explain")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ONLY_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    session: int
    fingerprints: _common_pb2.Fingerprints
    deadline_ms: int
    lease_ms: int
    local_only: bool
    release: _containers.RepeatedScalarFieldContainer[int]
    explain: bool
    def __init__(self, session: _Optional[int] = ..., fingerprints: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., local_only: bool = ..., release: _Optional[_Iterable[int]] = ..., explain: bool = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("protocol_version", "lock", "lease_ms", "blocks", "peer_bytes", "lookup_us", "lock_us", "read_us", "nodes", "directory_reached", "predicted_us", "net_gain_us", "explanation", "trace_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOCK_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PEER_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_US_FIELD_NUMBER: _ClassVar[int]
    LOCK_US_FIELD_NUMBER: _ClassVar[int]
    READ_US_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_REACHED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_US_FIELD_NUMBER: _ClassVar[int]
    NET_GAIN_US_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    lock: int
    lease_ms: int
    blocks: bytes
    peer_bytes: int
    lookup_us: int
    lock_us: int
    read_us: int
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeTrust]
    directory_reached: bool
    predicted_us: int
    net_gain_us: int
    explanation: str
    trace_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., lock: _Optional[int] = ..., lease_ms: _Optional[int] = ..., blocks: _Optional[bytes] = ..., peer_bytes: _Optional[int] = ..., lookup_us: _Optional[int] = ..., lock_us: _Optional[int] = ..., read_us: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeTrust, _Mapping]]] = ..., directory_reached: bool = ..., predicted_us: _Optional[int] = ..., net_gain_us: _Optional[int] = ..., explanation: _Optional[str] = ..., trace_id: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session", "locks", "corrupt")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    session: int
    locks: _containers.RepeatedScalarFieldContainer[int]
    corrupt: _common_pb2.Fingerprints
    def __init__(self, session: _Optional[int] = ..., locks: _Optional[_Iterable[int]] = ..., corrupt: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: int
    def __init__(self, unknown: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("session", "fingerprints", "deadline_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session: int
    fingerprints: _common_pb2.Fingerprints
    deadline_ms: int
    def __init__(self, session: _Optional[int] = ..., fingerprints: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("protocol_version", "accepted", "local")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    accepted: int
    local: int
    def __init__(self, protocol_version: _Optional[int] = ..., accepted: _Optional[int] = ..., local: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("session", "fingerprints", "pin_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    PIN_MS_FIELD_NUMBER: _ClassVar[int]
    session: int
    fingerprints: _common_pb2.Fingerprints
    pin_ms: int
    def __init__(self, session: _Optional[int] = ..., fingerprints: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ..., pin_ms: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("protocol_version", "pinned")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    pinned: int
    def __init__(self, protocol_version: _Optional[int] = ..., pinned: _Optional[int] = ...) -> None: ...

class RegisterPoolRequest(_message.Message):
    __slots__ = ("session", "device", "handle", "slots", "block_bytes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    session: int
    device: str
    handle: bytes
    slots: int
    block_bytes: int
    def __init__(self, session: _Optional[int] = ..., device: _Optional[str] = ..., handle: _Optional[bytes] = ..., slots: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class RegisterPoolResponse(_message.Message):
    __slots__ = ("protocol_version", "pool", "table_path", "table_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    TABLE_PATH_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    pool: int
    table_path: str
    table_id: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., pool: _Optional[int] = ..., table_path: _Optional[str] = ..., table_id: _Optional[bytes] = ...) -> None: ...

class PublishDeviceRequest(_message.Message):
    __slots__ = ("session", "pool", "fingerprints", "slots", "generations")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    session: int
    pool: int
    fingerprints: _common_pb2.Fingerprints
    slots: bytes
    generations: bytes
    def __init__(self, session: _Optional[int] = ..., pool: _Optional[int] = ..., fingerprints: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ..., slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...

class PublishDeviceResponse(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class WithdrawDeviceRequest(_message.Message):
    __slots__ = ("session", "pool", "slots", "deadline_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session: int
    pool: int
    slots: bytes
    deadline_ms: int
    def __init__(self, session: _Optional[int] = ..., pool: _Optional[int] = ..., slots: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class WithdrawDeviceResponse(_message.Message):
    __slots__ = ("protocol_version", "reading")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    reading: int
    def __init__(self, protocol_version: _Optional[int] = ..., reading: _Optional[int] = ...) -> None: ...

class UnregisterPoolRequest(_message.Message):
    __slots__ = ("session", "pool")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    session: int
    pool: int
    def __init__(self, session: _Optional[int] = ..., pool: _Optional[int] = ...) -> None: ...

class UnregisterPoolResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InventoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InventoryResponse(_message.Message):
    __slots__ = ("protocol_version", "node", "epoch", "arena_path", "arena_bytes", "namespaces", "sessions", "locks", "publishing", "arena_memory", "engine_streams", "refused")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHING_FIELD_NUMBER: _ClassVar[int]
    ARENA_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STREAMS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node: str
    epoch: int
    arena_path: str
    arena_bytes: int
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInventory]
    sessions: int
    locks: int
    publishing: str
    arena_memory: str
    engine_streams: _containers.RepeatedCompositeFieldContainer[EngineStreamInventory]
    refused: _containers.RepeatedCompositeFieldContainer[RefusedEngine]
    def __init__(self, protocol_version: _Optional[int] = ..., node: _Optional[str] = ..., epoch: _Optional[int] = ..., arena_path: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceInventory, _Mapping]]] = ..., sessions: _Optional[int] = ..., locks: _Optional[int] = ..., publishing: _Optional[str] = ..., arena_memory: _Optional[str] = ..., engine_streams: _Optional[_Iterable[_Union[EngineStreamInventory, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[RefusedEngine, _Mapping]]] = ...) -> None: ...

class RefusedEngine(_message.Message):
    __slots__ = ("engine", "words", "age_ms", "times")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    engine: str
    words: str
    age_ms: int
    times: int
    def __init__(self, engine: _Optional[str] = ..., words: _Optional[str] = ..., age_ms: _Optional[int] = ..., times: _Optional[int] = ...) -> None: ...

class EngineStreamInventory(_message.Message):
    __slots__ = ("stream", "endpoint", "connected", "blocks", "batches", "lost_batches", "restarts", "state", "findings")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    LOST_BATCHES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    stream: str
    endpoint: str
    connected: bool
    blocks: int
    batches: int
    lost_batches: int
    restarts: int
    state: str
    findings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stream: _Optional[str] = ..., endpoint: _Optional[str] = ..., connected: bool = ..., blocks: _Optional[int] = ..., batches: _Optional[int] = ..., lost_batches: _Optional[int] = ..., restarts: _Optional[int] = ..., state: _Optional[str] = ..., findings: _Optional[_Iterable[str]] = ...) -> None: ...

class NamespaceInventory(_message.Message):
    __slots__ = ("digest", "name", "block_bytes", "block_tokens", "slots", "committed", "free", "reserved", "retired", "quarantined", "locked", "pinned", "evicted")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    LOCKED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    name: str
    block_bytes: int
    block_tokens: int
    slots: int
    committed: int
    free: int
    reserved: int
    retired: int
    quarantined: int
    locked: int
    pinned: int
    evicted: int
    def __init__(self, digest: _Optional[bytes] = ..., name: _Optional[str] = ..., block_bytes: _Optional[int] = ..., block_tokens: _Optional[int] = ..., slots: _Optional[int] = ..., committed: _Optional[int] = ..., free: _Optional[int] = ..., reserved: _Optional[int] = ..., retired: _Optional[int] = ..., quarantined: _Optional[int] = ..., locked: _Optional[int] = ..., pinned: _Optional[int] = ..., evicted: _Optional[int] = ...) -> None: ...
