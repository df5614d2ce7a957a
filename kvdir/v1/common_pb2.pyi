from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_GPU: _ClassVar[Tier]
    TIER_CPU: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_REMOTE: _ClassVar[Tier]

class StreamState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STREAM_STATE_UNSPECIFIED: _ClassVar[StreamState]
    STREAM_STATE_SYNCED: _ClassVar[StreamState]
    STREAM_STATE_GAP: _ClassVar[StreamState]
    STREAM_STATE_REPAIRING: _ClassVar[StreamState]
    STREAM_STATE_STALE: _ClassVar[StreamState]
    STREAM_STATE_FENCED: _ClassVar[StreamState]

class MinTrust(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MIN_TRUST_UNSPECIFIED: _ClassVar[MinTrust]
    MIN_TRUST_ANY: _ClassVar[MinTrust]
    MIN_TRUST_NOT_STALE: _ClassVar[MinTrust]
    MIN_TRUST_SYNCED: _ClassVar[MinTrust]
TIER_UNSPECIFIED: Tier
TIER_GPU: Tier
TIER_CPU: Tier
TIER_DISK: Tier
TIER_REMOTE: Tier
STREAM_STATE_UNSPECIFIED: StreamState
STREAM_STATE_SYNCED: StreamState
STREAM_STATE_GAP: StreamState
STREAM_STATE_REPAIRING: StreamState
STREAM_STATE_STALE: StreamState
STREAM_STATE_FENCED: StreamState
MIN_TRUST_UNSPECIFIED: MinTrust
MIN_TRUST_ANY: MinTrust
MIN_TRUST_NOT_STALE: MinTrust
MIN_TRUST_SYNCED: MinTrust

class Fingerprints(_message.Message):
    __slots__ = ("packed", "width")
    PACKED_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    width: int
    def __init__(self, packed: _Optional[bytes] = ..., width: _Optional[int] = ...) -> None: ...

class NodeTrust(_message.Message):
    __slots__ = ("node", "epoch", "state", "reason", "age_ms", "missing_events", "peer_address", "confirmed")
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    MISSING_EVENTS_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    node: str
    epoch: int
    state: StreamState
    reason: str
    age_ms: int
    missing_events: int
    peer_address: str
    confirmed: float
    def __init__(self, node: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[StreamState, str]] = ..., reason: _Optional[str] = ..., age_ms: _Optional[int] = ..., missing_events: _Optional[int] = ..., peer_address: _Optional[str] = ..., confirmed: _Optional[float] = ...) -> None: ...

class ConvergentFigure(_message.Message):
    __slots__ = ("value", "as_of_ms")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    AS_OF_MS_FIELD_NUMBER: _ClassVar[int]
    value: int
    as_of_ms: int
    def __init__(self, value: _Optional[int] = ..., as_of_ms: _Optional[int] = ...) -> None: ...

class CumulativeFigure(_message.Message):
    __slots__ = ("value", "trusted", "as_of_ms", "untrusted_since_ms", "reason")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TRUSTED_FIELD_NUMBER: _ClassVar[int]
    AS_OF_MS_FIELD_NUMBER: _ClassVar[int]
    UNTRUSTED_SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    value: int
    trusted: bool
    as_of_ms: int
    untrusted_since_ms: int
    reason: str
    def __init__(self, value: _Optional[int] = ..., trusted: bool = ..., as_of_ms: _Optional[int] = ..., untrusted_since_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("digest", "canonical_json", "block_bytes", "block_tokens")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CANONICAL_JSON_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    canonical_json: bytes
    block_bytes: int
    block_tokens: int
    def __init__(self, digest: _Optional[bytes] = ..., canonical_json: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., block_tokens: _Optional[int] = ...) -> None: ...
