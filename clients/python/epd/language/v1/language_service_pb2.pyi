from epd.encoder.v1 import media_pb2 as _media_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("prompt_id", "messages", "max_new_tokens")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    max_new_tokens: int
    def __init__(self, prompt_id: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: _containers.RepeatedCompositeFieldContainer[Content]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[_Iterable[_Union[Content, _Mapping]]] = ...) -> None: ...

class Content(_message.Message):
    __slots__ = ("text", "media")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    text: str
    media: _media_pb2.Modality
    def __init__(self, text: _Optional[str] = ..., media: _Optional[_Union[_media_pb2.Modality, str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("accepted", "part_missing", "expanded", "tokens", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PART_MISSING_FIELD_NUMBER: _ClassVar[int]
    EXPANDED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    part_missing: PartMissing
    expanded: Expanded
    tokens: Tokens
    finished: Finished
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., part_missing: _Optional[_Union[PartMissing, _Mapping]] = ..., expanded: _Optional[_Union[Expanded, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("receiver_id", "num_parts")
    RECEIVER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    receiver_id: str
    num_parts: int
    def __init__(self, receiver_id: _Optional[str] = ..., num_parts: _Optional[int] = ...) -> None: ...

class PartMissing(_message.Message):
    __slots__ = ("part_idx", "status")
    PART_IDX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    part_idx: int
    status: _status_pb2.Status
    def __init__(self, part_idx: _Optional[int] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Expanded(_message.Message):
    __slots__ = ("prompt_tokens",)
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("text", "generated_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    generated_tokens: int
    def __init__(self, text: _Optional[str] = ..., generated_tokens: _Optional[int] = ...) -> None: ...
