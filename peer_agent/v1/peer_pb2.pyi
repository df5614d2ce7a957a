from kvdir.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version", "node", "epoch", "transports")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node: str
    epoch: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., node: _Optional[str] = ..., epoch: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("protocol_version", "node", "epoch", "transports", "agent_version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node: str
    epoch: int
    transports: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    agent_version: str
    def __init__(self, protocol_version: _Optional[int] = ..., node: _Optional[str] = ..., epoch: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ..., agent_version: _Optional[str] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("transport", "descriptor")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    transport: str
    descriptor: bytes
    def __init__(self, transport: _Optional[str] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class LockRequest(_message.Message):
    __slots__ = ("namespace_digest", "fingerprints", "lease_ms", "expected_epoch", "reader", "unlock")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    UNLOCK_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    fingerprints: _common_pb2.Fingerprints
    lease_ms: int
    expected_epoch: int
    reader: str
    unlock: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, namespace_digest: _Optional[bytes] = ..., fingerprints: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ..., lease_ms: _Optional[int] = ..., expected_epoch: _Optional[int] = ..., reader: _Optional[str] = ..., unlock: _Optional[_Iterable[int]] = ...) -> None: ...

class LockResponse(_message.Message):
    __slots__ = ("protocol_version", "epoch", "lock", "lease_ms", "blocks", "present", "owner_seq", "capability")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOCK_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    OWNER_SEQ_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: int
    lock: int
    lease_ms: int
    blocks: bytes
    present: int
    owner_seq: int
    capability: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[int] = ..., lock: _Optional[int] = ..., lease_ms: _Optional[int] = ..., blocks: _Optional[bytes] = ..., present: _Optional[int] = ..., owner_seq: _Optional[int] = ..., capability: _Optional[bytes] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("max_blocks", "max_bytes", "lease_ms", "reader")
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    max_blocks: int
    max_bytes: int
    lease_ms: int
    reader: str
    def __init__(self, max_blocks: _Optional[int] = ..., max_bytes: _Optional[int] = ..., lease_ms: _Optional[int] = ..., reader: _Optional[str] = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("protocol_version", "epoch", "namespace_digest", "fingerprints", "lock", "blocks", "capability")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    LOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: int
    namespace_digest: bytes
    fingerprints: _common_pb2.Fingerprints
    lock: int
    blocks: bytes
    capability: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[int] = ..., namespace_digest: _Optional[bytes] = ..., fingerprints: _Optional[_Union[_common_pb2.Fingerprints, _Mapping]] = ..., lock: _Optional[int] = ..., blocks: _Optional[bytes] = ..., capability: _Optional[bytes] = ...) -> None: ...

class UnlockRequest(_message.Message):
    __slots__ = ("locks",)
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    locks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, locks: _Optional[_Iterable[int]] = ...) -> None: ...

class UnlockResponse(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: int
    def __init__(self, unknown: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("lock", "blocks")
    LOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lock: int
    blocks: bytes
    def __init__(self, lock: _Optional[int] = ..., blocks: _Optional[bytes] = ...) -> None: ...

class ReadChunk(_message.Message):
    __slots__ = ("position", "header", "payload", "generation_after")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    GENERATION_AFTER_FIELD_NUMBER: _ClassVar[int]
    position: int
    header: bytes
    payload: bytes
    generation_after: int
    def __init__(self, position: _Optional[int] = ..., header: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., generation_after: _Optional[int] = ...) -> None: ...
