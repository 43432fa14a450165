import datetime

from epd.encoder.v1 import media_pb2 as _media_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChunkState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHUNK_STATE_UNSPECIFIED: _ClassVar[ChunkState]
    CHUNK_STATE_LAYOUT: _ClassVar[ChunkState]
    CHUNK_STATE_READY: _ClassVar[ChunkState]

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]

class ChecksumAlgorithm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKSUM_ALGORITHM_UNSPECIFIED: _ClassVar[ChecksumAlgorithm]
    CHECKSUM_ALGORITHM_XXH3_64: _ClassVar[ChecksumAlgorithm]
    CHECKSUM_ALGORITHM_CRC32C: _ClassVar[ChecksumAlgorithm]

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_INLINE: _ClassVar[Transport]
    TRANSPORT_MOONCAKE: _ClassVar[Transport]
    TRANSPORT_ZEROMQ: _ClassVar[Transport]
    TRANSPORT_SHARED_MEMORY: _ClassVar[Transport]
CHUNK_STATE_UNSPECIFIED: ChunkState
CHUNK_STATE_LAYOUT: ChunkState
CHUNK_STATE_READY: ChunkState
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_INT64: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_UINT8: DataType
CHECKSUM_ALGORITHM_UNSPECIFIED: ChecksumAlgorithm
CHECKSUM_ALGORITHM_XXH3_64: ChecksumAlgorithm
CHECKSUM_ALGORITHM_CRC32C: ChecksumAlgorithm
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_INLINE: Transport
TRANSPORT_MOONCAKE: Transport
TRANSPORT_ZEROMQ: Transport
TRANSPORT_SHARED_MEMORY: Transport

class EmbeddingChunk(_message.Message):
    __slots__ = ("prompt_id", "request_id", "part_idx", "num_parts", "modality", "state", "grid_dim", "token_count", "token_count_is_upper_bound", "tensors", "nbytes", "checksum", "generation", "slot_key", "leases", "locators", "encoder", "content_key", "compatibility_fingerprint", "from_cache", "timings", "placeholder_metadata", "image", "video", "audio")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PART_IDX_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GRID_DIM_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_IS_UPPER_BOUND_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SLOT_KEY_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LOCATORS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_KEY_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FROM_CACHE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_METADATA_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    request_id: str
    part_idx: int
    num_parts: int
    modality: _media_pb2.Modality
    state: ChunkState
    grid_dim: _containers.RepeatedScalarFieldContainer[int]
    token_count: int
    token_count_is_upper_bound: bool
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    nbytes: int
    checksum: Checksum
    generation: int
    slot_key: bytes
    leases: _containers.RepeatedCompositeFieldContainer[LeaseGrant]
    locators: _containers.RepeatedCompositeFieldContainer[Locator]
    encoder: EncoderRef
    content_key: bytes
    compatibility_fingerprint: bytes
    from_cache: bool
    timings: PartTimings
    placeholder_metadata: _containers.RepeatedCompositeFieldContainer[PlaceholderValue]
    image: ImageMetadata
    video: VideoMetadata
    audio: AudioMetadata
    def __init__(self, prompt_id: _Optional[str] = ..., request_id: _Optional[str] = ..., part_idx: _Optional[int] = ..., num_parts: _Optional[int] = ..., modality: _Optional[_Union[_media_pb2.Modality, str]] = ..., state: _Optional[_Union[ChunkState, str]] = ..., grid_dim: _Optional[_Iterable[int]] = ..., token_count: _Optional[int] = ..., token_count_is_upper_bound: _Optional[bool] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., nbytes: _Optional[int] = ..., checksum: _Optional[_Union[Checksum, _Mapping]] = ..., generation: _Optional[int] = ..., slot_key: _Optional[bytes] = ..., leases: _Optional[_Iterable[_Union[LeaseGrant, _Mapping]]] = ..., locators: _Optional[_Iterable[_Union[Locator, _Mapping]]] = ..., encoder: _Optional[_Union[EncoderRef, _Mapping]] = ..., content_key: _Optional[bytes] = ..., compatibility_fingerprint: _Optional[bytes] = ..., from_cache: _Optional[bool] = ..., timings: _Optional[_Union[PartTimings, _Mapping]] = ..., placeholder_metadata: _Optional[_Iterable[_Union[PlaceholderValue, _Mapping]]] = ..., image: _Optional[_Union[ImageMetadata, _Mapping]] = ..., video: _Optional[_Union[VideoMetadata, _Mapping]] = ..., audio: _Optional[_Union[AudioMetadata, _Mapping]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "strides", "byte_offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    BYTE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    byte_offset: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., byte_offset: _Optional[int] = ...) -> None: ...

class Checksum(_message.Message):
    __slots__ = ("algorithm", "value")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    algorithm: ChecksumAlgorithm
    value: int
    def __init__(self, algorithm: _Optional[_Union[ChecksumAlgorithm, str]] = ..., value: _Optional[int] = ...) -> None: ...

class LeaseGrant(_message.Message):
    __slots__ = ("receiver_id", "lease_id", "ttl")
    RECEIVER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    receiver_id: str
    lease_id: bytes
    ttl: _duration_pb2.Duration
    def __init__(self, receiver_id: _Optional[str] = ..., lease_id: _Optional[bytes] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Locator(_message.Message):
    __slots__ = ("inline", "mooncake", "zeromq", "shared_memory")
    INLINE_FIELD_NUMBER: _ClassVar[int]
    MOONCAKE_FIELD_NUMBER: _ClassVar[int]
    ZEROMQ_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    inline: InlineLocator
    mooncake: MooncakeLocator
    zeromq: ZeroMqLocator
    shared_memory: SharedMemoryLocator
    def __init__(self, inline: _Optional[_Union[InlineLocator, _Mapping]] = ..., mooncake: _Optional[_Union[MooncakeLocator, _Mapping]] = ..., zeromq: _Optional[_Union[ZeroMqLocator, _Mapping]] = ..., shared_memory: _Optional[_Union[SharedMemoryLocator, _Mapping]] = ...) -> None: ...

class InlineLocator(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MooncakeLocator(_message.Message):
    __slots__ = ("session", "address", "protocol")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    session: str
    address: int
    protocol: str
    def __init__(self, session: _Optional[str] = ..., address: _Optional[int] = ..., protocol: _Optional[str] = ...) -> None: ...

class ZeroMqLocator(_message.Message):
    __slots__ = ("endpoint", "curve_public_key", "slot_offset")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CURVE_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SLOT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    curve_public_key: bytes
    slot_offset: int
    def __init__(self, endpoint: _Optional[str] = ..., curve_public_key: _Optional[bytes] = ..., slot_offset: _Optional[int] = ...) -> None: ...

class SharedMemoryLocator(_message.Message):
    __slots__ = ("host_boot_id", "socket_path", "slot_offset")
    HOST_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    SLOT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    host_boot_id: str
    socket_path: str
    slot_offset: int
    def __init__(self, host_boot_id: _Optional[str] = ..., socket_path: _Optional[str] = ..., slot_offset: _Optional[int] = ...) -> None: ...

class EncoderRef(_message.Message):
    __slots__ = ("instance_id", "engine_boot_id", "grpc_target")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    GRPC_TARGET_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    engine_boot_id: str
    grpc_target: str
    def __init__(self, instance_id: _Optional[str] = ..., engine_boot_id: _Optional[str] = ..., grpc_target: _Optional[str] = ...) -> None: ...

class PartTimings(_message.Message):
    __slots__ = ("queued", "fetch", "prepare", "batch_wait", "forward", "stage", "total", "batch_items", "batch_patches")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    BATCH_WAIT_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    BATCH_ITEMS_FIELD_NUMBER: _ClassVar[int]
    BATCH_PATCHES_FIELD_NUMBER: _ClassVar[int]
    queued: _duration_pb2.Duration
    fetch: _duration_pb2.Duration
    prepare: _duration_pb2.Duration
    batch_wait: _duration_pb2.Duration
    forward: _duration_pb2.Duration
    stage: _duration_pb2.Duration
    total: _duration_pb2.Duration
    batch_items: int
    batch_patches: int
    def __init__(self, queued: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., fetch: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prepare: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., batch_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., forward: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., stage: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., batch_items: _Optional[int] = ..., batch_patches: _Optional[int] = ...) -> None: ...

class PlaceholderValue(_message.Message):
    __slots__ = ("name", "ints", "doubles", "strings", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INTS_FIELD_NUMBER: _ClassVar[int]
    DOUBLES_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    ints: Int64List
    doubles: DoubleList
    strings: StringList
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., ints: _Optional[_Union[Int64List, _Mapping]] = ..., doubles: _Optional[_Union[DoubleList, _Mapping]] = ..., strings: _Optional[_Union[StringList, _Mapping]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Int64List(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class DoubleList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class StringList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class ImageMetadata(_message.Message):
    __slots__ = ("width", "height", "resized_width", "resized_height")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    RESIZED_WIDTH_FIELD_NUMBER: _ClassVar[int]
    RESIZED_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    width: int
    height: int
    resized_width: int
    resized_height: int
    def __init__(self, width: _Optional[int] = ..., height: _Optional[int] = ..., resized_width: _Optional[int] = ..., resized_height: _Optional[int] = ...) -> None: ...

class VideoMetadata(_message.Message):
    __slots__ = ("width", "height", "resized_width", "resized_height", "sampled_fps", "frame_times", "video_timestamps", "audio")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    RESIZED_WIDTH_FIELD_NUMBER: _ClassVar[int]
    RESIZED_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FPS_FIELD_NUMBER: _ClassVar[int]
    FRAME_TIMES_FIELD_NUMBER: _ClassVar[int]
    VIDEO_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    width: int
    height: int
    resized_width: int
    resized_height: int
    sampled_fps: float
    frame_times: _containers.RepeatedScalarFieldContainer[float]
    video_timestamps: _containers.RepeatedScalarFieldContainer[float]
    audio: VideoAudioMetadata
    def __init__(self, width: _Optional[int] = ..., height: _Optional[int] = ..., resized_width: _Optional[int] = ..., resized_height: _Optional[int] = ..., sampled_fps: _Optional[float] = ..., frame_times: _Optional[_Iterable[float]] = ..., video_timestamps: _Optional[_Iterable[float]] = ..., audio: _Optional[_Union[VideoAudioMetadata, _Mapping]] = ...) -> None: ...

class VideoAudioMetadata(_message.Message):
    __slots__ = ("video_audio_feature_lens", "video_audio_segment_lens_flat", "video_audio_per_video_num_units")
    VIDEO_AUDIO_FEATURE_LENS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_AUDIO_SEGMENT_LENS_FLAT_FIELD_NUMBER: _ClassVar[int]
    VIDEO_AUDIO_PER_VIDEO_NUM_UNITS_FIELD_NUMBER: _ClassVar[int]
    video_audio_feature_lens: int
    video_audio_segment_lens_flat: _containers.RepeatedScalarFieldContainer[int]
    video_audio_per_video_num_units: int
    def __init__(self, video_audio_feature_lens: _Optional[int] = ..., video_audio_segment_lens_flat: _Optional[_Iterable[int]] = ..., video_audio_per_video_num_units: _Optional[int] = ...) -> None: ...

class AudioMetadata(_message.Message):
    __slots__ = ("duration_seconds", "source_sampling_rate", "sampling_rate", "source_channels", "mel_frames")
    DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SAMPLING_RATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_RATE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    MEL_FRAMES_FIELD_NUMBER: _ClassVar[int]
    duration_seconds: float
    source_sampling_rate: int
    sampling_rate: int
    source_channels: int
    mel_frames: int
    def __init__(self, duration_seconds: _Optional[float] = ..., source_sampling_rate: _Optional[int] = ..., sampling_rate: _Optional[int] = ..., source_channels: _Optional[int] = ..., mel_frames: _Optional[int] = ...) -> None: ...
