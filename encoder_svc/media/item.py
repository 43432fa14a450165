"""From the bytes of a media item to something an adapter can measure and decode."""

from __future__ import annotations

from collections.abc import Sequence

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.image import ImageProbe
from encoder_svc.models.adapter import MediaProbe
from epd.encoder.v1.media_pb2 import MediaItem, Modality


def open_media(item: MediaItem, files: Sequence[bytes], max_image_pixels: int) -> MediaProbe:
    """Checks the bytes of an item and reads its header; decodes nothing.

    Args:
        item: the item without its bytes.
        files: the media files, one for an image.
        max_image_pixels: pixels of a decoded image that are allowed.

    Raises:
        ServiceError: the item has no bytes, or is no media file of its modality.
    """
    if item.modality != Modality.MODALITY_IMAGE:
        name = Modality.Name(item.modality).removeprefix("MODALITY_").lower()
        raise ServiceError(Reason.MODALITY_UNSUPPORTED, f"this server does not decode {name} items; send images")
    if len(files) != 1 or not files[0]:
        raise ServiceError(Reason.MEDIA_EMPTY, "the item has no bytes; send a whole image file")
    (data,) = files
    return ImageProbe(data, max_image_pixels)
