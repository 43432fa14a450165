"""From the prepared input of an image to its grid and its rows, one rule for each kind of family.

A rule takes the configuration as transformers reads it, and the tensors that the image processor gave, by their names.
It holds for the forward of transformers' own module: how many rows that makes of this input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from encoder_svc.errors import SetupError

Inputs = Mapping[str, torch.Tensor]
"""What an image processor gave for one image: ``pixel_values`` and what else the family's call takes."""
RowRule = Callable[[Any, Inputs], int]
GridRule = Callable[[Any, Inputs], tuple[int, ...]]


def tiles(config: Any, inputs: Inputs) -> tuple[int, ...]:
    """(tiles): images of one size that the image was cut into."""
    return (inputs["pixel_values"].shape[0],)


def patch_grid(config: Any, inputs: Inputs) -> tuple[int, ...]:
    """(h, w), in patches, of an image that is one tile."""
    height, width = inputs["pixel_values"].shape[-2:]
    return height // _side(_vision(config).patch_size), width // _side(_vision(config).patch_size)


def sized_grid(config: Any, inputs: Inputs) -> tuple[int, ...]:
    """(h, w), in patches, of an image whose size the processor told as ``image_sizes``."""
    height, width = inputs["image_sizes"][0].tolist()
    return height // _vision(config).patch_size, width // _vision(config).patch_size


def temporal_grid(config: Any, inputs: Inputs) -> tuple[int, ...]:
    """(t, h, w) as the processor told it; of a video all its pieces together, which are of one size."""
    _, height, width = inputs["image_grid_thw"][0].tolist()
    return int(inputs["image_grid_thw"][:, 0].sum()), height, width


def frame_grid(config: Any, inputs: Inputs) -> tuple[int, ...]:
    """(frames), each of which is cut into the same slices."""
    return (inputs["grids_videos"].shape[0],)


def constant_rows(field: str) -> RowRule:
    """So many rows for each tile as a field of the configuration says, such as ``image_seq_length``."""

    def rows(config: Any, inputs: Inputs) -> int:
        return int(getattr(config, field)) * inputs["pixel_values"].shape[0]

    return rows


def class_token_rows(config: Any, inputs: Inputs) -> int:
    """A row for each patch, and one for the class token that CLIP and DINOv2 have and SigLIP has not."""
    return math.prod(patch_grid(config, inputs)) + int(_has_class_token(_vision(config)))


def selected_rows(config: Any, inputs: Inputs) -> int:
    """As :func:`class_token_rows`, without the first row if ``vision_feature_select_strategy`` is ``default``."""
    return class_token_rows(config, inputs) - int(config.vision_feature_select_strategy == "default")


def merged_rows(config: Any, inputs: Inputs) -> int:
    """One row for each whole block of ``spatial_merge_size``² patches."""
    height, width = sized_grid(config, inputs)
    return (height // merge_size(config)) * (width // merge_size(config))


def merge_size(config: Any) -> int:
    """``spatial_merge_size``; 1 where there is no such field."""
    return int(getattr(config, "spatial_merge_size", 1))


def temporal_merged_rows(config: Any, inputs: Inputs) -> int:
    """t·h·w / merge²."""
    merge: int = config.vision_config.spatial_merge_size
    return math.prod(temporal_grid(config, inputs)) // merge**2


def temporal_mean_rows(config: Any, inputs: Inputs) -> int:
    """h·w / merge block of each image or chunk, whatever its t: the mean over time is taken."""
    _, height, width = temporal_grid(config, inputs)
    chunks = inputs["image_grid_thw"].shape[0]
    return chunks * (height * width // int(math.prod(config.vision_config.merge_kernel_size)))


def shuffled_rows(config: Any, inputs: Inputs) -> int:
    """For each tile (side in patches · ``downsample_ratio``)², the pixel shuffle of InternVL."""
    side = _side(config.vision_config.image_size) // _side(config.vision_config.patch_size)
    return inputs["pixel_values"].shape[0] * int(side * config.downsample_ratio) ** 2


def sliced_rows(config: Any, inputs: Inputs) -> int:
    """The patches of all slices by 16, or by 4 if ``downsample_mode`` is ``4x`` (MiniCPM-V)."""
    merges = config.merger_times + int(config.downsample_mode != "4x")
    return sum(math.prod(size) // 4**merges for size in inputs["target_sizes"].tolist())


def unpadded_rows(config: Any, inputs: Inputs) -> int:
    """Any resolution, as LLaVA-OneVision has it.

    A tile of the whole image, then the tiles of the image without their padding, shrunk to at most ``anyres_max_N``
    times the rows of a tile, with one more row, ``image_newline``, behind each line.
    """
    side = _side(config.vision_config.image_size) // _side(config.vision_config.patch_size)
    base = side * side
    if inputs["pixel_values"].shape[0] == 1:
        return base + 1
    image_height, image_width = inputs["image_sizes"][0].tolist()
    best_height, best_width = best_resolution(image_height, image_width, config.image_grid_pinpoints)
    edge = _side(config.vision_config.image_size)
    height, width = best_height // edge * side, best_width // edge * side
    if image_width / image_height > width / height:
        shown = int(round(image_height * (width / image_width), 7))
        height -= (height - shown) // 2 * 2
    else:
        shown = int(round(image_width * (height / image_height), 7))
        width -= (width - shown) // 2 * 2
    ratio = math.sqrt(height * width / (int(config.vision_aspect_ratio.removeprefix("anyres_max_")) * base))
    if ratio > 1.1:
        height, width = int(height // ratio), int(width // ratio)
    return base + height * (width + 1)


def pooled_rows(config: Any, inputs: Inputs) -> int:
    """LLaVA-OneVision's video: half as many rows and columns of each frame, and one ``image_newline`` at the end."""
    side = _side(config.vision_config.image_size) // _side(config.vision_config.patch_size)
    return inputs["pixel_values"].shape[0] * (-(-side // 2)) ** 2 + 1


def best_resolution(height: int, width: int, resolutions: list[list[int]]) -> tuple[int, int]:
    """Of several sizes (height, width) the one that shows most of an image; of equal ones that with the least waste."""
    best, most, least = (0, 0), 0, math.inf
    for candidate_height, candidate_width in resolutions:
        scale = min(candidate_width / width, candidate_height / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        wasted = candidate_height * candidate_width - shown
        if shown > most or (shown == most and wasted < least):
            best, most, least = (candidate_height, candidate_width), shown, wasted
    return best


def _vision(config: Any) -> Any:
    return getattr(config, "vision_config", config)


def _side(size: Any) -> int:
    return int(size if isinstance(size, int) else size[0])


_CLASS_TOKENS = {"clip_vision_model": True, "dinov2": True, "siglip_vision_model": False}


def _has_class_token(vision: Any) -> bool:
    try:
        return _CLASS_TOKENS[vision.model_type]
    except KeyError:
        raise SetupError(
            f"the vision tower {vision.model_type!r} of this checkpoint is not known; these are: "
            f"{', '.join(_CLASS_TOKENS)}"
        ) from None
