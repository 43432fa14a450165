"""Images as the Qwen-VL families take them: resized to whole merge blocks and cut into patches, still uint8.

Equal, bit for bit, to what transformers' torchvision-backed ``Qwen2VLImageProcessor`` computes before it normalises.
Normalisation is not done here: it is folded into the tower's first layer (:mod:`~encoder_svc.models.patch_embedding`),
so an item's input is one byte per value instead of eight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from encoder_svc.errors import Reason, ServiceError, SetupError
from epd.encoder.v1.media_pb2 import ImageDetail, ImageOptions

MAX_ASPECT_RATIO = 200
"""A longer side of more than so many shorter sides is refused, as transformers does."""

MAX_RESIZED_PIXELS = 1 << 30
"""More pixels than this cannot be asked for, whatever the arenas' sizes: grids must fit their fields."""

BICUBIC = 3
"""``PIL.Image.Resampling.BICUBIC``, as preprocessor configs name it."""


CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


class PixelSettings(BaseModel):
    """How a processor resizes and normalises. Defaults are those of transformers 5.24."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    image_mean: tuple[float, float, float] = CLIP_MEAN
    """Of each channel, on the scale after rescaling."""
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = CLIP_STD
    rescale_factor: float = Field(default=1 / 255, gt=0)
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    resample: int = BICUBIC


class ImagePreprocessing(PixelSettings):
    """The constants of a checkpoint's image processor. Defaults are those of transformers 5.24."""

    min_pixels: int = Field(default=56 * 56, ge=1)
    """The least number of pixels after resizing."""
    max_pixels: int = Field(default=28 * 28 * 1280, ge=1)
    """The greatest number of pixels after resizing."""
    patch_size: int = Field(default=14, ge=1)
    """The side of a patch in pixels."""
    merge_size: int = Field(default=2, ge=1)
    """The side of a merge block in patches: a block becomes one row."""
    temporal_patch_size: int = Field(default=2, ge=1)
    """Frames in a patch. A still image is repeated so many times."""

    @property
    def factor(self) -> int:
        """The side of a merge block in pixels."""
        return self.patch_size * self.merge_size

    @property
    def scale_and_shift(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Normalisation per channel as ``scale · value + shift`` on values from 0 to 255."""
        rescale = self.rescale_factor if self.do_rescale else 1.0
        if not self.do_normalize:
            return (rescale,) * 3, (0.0,) * 3
        scale = tuple(rescale / deviation for deviation in self.image_std)
        shift = tuple(-mean / deviation for mean, deviation in zip(self.image_mean, self.image_std, strict=True))
        return scale, shift


Constants = TypeVar("Constants", bound=ImagePreprocessing)
Settings = TypeVar("Settings", bound=PixelSettings)


def read_image_preprocessing(preprocessor: dict[str, Any]) -> ImagePreprocessing:
    """The constants in a ``preprocessor_config.json``.

    Raises:
        SetupError: a value is wrong, or asks for something else than resizing bicubically.
    """
    return read_preprocessing(ImagePreprocessing, preprocessor, "preprocessor_config.json")


def read_preprocessing(model: type[Constants], preprocessor: dict[str, Any], file: str) -> Constants:
    """The constants of a processor that resizes to bounds of pixels.

    ``min_pixels`` and ``max_pixels`` come before ``size.shortest_edge`` and ``size.longest_edge``, as in transformers.

    Args:
        model: which constants there are, and their defaults.
        preprocessor: the settings.
        file: where they are from, for messages.

    Raises:
        SetupError: a value is wrong, or asks for something else than resizing bicubically.
    """
    values = {name: value for name, value in preprocessor.items() if value is not None}
    size = preprocessor.get("size")
    if isinstance(size, dict):
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if size.get(edge) is not None:
                values.setdefault(name, size[edge])
    constants = read_settings(model, values, file)
    if constants.min_pixels > constants.max_pixels:
        raise SetupError(f"{file}: min_pixels is greater than max_pixels")
    return constants


def read_settings(model: type[Settings], values: Mapping[str, Any], file: str) -> Settings:
    """The constants of a processor that resizes bicubically.

    Args:
        model: which constants there are, and their defaults.
        values: the settings.
        file: where they are from, for messages.

    Raises:
        SetupError: a value is wrong, or asks for something else than resizing bicubically.
    """
    try:
        constants = model.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        fault = error.errors()[0]
        raise SetupError(f"{file}: {'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}") from None
    if not constants.do_resize or constants.resample != BICUBIC:
        raise SetupError(
            f"{file} asks for do_resize false or another filter than bicubic (resample 3), which this "
            "family's preprocessing does not do"
        )
    return constants


def pixel_bounds(constants: ImagePreprocessing, options: ImageOptions) -> tuple[int, int]:
    """The least and greatest number of pixels after resizing, by the checkpoint and an item's options.

    Raises:
        ServiceError: the options contradict each other or ask for a level of detail.
    """
    if options.detail != ImageDetail.IMAGE_DETAIL_UNSPECIFIED:
        raise ServiceError(
            Reason.REQUEST_INVALID,
            "this model has no levels of detail; leave `detail` out and set `min_pixels` or `max_pixels`",
            field="options.detail",
        )
    least = options.min_pixels or constants.min_pixels
    greatest = options.max_pixels or constants.max_pixels
    return check_pixel_bounds(least, greatest, "min_pixels" if options.min_pixels else "max_pixels", constants)


def check_pixel_bounds(least: int, greatest: int, given: str, constants: ImagePreprocessing) -> tuple[int, int]:
    """Refuses bounds that no size meets, or that ask for sizes beyond reason.

    Args:
        least: pixels.
        greatest: pixels.
        given: the option to name.
        constants: the checkpoint's, for the message.

    Returns:
        Both, at most :data:`MAX_RESIZED_PIXELS`.

    Raises:
        ServiceError: ``least`` is greater than ``greatest``, or than any size may be.
    """
    if least > greatest:
        raise ServiceError(
            Reason.REQUEST_INVALID,
            f"min_pixels {least} is greater than max_pixels {greatest} (0 takes the model's default: "
            f"{constants.min_pixels} and {constants.max_pixels}); set both so that they fit",
            field=f"options.{given}",
        )
    if least > MAX_RESIZED_PIXELS:
        raise ServiceError(
            Reason.REQUEST_INVALID, f"min_pixels may be at most {MAX_RESIZED_PIXELS}", field="options.min_pixels"
        )
    return least, min(greatest, MAX_RESIZED_PIXELS)


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size that an image is resized to: both sides whole multiples of ``factor``, the aspect ratio nearly kept.

    The rule is transformers' ``smart_resize``. An extreme aspect ratio can exceed ``max_pixels``, since no side is less
    than ``factor``.

    Args:
        height: pixels, at least 1.
        width: pixels, at least 1.
        factor: the side of a merge block in pixels.
        min_pixels: the least number of pixels.
        max_pixels: the greatest number of pixels.

    Returns:
        Height and width in pixels.

    Raises:
        ServiceError: the longer side is more than :data:`MAX_ASPECT_RATIO` shorter ones.
    """
    check_aspect_ratio(height, width)
    rows, columns = round(height / factor), round(width / factor)
    pixels = rows * columns * factor**2
    if pixels > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor)
        columns = math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def check_aspect_ratio(height: int, width: int) -> None:
    """Refuses pictures that are too long.

    Raises:
        ServiceError: the longer side is more than :data:`MAX_ASPECT_RATIO` shorter ones.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ServiceError(
            Reason.MEDIA_UNSUPPORTED,
            f"the picture is {width}×{height} pixels; this model takes aspect ratios up to {MAX_ASPECT_RATIO}:1: crop "
            "it",
        )


def resize(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resizes bicubically with antialiasing, in integers, as torchvision does.

    Args:
        image: uint8, shape (rows, columns, channels).
        height: rows of the result.
        width: columns of the result.

    Returns:
        uint8, shape (channels, height, width); in memory the channels are innermost.
    """
    # A view with channels innermost: torch has a vector kernel for exactly this, and needs no copy.
    planes = image.permute(2, 0, 1)
    if planes.shape[1:] == (height, width):
        return planes
    return torch.nn.functional.interpolate(
        planes.unsqueeze(0), size=(height, width), mode="bicubic", align_corners=False, antialias=True
    ).squeeze(0)


def cut_patches(image: torch.Tensor, patch_size: int, merge_size: int, out: torch.Tensor) -> None:
    """Cuts a picture into patches in merge-block order: the patches of a block are neighbours.

    Args:
        image: uint8, shape (channels, height, width), both sides whole merge blocks.
        patch_size: pixels.
        merge_size: patches.
        out: takes the patches; uint8, shape (patches, channels, patch_size²), the last dimension contiguous.
    """
    channels, height, width = image.shape
    block_rows, block_columns = height // patch_size // merge_size, width // patch_size // merge_size
    blocks = image.reshape(channels, block_rows, merge_size, patch_size, block_columns, merge_size, patch_size)
    target = out.view(block_rows, block_columns, merge_size, merge_size, channels, patch_size, patch_size)
    target.copy_(blocks.permute(1, 4, 2, 5, 0, 3, 6))
