import datetime

from epd.encoder.v1 import embedding_pb2 as _embedding_pb2
from epd.encoder.v1 import media_pb2 as _media_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Delivery(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DELIVERY_UNSPECIFIED: _ClassVar[Delivery]
    DELIVERY_CALLER: _ClassVar[Delivery]
    DELIVERY_RECEIVERS: _ClassVar[Delivery]
    DELIVERY_CACHE_ONLY: _ClassVar[Delivery]

class CachePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_POLICY_UNSPECIFIED: _ClassVar[CachePolicy]
    CACHE_POLICY_USE: _ClassVar[CachePolicy]
    CACHE_POLICY_REFRESH: _ClassVar[CachePolicy]
    CACHE_POLICY_BYPASS: _ClassVar[CachePolicy]

class ReadOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READ_OUTCOME_UNSPECIFIED: _ClassVar[ReadOutcome]
    READ_OUTCOME_OK: _ClassVar[ReadOutcome]
    READ_OUTCOME_ABANDONED: _ClassVar[ReadOutcome]
    READ_OUTCOME_TRANSPORT_FAILED: _ClassVar[ReadOutcome]
    READ_OUTCOME_CORRUPT: _ClassVar[ReadOutcome]

class LeaseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_STATE_UNSPECIFIED: _ClassVar[LeaseState]
    LEASE_STATE_HELD: _ClassVar[LeaseState]
    LEASE_STATE_ALREADY_RELEASED: _ClassVar[LeaseState]
    LEASE_STATE_EXPIRED: _ClassVar[LeaseState]
    LEASE_STATE_REVOKED: _ClassVar[LeaseState]
    LEASE_STATE_UNKNOWN: _ClassVar[LeaseState]

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_STARTING: _ClassVar[EngineState]
    ENGINE_STATE_READY: _ClassVar[EngineState]
    ENGINE_STATE_DOWN: _ClassVar[EngineState]
    ENGINE_STATE_FAILING: _ClassVar[EngineState]
DELIVERY_UNSPECIFIED: Delivery
DELIVERY_CALLER: Delivery
DELIVERY_RECEIVERS: Delivery
DELIVERY_CACHE_ONLY: Delivery
CACHE_POLICY_UNSPECIFIED: CachePolicy
CACHE_POLICY_USE: CachePolicy
CACHE_POLICY_REFRESH: CachePolicy
CACHE_POLICY_BYPASS: CachePolicy
READ_OUTCOME_UNSPECIFIED: ReadOutcome
READ_OUTCOME_OK: ReadOutcome
READ_OUTCOME_ABANDONED: ReadOutcome
READ_OUTCOME_TRANSPORT_FAILED: ReadOutcome
READ_OUTCOME_CORRUPT: ReadOutcome
LEASE_STATE_UNSPECIFIED: LeaseState
LEASE_STATE_HELD: LeaseState
LEASE_STATE_ALREADY_RELEASED: LeaseState
LEASE_STATE_EXPIRED: LeaseState
LEASE_STATE_REVOKED: LeaseState
LEASE_STATE_UNKNOWN: LeaseState
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_STARTING: EngineState
ENGINE_STATE_READY: EngineState
ENGINE_STATE_DOWN: EngineState
ENGINE_STATE_FAILING: EngineState

class EncodeRequest(_message.Message):
    __slots__ = ("request_id", "prompt_id", "num_parts", "items", "delivery", "receivers", "priority", "cache_policy", "cache_salt", "expected_fingerprint", "lease_ttl", "skip_layout")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_POLICY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    SKIP_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_id: str
    num_parts: int
    items: _containers.RepeatedCompositeFieldContainer[_media_pb2.MediaItem]
    delivery: Delivery
    receivers: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    cache_policy: CachePolicy
    cache_salt: bytes
    expected_fingerprint: bytes
    lease_ttl: _duration_pb2.Duration
    skip_layout: bool
    def __init__(self, request_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., num_parts: _Optional[int] = ..., items: _Optional[_Iterable[_Union[_media_pb2.MediaItem, _Mapping]]] = ..., delivery: _Optional[_Union[Delivery, str]] = ..., receivers: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ..., cache_policy: _Optional[_Union[CachePolicy, str]] = ..., cache_salt: _Optional[bytes] = ..., expected_fingerprint: _Optional[bytes] = ..., lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., skip_layout: _Optional[bool] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("accepted", "chunk", "part_failed", "part_cancelled", "complete")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PART_FAILED_FIELD_NUMBER: _ClassVar[int]
    PART_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    chunk: _embedding_pb2.EmbeddingChunk
    part_failed: PartFailed
    part_cancelled: PartCancelled
    complete: Complete
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., chunk: _Optional[_Union[_embedding_pb2.EmbeddingChunk, _Mapping]] = ..., part_failed: _Optional[_Union[PartFailed, _Mapping]] = ..., part_cancelled: _Optional[_Union[PartCancelled, _Mapping]] = ..., complete: _Optional[_Union[Complete, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "prompt_id", "num_parts", "encoder")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_id: str
    num_parts: int
    encoder: _embedding_pb2.EncoderRef
    def __init__(self, request_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., num_parts: _Optional[int] = ..., encoder: _Optional[_Union[_embedding_pb2.EncoderRef, _Mapping]] = ...) -> None: ...

class PartFailed(_message.Message):
    __slots__ = ("prompt_id", "request_id", "part_idx", "status")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PART_IDX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    request_id: str
    part_idx: int
    status: _status_pb2.Status
    def __init__(self, prompt_id: _Optional[str] = ..., request_id: _Optional[str] = ..., part_idx: _Optional[int] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class PartCancelled(_message.Message):
    __slots__ = ("prompt_id", "request_id", "part_idx")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PART_IDX_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    request_id: str
    part_idx: int
    def __init__(self, prompt_id: _Optional[str] = ..., request_id: _Optional[str] = ..., part_idx: _Optional[int] = ...) -> None: ...

class Complete(_message.Message):
    __slots__ = ("ready", "failed", "cancelled", "from_cache", "total")
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FROM_CACHE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ready: int
    failed: int
    cancelled: int
    from_cache: int
    total: _duration_pb2.Duration
    def __init__(self, ready: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., from_cache: _Optional[int] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("header", "piece")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    header: UploadHeader
    piece: bytes
    def __init__(self, header: _Optional[_Union[UploadHeader, _Mapping]] = ..., piece: _Optional[bytes] = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("total_bytes", "sha256")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    sha256: bytes
    def __init__(self, total_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class UploadResponse(_message.Message):
    __slots__ = ("upload_id", "sha256", "expiry")
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    upload_id: str
    sha256: bytes
    expiry: _timestamp_pb2.Timestamp
    def __init__(self, upload_id: _Optional[str] = ..., sha256: _Optional[bytes] = ..., expiry: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("content_key", "receivers", "prompt_id", "part_idx", "num_parts", "lease_ttl")
    CONTENT_KEY_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PART_IDX_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    content_key: bytes
    receivers: _containers.RepeatedScalarFieldContainer[str]
    prompt_id: str
    part_idx: int
    num_parts: int
    lease_ttl: _duration_pb2.Duration
    def __init__(self, content_key: _Optional[bytes] = ..., receivers: _Optional[_Iterable[str]] = ..., prompt_id: _Optional[str] = ..., part_idx: _Optional[int] = ..., num_parts: _Optional[int] = ..., lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: _embedding_pb2.EmbeddingChunk
    def __init__(self, chunk: _Optional[_Union[_embedding_pb2.EmbeddingChunk, _Mapping]] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("receiver_id", "incarnation")
    RECEIVER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    receiver_id: str
    incarnation: int
    def __init__(self, receiver_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("chunk", "part_failed", "part_cancelled", "lease_revoked", "synced")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PART_FAILED_FIELD_NUMBER: _ClassVar[int]
    PART_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    LEASE_REVOKED_FIELD_NUMBER: _ClassVar[int]
    SYNCED_FIELD_NUMBER: _ClassVar[int]
    chunk: _embedding_pb2.EmbeddingChunk
    part_failed: PartFailed
    part_cancelled: PartCancelled
    lease_revoked: LeaseRevoked
    synced: Synced
    def __init__(self, chunk: _Optional[_Union[_embedding_pb2.EmbeddingChunk, _Mapping]] = ..., part_failed: _Optional[_Union[PartFailed, _Mapping]] = ..., part_cancelled: _Optional[_Union[PartCancelled, _Mapping]] = ..., lease_revoked: _Optional[_Union[LeaseRevoked, _Mapping]] = ..., synced: _Optional[_Union[Synced, _Mapping]] = ...) -> None: ...

class LeaseRevoked(_message.Message):
    __slots__ = ("lease_id", "prompt_id", "part_idx", "status", "request_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PART_IDX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: bytes
    prompt_id: str
    part_idx: int
    status: _status_pb2.Status
    request_id: str
    def __init__(self, lease_id: _Optional[bytes] = ..., prompt_id: _Optional[str] = ..., part_idx: _Optional[int] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class Synced(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: int
    def __init__(self, events: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("lease_id", "offset", "length")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    lease_id: bytes
    offset: int
    length: int
    def __init__(self, lease_id: _Optional[bytes] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRelease]
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseRelease, _Mapping]]] = ...) -> None: ...

class LeaseRelease(_message.Message):
    __slots__ = ("lease_id", "outcome")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    lease_id: bytes
    outcome: ReadOutcome
    def __init__(self, lease_id: _Optional[bytes] = ..., outcome: _Optional[_Union[ReadOutcome, str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseStatus]
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseStatus, _Mapping]]] = ...) -> None: ...

class LeaseStatus(_message.Message):
    __slots__ = ("lease_id", "state", "ttl")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    lease_id: bytes
    state: LeaseState
    ttl: _duration_pb2.Duration
    def __init__(self, lease_id: _Optional[bytes] = ..., state: _Optional[_Union[LeaseState, str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_ids", "ttl")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[bytes]
    ttl: _duration_pb2.Duration
    def __init__(self, lease_ids: _Optional[_Iterable[bytes]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseStatus]
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseStatus, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "prompt_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_id: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("requests", "parts")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    parts: int
    def __init__(self, requests: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("encoder", "model", "limits", "transports", "engines", "load", "versions")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    encoder: _embedding_pb2.EncoderRef
    model: ModelInfo
    limits: Limits
    transports: _containers.RepeatedCompositeFieldContainer[TransportInfo]
    engines: _containers.RepeatedCompositeFieldContainer[EngineInfo]
    load: Load
    versions: _containers.ScalarMap[str, str]
    def __init__(self, encoder: _Optional[_Union[_embedding_pb2.EncoderRef, _Mapping]] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[TransportInfo, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineInfo, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., versions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "model_type", "modalities", "hidden_size", "dtype", "tensors", "compatibility_fingerprint", "cache_namespace", "weights")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    MODALITIES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model_type: str
    modalities: _containers.RepeatedScalarFieldContainer[_media_pb2.Modality]
    hidden_size: int
    dtype: _embedding_pb2.DataType
    tensors: _containers.RepeatedScalarFieldContainer[str]
    compatibility_fingerprint: bytes
    cache_namespace: bytes
    weights: WeightsInfo
    def __init__(self, name: _Optional[str] = ..., model_type: _Optional[str] = ..., modalities: _Optional[_Iterable[_Union[_media_pb2.Modality, str]]] = ..., hidden_size: _Optional[int] = ..., dtype: _Optional[_Union[_embedding_pb2.DataType, str]] = ..., tensors: _Optional[_Iterable[str]] = ..., compatibility_fingerprint: _Optional[bytes] = ..., cache_namespace: _Optional[bytes] = ..., weights: _Optional[_Union[WeightsInfo, _Mapping]] = ...) -> None: ...

class WeightsInfo(_message.Message):
    __slots__ = ("files", "tensors", "bytes", "parameters")
    FILES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedScalarFieldContainer[str]
    tensors: int
    bytes: int
    parameters: int
    def __init__(self, files: _Optional[_Iterable[str]] = ..., tensors: _Optional[int] = ..., bytes: _Optional[int] = ..., parameters: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_inline_bytes", "max_items", "max_parts", "max_receivers", "max_image_pixels", "default_lease_ttl", "max_lease_ttl", "max_prompt_bytes", "max_message_bytes")
    MAX_INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_PARTS_FIELD_NUMBER: _ClassVar[int]
    MAX_RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_PIXELS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_inline_bytes: int
    max_items: int
    max_parts: int
    max_receivers: int
    max_image_pixels: int
    default_lease_ttl: _duration_pb2.Duration
    max_lease_ttl: _duration_pb2.Duration
    max_prompt_bytes: int
    max_message_bytes: int
    def __init__(self, max_inline_bytes: _Optional[int] = ..., max_items: _Optional[int] = ..., max_parts: _Optional[int] = ..., max_receivers: _Optional[int] = ..., max_image_pixels: _Optional[int] = ..., default_lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_prompt_bytes: _Optional[int] = ..., max_message_bytes: _Optional[int] = ...) -> None: ...

class TransportInfo(_message.Message):
    __slots__ = ("transport", "available", "reason")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transport: _embedding_pb2.Transport
    available: bool
    reason: str
    def __init__(self, transport: _Optional[_Union[_embedding_pb2.Transport, str]] = ..., available: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("index", "boot_id", "device", "state", "restarts", "batches_in_flight", "arena_bytes", "reserved_bytes", "leased_bytes", "cached_bytes")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    index: int
    boot_id: str
    device: str
    state: EngineState
    restarts: int
    batches_in_flight: int
    arena_bytes: int
    reserved_bytes: int
    leased_bytes: int
    cached_bytes: int
    def __init__(self, index: _Optional[int] = ..., boot_id: _Optional[str] = ..., device: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., restarts: _Optional[int] = ..., batches_in_flight: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., cached_bytes: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("requests", "parts", "leases", "media_bytes", "loop_lag", "uptime", "media_worker_restarts", "subscriptions", "receiver_parts")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    MEDIA_WORKER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_PARTS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    parts: _containers.ScalarMap[str, int]
    leases: int
    media_bytes: int
    loop_lag: _duration_pb2.Duration
    uptime: _duration_pb2.Duration
    media_worker_restarts: int
    subscriptions: int
    receiver_parts: int
    def __init__(self, requests: _Optional[int] = ..., parts: _Optional[_Mapping[str, int]] = ..., leases: _Optional[int] = ..., media_bytes: _Optional[int] = ..., loop_lag: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., media_worker_restarts: _Optional[int] = ..., subscriptions: _Optional[int] = ..., receiver_parts: _Optional[int] = ...) -> None: ...
