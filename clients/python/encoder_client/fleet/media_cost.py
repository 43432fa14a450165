"""What an item will cost an encoder, guessed from what a client has in its hands: the kind and the size of its bytes.

The unit is the patch of a vision tower (14 x 14 pixels), or 20 ms of sound, which cost about the same. The guess only
decides who gets the item, so it needs to be right within a factor of two or three on the average, and must cost
nothing: no file is opened.

========  ============================================================================================================
image     4 pixels a byte (a JPEG photograph takes about two bits a pixel), 196 pixels a patch, between the options'
          ``min_pixels`` and ``max_pixels``
frames    the sum of the frames as images, halved: video towers take two frames at once
video     220 bytes a patch (two megabits a second, two sampled frames of 640 x 360 a second), at most ``total_pixels``
sound     320 bytes a patch (128 kilobits a second), or what ``start_seconds`` and ``end_seconds`` say
elsewhere an address, an upload: the cost of a photograph of a megapixel
========  ============================================================================================================
"""

from __future__ import annotations

from epd.encoder.v1.media_pb2 import ImageOptions, MediaItem, Modality

PIXELS_OF_PATCH = 14 * 14
PIXELS_OF_BYTE = 4
VIDEO_BYTES_OF_PATCH = 220
SOUND_BYTES_OF_PATCH = 320
PATCHES_OF_SECOND = 50
UNKNOWN = 1_000_000 / PIXELS_OF_PATCH
LEAST, MOST = 16.0, 65_536.0
HELD = 1.0
"""Of an item that is given by its content key: nothing is computed."""


def estimated_cost(item: MediaItem) -> float:
    """The estimated cost of an item, in patches; between 1 and 65,536."""
    match item.WhichOneof("source"):
        case "content_key":
            return HELD
        case "frames":
            cost = sum(_image(len(frame), ImageOptions()) for frame in item.frames.frames) / 2
        case "data" if item.modality == Modality.MODALITY_VIDEO:
            cost = _video(item)
        case "data" if item.modality == Modality.MODALITY_AUDIO:
            cost = _sound(item)
        case "data":
            cost = _image(len(item.data), item.image)
        case _:
            cost = UNKNOWN
    return min(max(cost, LEAST), MOST)


def _image(nbytes: int, options: ImageOptions) -> float:
    pixels = max(nbytes * PIXELS_OF_BYTE, options.min_pixels)
    return min(pixels, options.max_pixels or pixels) / PIXELS_OF_PATCH


def _video(item: MediaItem) -> float:
    cost = len(item.data) / VIDEO_BYTES_OF_PATCH
    return min(cost, item.video.total_pixels / PIXELS_OF_PATCH / 2 if item.video.total_pixels else cost)


def _sound(item: MediaItem) -> float:
    cost = len(item.data) / SOUND_BYTES_OF_PATCH
    if item.audio.end_seconds > item.audio.start_seconds:
        cost = min(cost, (item.audio.end_seconds - item.audio.start_seconds) * PATCHES_OF_SECOND)
    return cost
