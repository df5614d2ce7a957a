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
    __slots__ = ("protocol_version", "runs", "sets", "nodes", "hits", "asked", "warming", "nodes_below_trust", "error")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    WARMING_FIELD_NUMBER: _ClassVar[int]
    NODES_BELOW_TRUST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    runs: bytes
    sets: _containers.RepeatedCompositeFieldContainer[HolderSet]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeTrust]
    hits: int
    asked: int
    warming: bool
    nodes_below_trust: int
    error: str
    def __init__(self, protocol_version: _Optional[int] = ..., runs: _Optional[bytes] = ..., sets: _Optional[_Iterable[_Union[HolderSet, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeTrust, _Mapping]]] = ..., hits: _Optional[int] = ..., asked: _Optional[int] = ..., warming: bool = ..., nodes_below_trust: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

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
