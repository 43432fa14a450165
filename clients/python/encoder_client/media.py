"""Media items, from bytes or files.

>>> items = [image(Path("cat.jpg"), max_pixels=512 * 512), image(jpeg_bytes)]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from epd.encoder.v1.encoder_service_pb2 import EncodeRequest
from epd.encoder.v1.media_pb2 import (
    AudioOptions,
    FrameSequence,
    ImageDetail,
    ImageOptions,
    MediaItem,
    Modality,
    VideoOptions,
)

Source = bytes | Path | str
"""The bytes of a media file, the path of one, or a URI that the server reads (``data:``, ``https:`` or ``file:``)."""


def image(
    source: Source,
    *,
    min_pixels: int = 0,
    max_pixels: int = 0,
    detail: ImageDetail = ImageDetail.IMAGE_DETAIL_UNSPECIFIED,
    part_idx: int | None = None,
) -> MediaItem:
    """A still image.

    Args:
        source: a JPEG, PNG, WebP, ... file.
        min_pixels: the least number of pixels after resizing; 0 is the model's default.
        max_pixels: the greatest number of pixels after resizing; 0 is the model's default.
        detail: for families that know levels of detail.
        part_idx: the item's place in the prompt; None: its place in the call's list.
    """
    item = _item(Modality.MODALITY_IMAGE, source, part_idx)
    if min_pixels or max_pixels or detail:
        item.image.CopyFrom(ImageOptions(min_pixels=min_pixels, max_pixels=max_pixels, detail=detail))
    return item


def video(
    source: Source | Sequence[bytes],
    *,
    options: VideoOptions | None = None,
    frames_per_second: float = 0.0,
    part_idx: int | None = None,
) -> MediaItem:
    """A video.

    Args:
        source: a video file, or its frames, each an encoded image.
        options: how to sample it; None is the model's default.
        frames_per_second: only with frames: at which they were taken.
        part_idx: the item's place in the prompt; None: its place in the call's list.
    """
    if isinstance(source, bytes | Path | str):
        item = _item(Modality.MODALITY_VIDEO, source, part_idx)
    else:
        item = _item(Modality.MODALITY_VIDEO, b"", part_idx)
        item.frames.CopyFrom(FrameSequence(frames=source, fps=frames_per_second))
    if options is not None:
        item.video.CopyFrom(options)
    return item


def audio(source: Source, *, options: AudioOptions | None = None, part_idx: int | None = None) -> MediaItem:
    """A sound track.

    Args:
        source: a sound file.
        options: which part of it; None is all.
        part_idx: the item's place in the prompt; None: its place in the call's list.
    """
    item = _item(Modality.MODALITY_AUDIO, source, part_idx)
    if options is not None:
        item.audio.CopyFrom(options)
    return item


UNPLACED = 2**32 - 1
"""The ``part_idx`` of an item that takes its place from the list that it is sent in."""


def _item(modality: Modality, source: Source, part_idx: int | None) -> MediaItem:
    item = MediaItem(modality=modality, part_idx=UNPLACED if part_idx is None else part_idx)
    if isinstance(source, str):
        item.uri = source
    else:
        item.data = source.read_bytes() if isinstance(source, Path) else source
    return item


def add_placed(request: EncodeRequest, items: Sequence[MediaItem]) -> None:
    """Adds items to a request with their places filled in: those that have none take their index in the list."""
    for index, item in enumerate(items):
        # Copied once, into its place: an item may hold megabytes.
        placed = request.items.add()
        placed.CopyFrom(item)
        if placed.part_idx == UNPLACED:
            placed.part_idx = index


def placed_items(items: Sequence[MediaItem], num_parts: int) -> dict[int, MediaItem]:
    """Items by their ``part_idx``; those that have none take their index in the list, in a copy.

    Args:
        items: of one call.
        num_parts: the items of the whole prompt. 0: as many as ``items``.

    Raises:
        ValueError: there are none, or two have one place, or a place is not below ``num_parts``.
    """
    placed: dict[int, MediaItem] = {}
    for index, item in enumerate(items):
        copy = item
        if item.part_idx == UNPLACED:
            copy = MediaItem()
            copy.CopyFrom(item)
            copy.part_idx = index
        placed[copy.part_idx] = copy
    count = num_parts or len(items)
    if not items or len(placed) != len(items) or max(placed) >= count:
        raise ValueError(
            f"a call needs items, each with a part_idx of its own below {count}; there are {len(items)} items, with "
            f"part_idx {sorted(placed)}"
        )
    return placed
