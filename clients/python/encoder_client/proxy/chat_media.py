"""Takes the media out of a chat request, and puts in their places what a language-only vLLM takes.

It reads OpenAI's form of a request as vLLM extends it: parts of the types ``image_url``, ``video_url``, ``audio_url``
and ``input_audio`` in the content of messages, and ``mm_processor_kwargs``. What it writes is of the types
``image_embeds``, ``video_embeds`` and ``audio_embeds`` without embeddings: what sizes the placeholders (a grid, a
length), and the content key as ``uuid``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from encoder_client.errors import PromptError
from encoder_client.integrations.vllm.transfer_params import Part, transfer_params
from encoder_client.media import Source, audio, image, video
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import MediaItem, VideoOptions

Json = dict[str, Any]

KINDS = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
"""Types of parts that hold media, and what vLLM calls the media."""
SIZED_BY_MEL_FRAMES = {"qwen2_5_omni", "qwen3_omni_moe"}
"""Families (``model_type``) in which vLLM sizes sound by its mel frames. In others it takes the number of rows."""
REFUSED_TYPES = {"image_pil", "image_embeds", "video_embeds", "audio_embeds", "prompt_embeds", "file"}
"""Types of parts that hold media in a form that is not encoded here; vLLM must not see them either."""
MOST_SALT_BYTES = 64


@dataclass(frozen=True)
class ChatMedia:
    """The media of one chat request."""

    items: list[MediaItem]
    """In the order of the prompt."""
    cache_salt: bytes
    """What the request's own ``cache_salt`` becomes at the encoders."""


def take(body: Json) -> ChatMedia:
    """Reads the media of a request, which stays as it is.

    Raises:
        PromptError: it has media, or options for them, that cannot be encoded here.
    """
    options = body.get("mm_processor_kwargs") or {}
    if not isinstance(options, dict) or not set(options) <= {"min_pixels", "max_pixels"}:
        raise PromptError("mm_processor_kwargs may have min_pixels and max_pixels here, and nothing else")
    least, most = (_pixels(options, name) for name in ("min_pixels", "max_pixels"))
    items: list[MediaItem] = []
    for part in _media_parts(body):
        source = _source(part)
        match KINDS[part["type"]]:
            case "image":
                items.append(image(source, min_pixels=least, max_pixels=most))
            case "video":
                sizes = VideoOptions(min_pixels=least, max_pixels=most) if least or most else None
                items.append(video(source, options=sizes))
            case _:
                items.append(audio(source))
    return ChatMedia(items, _salt(body))


def rewrite(body: Json, chunks: Sequence[EmbeddingChunk], model_type: str) -> Json:
    """The request that vLLM gets.

    Args:
        body: what the caller sent.
        chunks: READY, of each item of :func:`take`, in that order.
        model_type: the encoders' family.
    """
    left = iter(chunks)
    messages = []
    for message in body["messages"]:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = [_without_media(part, next(left), model_type) if _is_media(part) else part for part in content]
            message = message | {"content": content}  # noqa: PLW2901 # the caller's stays as it is
        messages.append(message)
    rewritten = {name: body[name] for name in body.keys() - {"mm_processor_kwargs", "ec_transfer_params"}}
    rewritten["messages"] = messages
    if chunks:
        rewritten["ec_transfer_params"] = transfer_params(
            [Part(chunk.content_key, encoder=chunk.encoder.instance_id) for chunk in chunks]
        )
    return rewritten


def _is_media(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in KINDS


def _media_parts(body: Json) -> Iterator[Json]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise PromptError("messages must be a list")
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if _is_media(part):
                yield part
            elif isinstance(part, dict) and (part.get("type") in REFUSED_TYPES or set(part) & set(KINDS)):
                raise PromptError(
                    f"content of the type {part.get('type')!r} cannot be encoded here; send one of {', '.join(KINDS)}"
                )


def _source(part: Json) -> Source:
    """The file's bytes if they are here, else its address, which the encoder judges."""
    value = part.get(part["type"])
    if part["type"] == "input_audio":
        return _sound(value)
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise PromptError(f"{part['type']} needs a url")
    if not url.lower().startswith("data:"):
        return url
    head, comma, data = url.partition(",")
    try:
        if not comma:
            raise ValueError
        return base64.b64decode(data, validate=True) if head.lower().endswith(";base64") else unquote_to_bytes(data)
    except (ValueError, binascii.Error):
        raise PromptError(f"the data: address in {part['type']} is damaged") from None


def _sound(value: object) -> bytes:
    """``{"data": …, "format": …}``: the file tells its format itself."""
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, str) or not data:
        raise PromptError("input_audio needs data, a sound file in base64")
    try:
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error):
        raise PromptError("the data of input_audio are damaged") from None


def _pixels(options: Json, name: str) -> int:
    value = options.get(name) or 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise PromptError(f"{name} must be a number of pixels")
    return value


def _salt(body: Json) -> bytes:
    salt = str(body.get("cache_salt") or "").encode()
    return salt if len(salt) <= MOST_SALT_BYTES else hashlib.sha256(salt).digest()


def _without_media(part: Json, chunk: EmbeddingChunk, model_type: str) -> Json:
    kind = KINDS[part["type"]]
    metadata: Json = {}
    if kind != "audio":
        metadata[f"{kind}_grid_thw"] = list(chunk.grid_dim)
    elif model_type in SIZED_BY_MEL_FRAMES:
        metadata["audio_feature_lengths"] = [chunk.audio.mel_frames]
    else:
        metadata["audio_num_tokens"] = [chunk.token_count]
    if chunk.video.video_timestamps:
        metadata["timestamps"] = list(chunk.video.video_timestamps)
    return {"type": f"{kind}_embeds", f"{kind}_embeds": metadata, "uuid": chunk.content_key.hex()}
