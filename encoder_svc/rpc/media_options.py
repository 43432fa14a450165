"""Checks the options of a media item, which need nothing but the item."""

from __future__ import annotations

import math

from encoder_svc.errors import Reason, ServiceError
from epd.encoder.v1.media_pb2 import AudioOptions, ImageDetail, ImageOptions, MediaItem, Modality, VideoOptions

OPTIONS_OF = {Modality.MODALITY_IMAGE: "image", Modality.MODALITY_VIDEO: "video", Modality.MODALITY_AUDIO: "audio"}
"""Which member of ``MediaItem.options`` belongs to a modality."""


def invalid(field: str, message: str) -> ServiceError:
    """A field that is wrong whatever the state of the server. The message says after its path what is wrong with it."""
    return ServiceError(Reason.REQUEST_INVALID, f"{field}: {message}", field=field)


def check_options(item: MediaItem, path: str) -> None:
    """Checks ``item.options`` against the modality and in itself.

    Args:
        item: an item whose modality is known.
        path: where the item is in its request, such as ``items[2]``.

    Raises:
        ServiceError: REQUEST_INVALID, with the path of the field.
    """
    kind = item.WhichOneof("options")
    if kind is None:
        return
    expected = OPTIONS_OF[item.modality]
    if kind != expected:
        raise invalid(f"{path}.{kind}", f"an item of this modality takes its options in `{expected}`, not in `{kind}`")
    if kind == "image":
        _check_image(item.image, f"{path}.image")
    elif kind == "video":
        _check_video(item.video, f"{path}.video")
    else:
        _check_span(item.audio, f"{path}.audio")


def check_not_negative(value: float, path: str) -> None:
    """Checks that a number is finite and not negative.

    Raises:
        ServiceError: REQUEST_INVALID, with the path of the field.
    """
    if not math.isfinite(value) or value < 0:
        raise invalid(path, "must be a finite number that is not negative; 0 takes the default")


def _check_image(options: ImageOptions, path: str) -> None:
    _check_order(options.min_pixels, options.max_pixels, f"{path}.min_pixels", "max_pixels")
    if options.detail not in ImageDetail.values():
        raise invalid(f"{path}.detail", f"{options.detail} is no ImageDetail that this server knows")


def _check_video(options: VideoOptions, path: str) -> None:
    check_not_negative(options.fps, f"{path}.fps")
    if options.fps and options.num_frames:
        raise invalid(f"{path}.num_frames", "fps and num_frames exclude each other; set one of them")
    _check_order(options.min_frames, options.max_frames, f"{path}.min_frames", "max_frames")
    _check_order(options.min_pixels, options.max_pixels, f"{path}.min_pixels", "max_pixels")
    _check_span(options, path)


def _check_span(options: VideoOptions | AudioOptions, path: str) -> None:
    check_not_negative(options.start_seconds, f"{path}.start_seconds")
    check_not_negative(options.end_seconds, f"{path}.end_seconds")
    if options.end_seconds and options.end_seconds <= options.start_seconds:
        raise invalid(f"{path}.end_seconds", "must be greater than start_seconds, or 0 for the end of the media")


def _check_order(least: int, greatest: int, path: str, other: str) -> None:
    if greatest and least > greatest:
        raise invalid(path, f"is greater than {other}")
