"""The content key: 32 bytes that name (media, options, model, preprocessing). Formula: docs/contract.md.

::

    frame(x)    = 8-byte big-endian length of x, then x
    content key = SHA-256( frame("epd.content-key.v1") frame(cache_namespace) frame(salt)
                           frame(modality) frame(media digest) frame(options) )
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import cast

from google.protobuf.descriptor import FieldDescriptor

from epd.encoder.v1.media_pb2 import AudioOptions, ImageOptions, MediaItem, Modality, VideoOptions

DOMAIN = b"epd.content-key.v1"

Options = ImageOptions | VideoOptions | AudioOptions


def content_key(
    cache_namespace: bytes, salt: bytes, modality: Modality, media_digest: bytes, options: Options | None = None
) -> bytes:
    """The content key, 32 bytes.

    Args:
        cache_namespace: ``ModelInfo.cache_namespace`` of the server, 32 bytes.
        salt: ``EncodeRequest.cache_salt``; may be empty.
        modality: the kind of the media.
        media_digest: from :func:`media_digest` or :func:`frames_digest`, 32 bytes.
        options: as in the media item; None is the same as all fields zero.

    Raises:
        ValueError: the namespace or the digest is not 32 bytes long.
    """
    if len(cache_namespace) != 32 or len(media_digest) != 32:
        raise ValueError("cache_namespace and media_digest must be 32 bytes long")
    text = canonical_options(options) if options is not None else ""
    parts = (DOMAIN, cache_namespace, salt, str(int(modality)).encode(), media_digest, text.encode())
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def item_content_key(cache_namespace: bytes, salt: bytes, item: MediaItem) -> bytes:
    """The content key of an item that carries its bytes (``data`` or ``frames``).

    Raises:
        ValueError: the item's bytes are elsewhere.
    """
    match item.WhichOneof("source"):
        case "data":
            digest = media_digest(item.data)
        case "frames":
            digest = frames_digest(item.frames.frames, item.frames.fps)
        case _:
            raise ValueError("only an item with `data` or `frames` has the bytes to make a content key of")
    return content_key(cache_namespace, salt, item.modality, digest, _options_of(item))


def media_digest(file: bytes) -> bytes:
    """The digest of a media file: SHA-256, 32 bytes."""
    return hashlib.sha256(file).digest()


def frames_digest(frames: Sequence[bytes], frames_per_second: float) -> bytes:
    """The digest of a frame sequence: SHA-256 over each frame's SHA-256 and the fps as :func:`canonical_double`."""
    digests = b"".join(hashlib.sha256(frame).digest() for frame in frames)
    return hashlib.sha256(digests + canonical_double(frames_per_second).encode()).digest()


def canonical_options(options: Options) -> str:
    """Options as text: ``name=value`` of each field that is not zero, by field number, joined by ``;``."""
    described = cast("Sequence[FieldDescriptor]", options.DESCRIPTOR.fields)
    fields = sorted(described, key=lambda field: field.number)
    values = ((field, getattr(options, field.name)) for field in fields)
    return ";".join(f"{field.name}={_canonical(field, value)}" for field, value in values if value)


def canonical_double(value: float) -> str:
    """The 16 lower-case hexadecimal digits of a double's IEEE 754 bits, most significant first; -0 is written as 0."""
    return struct.pack(">d", value or 0.0).hex()


def _canonical(field: FieldDescriptor, value: float | bool) -> str:
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return canonical_double(value)
    return "true" if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL else str(int(value))


def _options_of(item: MediaItem) -> Options | None:
    match item.WhichOneof("options"):
        case "image":
            return item.image
        case "video":
            return item.video
        case "audio":
            return item.audio
        case _:
            return None
