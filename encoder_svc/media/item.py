"""From the bytes of a media item to something an adapter can measure and decode."""

from __future__ import annotations

from collections.abc import Sequence

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.audio import AudioFileProbe
from encoder_svc.media.image import ImageProbe
from encoder_svc.media.limits import MediaLimits
from encoder_svc.media.video import open_video
from encoder_svc.models.adapter import MediaProbe
from epd.encoder.v1.media_pb2 import MediaItem, Modality


def open_media(item: MediaItem, files: Sequence[bytes], limits: MediaLimits) -> MediaProbe:
    """Checks the bytes of an item and reads its header.

    Args:
        item: the item without its bytes.
        files: the media file, or the frames of a video.
        limits: what is allowed.

    Raises:
        ServiceError: the item has no bytes, is no media file of its modality, or is beyond a limit.
    """
    if not files or not all(files):
        raise ServiceError(Reason.MEDIA_EMPTY, "the item has no bytes; send a whole media file")
    match item.modality:
        case Modality.MODALITY_IMAGE:
            (data,) = files
            return ImageProbe(data, limits.image_pixels)
        case Modality.MODALITY_AUDIO:
            (data,) = files
            return AudioFileProbe(data, limits.audio_seconds, item.audio.start_seconds, item.audio.end_seconds)
        case Modality.MODALITY_VIDEO:
            return open_video(item, files, limits)
        case other:
            raise ServiceError(Reason.MODALITY_UNSUPPORTED, f"this server does not decode items of modality {other}")
