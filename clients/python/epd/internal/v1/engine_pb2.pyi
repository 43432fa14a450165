from epd.encoder.v1 import embedding_pb2 as _embedding_pb2
from epd.encoder.v1 import encoder_service_pb2 as _encoder_service_pb2
from epd.encoder.v1 import media_pb2 as _media_pb2
from epd.internal.v1 import media_worker_pb2 as _media_worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineCommand(_message.Message):
    __slots__ = ("configure", "run", "verify")
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    configure: ConfigureEngine
    run: RunBatch
    verify: VerifySlot
    def __init__(self, configure: _Optional[_Union[ConfigureEngine, _Mapping]] = ..., run: _Optional[_Union[RunBatch, _Mapping]] = ..., verify: _Optional[_Union[VerifySlot, _Mapping]] = ...) -> None: ...

class EngineReport(_message.Message):
    __slots__ = ("hello", "loading", "ready", "started", "done", "verified", "child_failed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    CHILD_FAILED_FIELD_NUMBER: _ClassVar[int]
    hello: _media_worker_pb2.ChildHello
    loading: Loading
    ready: EngineReady
    started: BatchStarted
    done: BatchDone
    verified: SlotVerified
    child_failed: _media_worker_pb2.ChildFailed
    def __init__(self, hello: _Optional[_Union[_media_worker_pb2.ChildHello, _Mapping]] = ..., loading: _Optional[_Union[Loading, _Mapping]] = ..., ready: _Optional[_Union[EngineReady, _Mapping]] = ..., started: _Optional[_Union[BatchStarted, _Mapping]] = ..., done: _Optional[_Union[BatchDone, _Mapping]] = ..., verified: _Optional[_Union[SlotVerified, _Mapping]] = ..., child_failed: _Optional[_Union[_media_worker_pb2.ChildFailed, _Mapping]] = ...) -> None: ...

class ConfigureEngine(_message.Message):
    __slots__ = ("model", "device", "dtype", "threads", "input_arena_fd", "input_arena_bytes", "arena_fd", "arena_bytes", "mooncake", "log_level", "model_options", "shared_memory", "zeromq", "measured_towers")
    class ModelOptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    INPUT_ARENA_FD_FIELD_NUMBER: _ClassVar[int]
    INPUT_ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_FD_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOONCAKE_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ZEROMQ_FIELD_NUMBER: _ClassVar[int]
    MEASURED_TOWERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    device: str
    dtype: str
    threads: int
    input_arena_fd: int
    input_arena_bytes: int
    arena_fd: int
    arena_bytes: int
    mooncake: MooncakeSettings
    log_level: str
    model_options: _containers.ScalarMap[str, str]
    shared_memory: SharedMemorySettings
    zeromq: ZeroMqSettings
    measured_towers: _containers.RepeatedScalarFieldContainer[_media_worker_pb2.Tower]
    def __init__(self, model: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., threads: _Optional[int] = ..., input_arena_fd: _Optional[int] = ..., input_arena_bytes: _Optional[int] = ..., arena_fd: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., mooncake: _Optional[_Union[MooncakeSettings, _Mapping]] = ..., log_level: _Optional[str] = ..., model_options: _Optional[_Mapping[str, str]] = ..., shared_memory: _Optional[_Union[SharedMemorySettings, _Mapping]] = ..., zeromq: _Optional[_Union[ZeroMqSettings, _Mapping]] = ..., measured_towers: _Optional[_Iterable[_Union[_media_worker_pb2.Tower, str]]] = ...) -> None: ...

class SharedMemorySettings(_message.Message):
    __slots__ = ("socket_path",)
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    socket_path: str
    def __init__(self, socket_path: _Optional[str] = ...) -> None: ...

class MooncakeSettings(_message.Message):
    __slots__ = ("host", "protocol", "devices")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    host: str
    protocol: str
    devices: str
    def __init__(self, host: _Optional[str] = ..., protocol: _Optional[str] = ..., devices: _Optional[str] = ...) -> None: ...

class ZeroMqSettings(_message.Message):
    __slots__ = ("listen", "port", "host", "curve_key")
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CURVE_KEY_FIELD_NUMBER: _ClassVar[int]
    listen: str
    port: int
    host: str
    curve_key: str
    def __init__(self, listen: _Optional[str] = ..., port: _Optional[int] = ..., host: _Optional[str] = ..., curve_key: _Optional[str] = ...) -> None: ...

class Loading(_message.Message):
    __slots__ = ("step", "fraction")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    step: str
    fraction: float
    def __init__(self, step: _Optional[str] = ..., fraction: _Optional[float] = ...) -> None: ...

class EngineReady(_message.Message):
    __slots__ = ("boot_id", "model", "transports", "locators", "versions", "budgets")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LOCATORS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    model: _encoder_service_pb2.ModelInfo
    transports: _containers.RepeatedCompositeFieldContainer[_encoder_service_pb2.TransportInfo]
    locators: _containers.RepeatedCompositeFieldContainer[_embedding_pb2.Locator]
    versions: _containers.ScalarMap[str, str]
    budgets: _containers.RepeatedCompositeFieldContainer[TowerBudget]
    def __init__(self, boot_id: _Optional[str] = ..., model: _Optional[_Union[_encoder_service_pb2.ModelInfo, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[_encoder_service_pb2.TransportInfo, _Mapping]]] = ..., locators: _Optional[_Iterable[_Union[_embedding_pb2.Locator, _Mapping]]] = ..., versions: _Optional[_Mapping[str, str]] = ..., budgets: _Optional[_Iterable[_Union[TowerBudget, _Mapping]]] = ...) -> None: ...

class TowerBudget(_message.Message):
    __slots__ = ("tower", "cost")
    TOWER_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    tower: _media_worker_pb2.Tower
    cost: int
    def __init__(self, tower: _Optional[_Union[_media_worker_pb2.Tower, str]] = ..., cost: _Optional[int] = ...) -> None: ...

class RunBatch(_message.Message):
    __slots__ = ("batch", "items")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    items: _containers.RepeatedCompositeFieldContainer[BatchItem]
    def __init__(self, batch: _Optional[int] = ..., items: _Optional[_Iterable[_Union[BatchItem, _Mapping]]] = ...) -> None: ...

class BatchItem(_message.Message):
    __slots__ = ("part", "modality", "grid_dim", "input", "input_offset", "tensors", "payload_offset", "nbytes", "first_matrix", "partial")
    PART_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    GRID_DIM_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    INPUT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_MATRIX_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    part: int
    modality: _media_pb2.Modality
    grid_dim: _containers.RepeatedScalarFieldContainer[int]
    input: _media_worker_pb2.ModelInput
    input_offset: int
    tensors: _containers.RepeatedCompositeFieldContainer[_embedding_pb2.TensorSpec]
    payload_offset: int
    nbytes: int
    first_matrix: int
    partial: bool
    def __init__(self, part: _Optional[int] = ..., modality: _Optional[_Union[_media_pb2.Modality, str]] = ..., grid_dim: _Optional[_Iterable[int]] = ..., input: _Optional[_Union[_media_worker_pb2.ModelInput, _Mapping]] = ..., input_offset: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[_embedding_pb2.TensorSpec, _Mapping]]] = ..., payload_offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., first_matrix: _Optional[int] = ..., partial: _Optional[bool] = ...) -> None: ...

class BatchStarted(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: int
    def __init__(self, batch: _Optional[int] = ...) -> None: ...

class BatchDone(_message.Message):
    __slots__ = ("batch", "items", "forward_nanoseconds", "stage_nanoseconds")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    items: _containers.RepeatedCompositeFieldContainer[ItemResult]
    forward_nanoseconds: int
    stage_nanoseconds: int
    def __init__(self, batch: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., forward_nanoseconds: _Optional[int] = ..., stage_nanoseconds: _Optional[int] = ...) -> None: ...

class ItemResult(_message.Message):
    __slots__ = ("part", "checksum", "reason", "message")
    PART_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    part: int
    checksum: _embedding_pb2.Checksum
    reason: str
    message: str
    def __init__(self, part: _Optional[int] = ..., checksum: _Optional[_Union[_embedding_pb2.Checksum, _Mapping]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class VerifySlot(_message.Message):
    __slots__ = ("query", "payload_offset", "nbytes")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    query: int
    payload_offset: int
    nbytes: int
    def __init__(self, query: _Optional[int] = ..., payload_offset: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class SlotVerified(_message.Message):
    __slots__ = ("query", "checksum")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    query: int
    checksum: _embedding_pb2.Checksum
    def __init__(self, query: _Optional[int] = ..., checksum: _Optional[_Union[_embedding_pb2.Checksum, _Mapping]] = ...) -> None: ...
