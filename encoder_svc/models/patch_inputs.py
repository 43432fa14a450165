"""Images as families take them whose processors need torchvision, or repeat every patch: resized and cut by us.

Resizing is torch's, which is torchvision's (:func:`~encoder_svc.models.image_patches.resize`); sizes follow the rules
of transformers' processors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import Field, PositiveFloat

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.image_patches import (
    HALF,
    ImagePreprocessing,
    PixelSettings,
    cut_patches,
    pixel_bounds,
    read_image_preprocessing,
    read_settings,
    resize,
)
from encoder_svc.models.image_preprocessing import Normalisation
from encoder_svc.models.image_rows import Inputs
from encoder_svc.models.video_patches import smart_resize_video
from epd.encoder.v1.media_pb2 import ImageDetail, ImageOptions

if TYPE_CHECKING:
    from encoder_svc.models.image_families import ImageFamily

_GLM_PIXELS = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}
"""The bounds of pixels of transformers' GLM processors."""


class GlmInputs:
    """GLM-4V: patches in merge-block order, sizes bounded by the pixels of all frames of a patch.

    Args:
        constants: the checkpoint's.
    """

    def __init__(self, constants: ImagePreprocessing) -> None:
        self._constants = constants
        self.normalisation = Normalisation.read(constants, fused=True)
        self.constants = {"rule": "glm", **constants.model_dump()}

    def __call__(self, pixels: torch.Tensor, options: ImageOptions) -> Inputs:
        """See :meth:`~encoder_svc.models.image_preprocessing.ImageInputs.__call__`."""
        constants = self._constants
        frames = constants.temporal_patch_size
        of_all_frames = ImageOptions(
            min_pixels=options.min_pixels * frames, max_pixels=options.max_pixels * frames, detail=options.detail
        )
        least, greatest = pixel_bounds(constants, of_all_frames)
        height, width = smart_resize_video(
            frames,
            pixels.shape[0],
            pixels.shape[1],
            frames,
            constants.factor,
            min_pixels=least,
            max_pixels=greatest,
        )
        rows, columns = height // constants.patch_size, width // constants.patch_size
        patches = torch.empty(rows * columns, 3 * constants.patch_size**2, dtype=torch.uint8)
        cut_patches(resize(pixels, height, width), constants.patch_size, constants.merge_size, patches)
        return {
            "pixel_values": patches.view(rows * columns, 3, constants.patch_size**2),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }


def make_glm_inputs(checkpoint: Checkpoint, family: ImageFamily, config: Any) -> GlmInputs:
    """From a checkpoint.

    Raises:
        SetupError: its settings are wrong.
    """
    return GlmInputs(read_image_preprocessing({"size": _GLM_PIXELS, **checkpoint.preprocessor}))


class KimiPreprocessing(PixelSettings):
    """The constants of Kimi K2.5's image processor. Defaults are those of transformers 5.24."""

    patch_size: int = Field(default=14, ge=1)
    merge_size: int = Field(default=2, ge=1)
    max_patches: int = Field(default=16384, ge=1)
    """Patches of an image, about."""
    max_side: int = Field(default=512, ge=1)
    """Patches of a side."""
    image_mean: tuple[float, float, float] = HALF
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = HALF

    def fit(self, height: int, width: int, limit: int) -> tuple[int, int, int, int]:
        """The size that a picture is resized to, and that of its grid with the padding.

        Args:
            height: pixels.
            width: pixels.
            limit: patches, about.

        Returns:
            Height and width in pixels; rows and columns of patches, whole merge blocks.
        """
        height, width = shrink_to_patches(height, width, self.patch_size, limit, self.max_side)
        block = self.patch_size * self.merge_size
        rows, columns = (-(-side // block) * self.merge_size for side in (height, width))
        return height, width, rows, columns


Kimi = TypeVar("Kimi", bound=KimiPreprocessing)


class KimiInputs:
    """Kimi K2.5: never enlarged, padded with black to whole merge blocks, patches row by row.

    Args:
        constants: the checkpoint's.
    """

    def __init__(self, constants: KimiPreprocessing) -> None:
        self._constants = constants
        self.normalisation = Normalisation.read(constants, fused=True)
        self.constants = {"rule": "kimi", **constants.model_dump()}

    def __call__(self, pixels: torch.Tensor, options: ImageOptions) -> Inputs:
        """See :meth:`~encoder_svc.models.image_preprocessing.ImageInputs.__call__`."""
        constants = self._constants
        side = constants.patch_size
        limit = patch_limit(constants.max_patches, side, options)
        height, width, rows, columns = constants.fit(pixels.shape[0], pixels.shape[1], limit)
        patches = torch.empty(rows, columns, 3, side, side, dtype=torch.uint8)
        cut_rows(pixels, height, width, patches)
        return {"pixel_values": patches.flatten(0, 1), "image_grid_thw": torch.tensor([[1, rows, columns]])}


def make_kimi_inputs(checkpoint: Checkpoint, family: ImageFamily, config: Any) -> KimiInputs:
    """From a checkpoint.

    Raises:
        SetupError: its settings are wrong.
    """
    return KimiInputs(read_kimi(KimiPreprocessing, checkpoint.preprocessor, "preprocessor_config.json"))


def read_kimi(model: type[Kimi], settings: Mapping[str, Any], file: str) -> Kimi:
    """The constants of a processor of Kimi K2.5.

    Args:
        model: which constants there are, and their defaults.
        settings: the processor's.
        file: where they are from, for messages.

    Raises:
        SetupError: a value is wrong, or asks for something that is not done here.
    """
    values = dict(settings)
    size = values.pop("size", None)
    if isinstance(size, dict) and size.get("max_height") is not None:
        values["max_side"] = size["max_height"]
        if size.get("max_width") != size["max_height"]:
            raise SetupError(f"{file}: size.max_height and size.max_width differ")
    return read_settings(model, values, file)


def cut_rows(pixels: torch.Tensor, height: int, width: int, out: torch.Tensor) -> None:
    """Resizes a picture, pads it with black below and to the right, and cuts it into patches row by row.

    Args:
        pixels: uint8, shape (rows, columns, channels).
        height: to resize to, in pixels.
        width: to resize to, in pixels.
        out: takes the patches; uint8, shape (rows, columns, channels, side, side).
    """
    rows, columns, channels, side, _ = out.shape
    canvas = torch.zeros(channels, rows * side, columns * side, dtype=torch.uint8)
    canvas[:, :height, :width] = resize(pixels, height, width)
    out.copy_(canvas.view(channels, rows, side, columns, side).permute(1, 3, 0, 2, 4))


def shrink_to_patches(height: int, width: int, patch: int, max_patches: int, max_side: int) -> tuple[int, int]:
    """The size that an image is resized to before it is padded, as ``navit_resize`` of transformers has it.

    Args:
        height: pixels.
        width: pixels.
        patch: the side of a patch in pixels.
        max_patches: of the image, about: padding can add some.
        max_side: patches of one side.

    Returns:
        Height and width in pixels.
    """
    patches = max(1, height // patch) * max(1, width // patch)
    edge = max_side * patch
    scale = min(1.0, math.sqrt(max_patches / patches), edge / height, edge / width)
    return min(max(1, int(height * scale)), edge), min(max(1, int(width * scale)), edge)


def patch_limit(most: int, patch_size: int, options: ImageOptions) -> int:
    """The greatest number of patches, by the checkpoint and an item's options, of a family that never enlarges.

    Args:
        most: of the checkpoint.
        patch_size: pixels.
        options: of the item.

    Raises:
        ServiceError: an option asks for enlarging or for a level of detail.
    """
    for name, refused in (
        ("detail", options.detail != ImageDetail.IMAGE_DETAIL_UNSPECIFIED),
        ("min_pixels", options.min_pixels != 0),
    ):
        if refused:
            raise ServiceError(
                Reason.REQUEST_INVALID,
                f"this model never enlarges an image and has no levels of detail; leave `{name}` out",
                field=f"options.{name}",
            )
    return max(1, min(most, options.max_pixels // patch_size**2)) if options.max_pixels else most
