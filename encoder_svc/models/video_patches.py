"""Videos as the Qwen-VL families take them: frames of one size, cut into patches that hold some frames each, in uint8.

Equal, bit for bit, to what transformers' torchvision-backed ``Qwen2VLVideoProcessor`` and ``Qwen3VLVideoProcessor``
compute before they normalise, which the tower's first layer does here (:mod:`~encoder_svc.models.patch_embedding`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from pydantic import Field, PositiveFloat

from encoder_svc.models.frame_sampling import FrameSampling
from encoder_svc.models.image_patches import (
    HALF,
    Constants,
    ImagePreprocessing,
    check_aspect_ratio,
    check_pixel_bounds,
    cut_patches,
    read_preprocessing,
    resize,
    smart_resize,
)
from epd.encoder.v1.media_pb2 import VideoOptions

BUDGETED = 0.9
"""The share of ``max_video_tokens`` that ``Qwen2VLVideoProcessor`` gives to a video."""

FLOOR = 1.05
"""A frame's greatest size is at least so many times its least, whatever the budget."""


class VideoPreprocessing(ImagePreprocessing):
    """The constants of ``Qwen2VLVideoProcessor``: bounds are those of one frame."""

    min_pixels: int = Field(default=128 * 28 * 28, ge=1)
    max_pixels: int = Field(default=768 * 28 * 28, ge=1)
    do_sample_frames: bool = False
    fps: PositiveFloat | None = None
    num_frames: int | None = Field(default=None, ge=1)
    min_frames: int = Field(default=4, ge=1)
    max_frames: int = Field(default=768, ge=1)
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = Field(default=128_000, ge=1)

    @property
    def sampling(self) -> FrameSampling:
        """How frames are sampled, if they are."""
        return FrameSampling(self.fps, self.num_frames, self.min_frames, self.max_frames, self.temporal_patch_size)

    def frame_size(self, frames: int, height: int, width: int, options: VideoOptions) -> tuple[int, int]:
        """The height and width that frames are resized to, in pixels.

        Args:
            frames: that were sampled.
            height: of a frame, in pixels.
            width: of a frame, in pixels.
            options: the item's.

        Raises:
            ServiceError: the options contradict each other, or frames are too long.
        """
        least, greatest = options.min_pixels or self.min_pixels, options.max_pixels or self.max_pixels
        if self.cap_pixels_per_frame:
            budget = int(self.max_video_tokens * self.factor**2 * BUDGETED)
            greatest = max(min(greatest, budget * self.temporal_patch_size // frames), int(least * FLOOR))
        if options.total_pixels:
            greatest = min(greatest, options.total_pixels // frames)
        least, greatest = check_pixel_bounds(least, greatest, _given(options), self)
        return smart_resize(height, width, self.factor, least, greatest)


class WholeVideoPreprocessing(VideoPreprocessing):
    """The constants of ``Qwen3VLVideoProcessor``: bounds are those of all frames together."""

    min_pixels: int = Field(default=128 * 32 * 32, ge=1)
    max_pixels: int = Field(default=768 * 32 * 32, ge=1)
    patch_size: int = Field(default=16, ge=1)
    image_mean: tuple[float, float, float] = HALF
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = HALF
    do_sample_frames: bool = True
    fps: PositiveFloat | None = 2.0
    max_video_tokens: int = Field(default=768, ge=1)

    def frame_size(self, frames: int, height: int, width: int, options: VideoOptions) -> tuple[int, int]:
        """As of one frame, but a frame is bounded by its share, and one frame counts as a whole patch of them.

        ``min_pixels`` and ``max_pixels`` of the options are of one frame, as the contract says.
        """
        frames = max(frames, self.temporal_patch_size)
        least, greatest = self.min_pixels, self.max_pixels
        if self.cap_pixels_per_frame:
            share = min(self.max_video_tokens * self.factor**2, greatest // frames)
            greatest = max(share, int(least * FLOOR)) * frames
        least = options.min_pixels * frames or least
        greatest = options.max_pixels * frames or greatest
        if options.total_pixels:
            greatest = min(greatest, options.total_pixels)
        least, greatest = check_pixel_bounds(least, greatest, _given(options), self)
        return smart_resize_video(
            frames, height, width, self.temporal_patch_size, self.factor, min_pixels=least, max_pixels=greatest
        )


def read_video_preprocessing(model: type[Constants], preprocessor: dict[str, Any]) -> Constants:
    """The constants of a checkpoint's video processor.

    Raises:
        SetupError: a value is wrong, or asks for something else than resizing bicubically.
    """
    return read_preprocessing(model, preprocessor, "the video processor's settings")


def smart_resize_video(
    frames: int, height: int, width: int, temporal_factor: int, factor: int, *, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The size that frames are resized to, by bounds on the pixels of all.

    The rule is ``smart_resize`` of ``Qwen3VLVideoProcessor``.

    Args:
        frames: at least ``temporal_factor``.
        height: pixels, at least 1.
        width: pixels, at least 1.
        temporal_factor: frames of a patch.
        factor: the side of a merge block in pixels.
        min_pixels: the least number of pixels of all frames.
        max_pixels: the greatest number of pixels of all frames.

    Returns:
        Height and width in pixels.

    Raises:
        ServiceError: the longer side is more than 200 shorter ones.
    """
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    check_aspect_ratio(height, width)
    rows, columns = round(height / factor), round(width / factor)
    pixels = round(frames / temporal_factor) * temporal_factor * rows * columns * factor**2
    if pixels > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        rows = math.ceil(height * grow / factor)
        columns = math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def cut_video(
    frames: Iterable[torch.Tensor], count: int, height: int, width: int, constants: ImagePreprocessing
) -> torch.Tensor:
    """Resizes frames as they come and cuts them into patches; the last frame is repeated to fill the last patches.

    Args:
        frames: each uint8, shape (rows, columns, channels), all of one size.
        count: of the frames.
        height: of the resized frames, in pixels.
        width: of the resized frames, in pixels.
        constants: sizes of patches and merge blocks.

    Returns:
        uint8, shape (patches, channels · temporal_patch_size · patch_size²).
    """
    size, depth, channels = constants.patch_size, constants.temporal_patch_size, 3
    steps, in_frame = -(-count // depth), (height // size) * (width // size)
    patches = torch.empty((steps, in_frame, channels, depth, size * size), dtype=torch.uint8)
    for number, frame in enumerate(frames):
        cut_patches(
            resize(frame, height, width), size, constants.merge_size, patches[number // depth, :, :, number % depth]
        )
    for place in range(count, steps * depth):
        patches[-1, :, :, place % depth] = patches[-1, :, :, (count - 1) % depth]
    return patches.view(steps * in_frame, -1)


def _given(options: VideoOptions) -> str:
    """The option to name when bounds contradict each other."""
    names = ("min_pixels", "max_pixels", "total_pixels")
    return next((name for name in names if getattr(options, name)), "max_pixels")
