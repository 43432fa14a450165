from epd.encoder.v1 import embedding_pb2 as _embedding_pb2
from epd.encoder.v1 import media_pb2 as _media_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tower(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOWER_UNSPECIFIED: _ClassVar[Tower]
    TOWER_VISION: _ClassVar[Tower]
    TOWER_AUDIO: _ClassVar[Tower]
TOWER_UNSPECIFIED: Tower
TOWER_VISION: Tower
TOWER_AUDIO: Tower

class MediaCommand(_message.Message):
    __slots__ = ("configure", "prepare", "grant", "drop")
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    configure: ConfigureMedia
    prepare: Prepare
    grant: InputGrant
    drop: DropItem
    def __init__(self, configure: _Optional[_Union[ConfigureMedia, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., grant: _Optional[_Union[InputGrant, _Mapping]] = ..., drop: _Optional[_Union[DropItem, _Mapping]] = ...) -> None: ...

class MediaReport(_message.Message):
    __slots__ = ("hello", "ready", "measured", "prepared", "failed", "child_failed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CHILD_FAILED_FIELD_NUMBER: _ClassVar[int]
    hello: ChildHello
    ready: MediaReady
    measured: Measured
    prepared: Prepared
    failed: PrepareFailed
    child_failed: ChildFailed
    def __init__(self, hello: _Optional[_Union[ChildHello, _Mapping]] = ..., ready: _Optional[_Union[MediaReady, _Mapping]] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., failed: _Optional[_Union[PrepareFailed, _Mapping]] = ..., child_failed: _Optional[_Union[ChildFailed, _Mapping]] = ...) -> None: ...

class ChildHello(_message.Message):
    __slots__ = ("pid",)
    PID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    def __init__(self, pid: _Optional[int] = ...) -> None: ...

class ChildFailed(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class ConfigureMedia(_message.Message):
    __slots__ = ("model", "dtype", "input_arena_fd", "input_arena_bytes", "threads", "limits", "log_level", "memory_bytes", "model_options")
    class ModelOptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    INPUT_ARENA_FD_FIELD_NUMBER: _ClassVar[int]
    INPUT_ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    dtype: str
    input_arena_fd: int
    input_arena_bytes: int
    threads: int
    limits: MediaLimits
    log_level: str
    memory_bytes: int
    model_options: _containers.ScalarMap[str, str]
    def __init__(self, model: _Optional[str] = ..., dtype: _Optional[str] = ..., input_arena_fd: _Optional[int] = ..., input_arena_bytes: _Optional[int] = ..., threads: _Optional[int] = ..., limits: _Optional[_Union[MediaLimits, _Mapping]] = ..., log_level: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., model_options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class MediaLimits(_message.Message):
    __slots__ = ("image_pixels", "video_pixels", "video_frames", "video_seconds", "audio_seconds")
    IMAGE_PIXELS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_PIXELS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FRAMES_FIELD_NUMBER: _ClassVar[int]
    VIDEO_SECONDS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_SECONDS_FIELD_NUMBER: _ClassVar[int]
    image_pixels: int
    video_pixels: int
    video_frames: int
    video_seconds: float
    audio_seconds: float
    def __init__(self, image_pixels: _Optional[int] = ..., video_pixels: _Optional[int] = ..., video_frames: _Optional[int] = ..., video_seconds: _Optional[float] = ..., audio_seconds: _Optional[float] = ...) -> None: ...

class MediaReady(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("part", "item", "measure_only")
    PART_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    MEASURE_ONLY_FIELD_NUMBER: _ClassVar[int]
    part: int
    item: _media_pb2.MediaItem
    measure_only: bool
    def __init__(self, part: _Optional[int] = ..., item: _Optional[_Union[_media_pb2.MediaItem, _Mapping]] = ..., measure_only: _Optional[bool] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("part", "layout", "inputs")
    PART_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    part: int
    layout: _embedding_pb2.EmbeddingChunk
    inputs: _containers.RepeatedCompositeFieldContainer[ModelInput]
    def __init__(self, part: _Optional[int] = ..., layout: _Optional[_Union[_embedding_pb2.EmbeddingChunk, _Mapping]] = ..., inputs: _Optional[_Iterable[_Union[ModelInput, _Mapping]]] = ...) -> None: ...

class ModelInput(_message.Message):
    __slots__ = ("tensors", "nbytes", "patches", "tower", "matrices", "grid_dim")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    TOWER_FIELD_NUMBER: _ClassVar[int]
    MATRICES_FIELD_NUMBER: _ClassVar[int]
    GRID_DIM_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[_embedding_pb2.TensorSpec]
    nbytes: int
    patches: int
    tower: Tower
    matrices: int
    grid_dim: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tensors: _Optional[_Iterable[_Union[_embedding_pb2.TensorSpec, _Mapping]]] = ..., nbytes: _Optional[int] = ..., patches: _Optional[int] = ..., tower: _Optional[_Union[Tower, str]] = ..., matrices: _Optional[int] = ..., grid_dim: _Optional[_Iterable[int]] = ...) -> None: ...

class InputGrant(_message.Message):
    __slots__ = ("part", "offset")
    PART_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    part: int
    offset: int
    def __init__(self, part: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class DropItem(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: int
    def __init__(self, part: _Optional[int] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("part", "prepare_nanoseconds")
    PART_FIELD_NUMBER: _ClassVar[int]
    PREPARE_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    part: int
    prepare_nanoseconds: int
    def __init__(self, part: _Optional[int] = ..., prepare_nanoseconds: _Optional[int] = ...) -> None: ...

class PrepareFailed(_message.Message):
    __slots__ = ("part", "reason", "message")
    PART_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    part: int
    reason: str
    message: str
    def __init__(self, part: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
