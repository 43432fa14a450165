"""Images as families take them whose processors need torchvision, or repeat every patch: resized and cut by us.

Resizing is torch's, which is torchvision's (:func:`~encoder_svc.models.image_patches.resize`); sizes follow the rules
of transformers' processors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.image_patches import (
    BICUBIC,
    MAX_ASPECT_RATIO,
    ImagePreprocessing,
    cut_patches,
    pixel_bounds,
    read_image_preprocessing,
    resize,
)
from encoder_svc.models.image_preprocessing import Normalisation
from encoder_svc.models.image_rows import Inputs
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
        self.normalisation = _normalisation(constants)
        self.constants = {"rule": "glm", **constants.model_dump()}

    def __call__(self, pixels: torch.Tensor, options: ImageOptions) -> Inputs:
        """See :meth:`~encoder_svc.models.image_preprocessing.ImageInputs.__call__`."""
        constants = self._constants
        frames = constants.temporal_patch_size
        of_all_frames = ImageOptions(
            min_pixels=options.min_pixels * frames, max_pixels=options.max_pixels * frames, detail=options.detail
        )
        least, greatest = pixel_bounds(constants, of_all_frames)
        height, width = fit_frames(pixels.shape[0], pixels.shape[1], frames, constants.factor, least, greatest)
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


def fit_frames(height: int, width: int, frames: int, factor: int, least: int, greatest: int) -> tuple[int, int]:
    """The size that an image is resized to, whose pixels count once for each frame of a patch.

    The rule is that of ``smart_resize`` in transformers' ``image_processing_glm4v``: an image smaller than a merge
    block is enlarged to one first.

    Args:
        height: pixels.
        width: pixels.
        frames: of a patch.
        factor: the side of a merge block in pixels.
        least: pixels of all frames.
        greatest: pixels of all frames.

    Returns:
        Height and width in pixels, whole merge blocks.

    Raises:
        ServiceError: the longer side is more than :data:`MAX_ASPECT_RATIO` shorter ones.
    """
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ServiceError(
            Reason.MEDIA_UNSUPPORTED,
            f"the image's longer side is more than {MAX_ASPECT_RATIO} times the shorter one, which this model does not "
            "take: crop it",
        )
    rows, columns = round(height / factor), round(width / factor)
    if frames * rows * columns * factor**2 > greatest:
        shrink = math.sqrt(frames * height * width / greatest)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif frames * rows * columns * factor**2 < least:
        grow = math.sqrt(least / (frames * height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


class KimiPreprocessing(BaseModel):
    """The constants of Kimi K2.5's image processor. Defaults are those of transformers 5.24."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    patch_size: int = Field(default=14, ge=1)
    merge_size: int = Field(default=2, ge=1)
    max_patches: int = Field(default=16384, ge=1)
    """Patches of an image, about."""
    max_side: int = Field(default=512, ge=1)
    """Patches of a side."""
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.5, 0.5, 0.5)
    rescale_factor: float = Field(default=1 / 255, gt=0)
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    resample: int = BICUBIC


class KimiInputs:
    """Kimi K2.5: never enlarged, padded with black to whole merge blocks, patches row by row.

    Args:
        constants: the checkpoint's.
    """

    def __init__(self, constants: KimiPreprocessing) -> None:
        self._constants = constants
        self.normalisation = _normalisation(constants)
        self.constants = {"rule": "kimi", **constants.model_dump()}

    def __call__(self, pixels: torch.Tensor, options: ImageOptions) -> Inputs:
        """See :meth:`~encoder_svc.models.image_preprocessing.ImageInputs.__call__`."""
        constants = self._constants
        patch, factor = constants.patch_size, constants.patch_size * constants.merge_size
        limit = patch_limit(constants.max_patches, patch, options)
        height, width = shrink_to_patches(pixels.shape[0], pixels.shape[1], patch, limit, constants.max_side)
        rows, columns = (-(-side // factor) * constants.merge_size for side in (height, width))
        canvas = torch.zeros(3, rows * patch, columns * patch, dtype=torch.uint8)
        canvas[:, :height, :width] = resize(pixels, height, width)
        cut = canvas.view(3, rows, patch, columns, patch).permute(1, 3, 0, 2, 4)
        return {
            "pixel_values": cut.reshape(rows * columns, 3, patch, patch),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }


def make_kimi_inputs(checkpoint: Checkpoint, family: ImageFamily, config: Any) -> KimiInputs:
    """From a checkpoint.

    Raises:
        SetupError: its settings are wrong.
    """
    values = {name: value for name, value in checkpoint.preprocessor.items() if value is not None}
    size = values.pop("size", None)
    if isinstance(size, dict) and size.get("max_height") is not None:
        values["max_side"] = size["max_height"]
        if size.get("max_width") != size["max_height"]:
            raise SetupError("preprocessor_config.json: size.max_height and size.max_width differ")
    try:
        constants = KimiPreprocessing.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        raise SetupError(
            f"preprocessor_config.json: {'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
        ) from None
    if not constants.do_resize or constants.resample != BICUBIC:
        raise SetupError(
            "preprocessor_config.json asks for do_resize false or another filter than bicubic (resample 3), which this "
            "family's preprocessing does not do"
        )
    return KimiInputs(constants)


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


def _normalisation(constants: Any) -> Normalisation:
    return Normalisation.read(constants)
