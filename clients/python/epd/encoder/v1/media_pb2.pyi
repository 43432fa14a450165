from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Modality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODALITY_UNSPECIFIED: _ClassVar[Modality]
    MODALITY_IMAGE: _ClassVar[Modality]
    MODALITY_VIDEO: _ClassVar[Modality]
    MODALITY_AUDIO: _ClassVar[Modality]

class ImageDetail(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IMAGE_DETAIL_UNSPECIFIED: _ClassVar[ImageDetail]
    IMAGE_DETAIL_LOW: _ClassVar[ImageDetail]
    IMAGE_DETAIL_HIGH: _ClassVar[ImageDetail]
MODALITY_UNSPECIFIED: Modality
MODALITY_IMAGE: Modality
MODALITY_VIDEO: Modality
MODALITY_AUDIO: Modality
IMAGE_DETAIL_UNSPECIFIED: ImageDetail
IMAGE_DETAIL_LOW: ImageDetail
IMAGE_DETAIL_HIGH: ImageDetail

class MediaItem(_message.Message):
    __slots__ = ("part_idx", "modality", "data", "uri", "upload_id", "content_key", "frames", "mime_type", "content_sha256", "image", "video", "audio")
    PART_IDX_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_KEY_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_SHA256_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    part_idx: int
    modality: Modality
    data: bytes
    uri: str
    upload_id: str
    content_key: bytes
    frames: FrameSequence
    mime_type: str
    content_sha256: bytes
    image: ImageOptions
    video: VideoOptions
    audio: AudioOptions
    def __init__(self, part_idx: _Optional[int] = ..., modality: _Optional[_Union[Modality, str]] = ..., data: _Optional[bytes] = ..., uri: _Optional[str] = ..., upload_id: _Optional[str] = ..., content_key: _Optional[bytes] = ..., frames: _Optional[_Union[FrameSequence, _Mapping]] = ..., mime_type: _Optional[str] = ..., content_sha256: _Optional[bytes] = ..., image: _Optional[_Union[ImageOptions, _Mapping]] = ..., video: _Optional[_Union[VideoOptions, _Mapping]] = ..., audio: _Optional[_Union[AudioOptions, _Mapping]] = ...) -> None: ...

class FrameSequence(_message.Message):
    __slots__ = ("frames", "fps")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedScalarFieldContainer[bytes]
    fps: float
    def __init__(self, frames: _Optional[_Iterable[bytes]] = ..., fps: _Optional[float] = ...) -> None: ...

class ImageOptions(_message.Message):
    __slots__ = ("min_pixels", "max_pixels", "detail")
    MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    min_pixels: int
    max_pixels: int
    detail: ImageDetail
    def __init__(self, min_pixels: _Optional[int] = ..., max_pixels: _Optional[int] = ..., detail: _Optional[_Union[ImageDetail, str]] = ...) -> None: ...

class VideoOptions(_message.Message):
    __slots__ = ("fps", "num_frames", "min_frames", "max_frames", "start_seconds", "end_seconds", "use_audio_in_video", "min_pixels", "max_pixels", "total_pixels")
    FPS_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MIN_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_SECONDS_FIELD_NUMBER: _ClassVar[int]
    USE_AUDIO_IN_VIDEO_FIELD_NUMBER: _ClassVar[int]
    MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PIXELS_FIELD_NUMBER: _ClassVar[int]
    fps: float
    num_frames: int
    min_frames: int
    max_frames: int
    start_seconds: float
    end_seconds: float
    use_audio_in_video: bool
    min_pixels: int
    max_pixels: int
    total_pixels: int
    def __init__(self, fps: _Optional[float] = ..., num_frames: _Optional[int] = ..., min_frames: _Optional[int] = ..., max_frames: _Optional[int] = ..., start_seconds: _Optional[float] = ..., end_seconds: _Optional[float] = ..., use_audio_in_video: _Optional[bool] = ..., min_pixels: _Optional[int] = ..., max_pixels: _Optional[int] = ..., total_pixels: _Optional[int] = ...) -> None: ...

class AudioOptions(_message.Message):
    __slots__ = ("start_seconds", "end_seconds")
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_SECONDS_FIELD_NUMBER: _ClassVar[int]
    start_seconds: float
    end_seconds: float
    def __init__(self, start_seconds: _Optional[float] = ..., end_seconds: _Optional[float] = ...) -> None: ...
