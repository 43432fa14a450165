"""How transformers' families that see differ, as data: a row for each, read by one adapter and one tower.

A family that cuts images into tiles of one size, calls ``get_image_features(pixel_values)`` and gets the rows of each
tile needs a row here and one in :mod:`~encoder_svc.models.registry`, and no code (docs/models.md has an example).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.image_preprocessing import ImageInputs, LibraryInputs
from encoder_svc.models.image_rows import (
    GridRule,
    RowRule,
    class_token_rows,
    constant_rows,
    frame_grid,
    merge_size,
    merged_rows,
    patch_grid,
    pooled_rows,
    selected_rows,
    shuffled_rows,
    sized_grid,
    sliced_rows,
    temporal_grid,
    temporal_mean_rows,
    temporal_merged_rows,
    tiles,
    unpadded_rows,
)
from encoder_svc.models.minicpm_videos import MiniCPMVideos
from encoder_svc.models.patch_inputs import make_glm_inputs, make_kimi_inputs
from encoder_svc.models.video_inputs import GlmVideos, KimiVideos, SquareVideos, VideoInputs


class Joining(Enum):
    """How the pixels of several images become one input of the tower."""

    TILES = auto()
    """Shape (tiles, 3, ...): one after another. Images whose tiles differ in shape go into calls of their own."""
    PADDED = auto()
    """Shape (1, 3, height, width): beside each other, with zeros below and to the right of the smaller ones, whose
    sizes the call is told."""
    STRIP = auto()
    """Shape (1, 3, patch, patches · patch): one after another along the last dimension."""


def _text_width(config: Any) -> int:
    return int(config.text_config.hidden_size)


def _nothing(config: Any) -> Mapping[str, Any]:
    return {}


def _one(config: Any) -> int:
    return 1


@dataclass(frozen=True)
class VideoFamily:
    """What a family does with videos."""

    inputs: Callable[[Checkpoint, ImageFamily, Any], VideoInputs]
    """Makes, of the checkpoint, its family and the configuration, what turns videos into the tower's input."""
    placeholder: tuple[str, ...] = ()
    """Which of the inputs the language side needs too."""
    rows: RowRule | None = None
    """How many rows a video becomes. None: as an image of these inputs."""
    grid: GridRule | None = None
    """``grid_dim`` of a video. None: as of an image."""
    apart: bool = False
    """They have a call of their own, ``get_video_features(pixel_values_videos)``, which takes videos of one shape.
    Otherwise they go through the call of images, together with these."""


@dataclass(frozen=True)
class ImageFamily:
    """One family."""

    model: str
    """Transformers' base class, such as ``LlavaModel``."""
    rows: RowRule
    """How many rows an image becomes."""
    grid: GridRule = tiles
    """``grid_dim`` of an image."""
    width: Callable[[Any], int] = _text_width
    """The length of a row."""
    inputs: Callable[[Checkpoint, ImageFamily, Any], ImageInputs] = LibraryInputs
    """Makes, of the checkpoint, this and the configuration, what turns pixels into the tower's input."""
    processor: str = ""
    """Transformers' image processor, where ``image_processor_type`` of the checkpoint names none."""
    processing: Callable[[Any], Mapping[str, Any]] = _nothing
    """Arguments of the image processor that the family's processor of images and text sets, by the configuration."""
    low_detail: Mapping[str, Any] | None = None
    """Further arguments for IMAGE_DETAIL_LOW."""
    high_detail: Mapping[str, Any] | None = None
    """Further arguments for IMAGE_DETAIL_HIGH. If both are None there are no levels of detail."""
    low_is_one_of_several: bool = False
    """IMAGE_DETAIL_LOW makes of an image the one tile that it is where a prompt has several, which processor and model
    decide by the number of images: both are told of two."""
    method: str = "get_image_features"
    """What is called; ``forward`` for a model that is a tower and nothing else."""
    arguments: tuple[str, ...] = ()
    """What the call takes beside ``pixel_values``: names of what the image processor gives, int64. The first has a line
    for each element of the call's result. If there are none, a tile is an element."""
    placeholder: tuple[str, ...] = ()
    """Which of these, or of what else the processor gives, the language side needs too."""
    settings: tuple[str, ...] = ()
    """Switches of the image processor that are told as if they were given, for :attr:`placeholder`."""
    joining: Joining = Joining.TILES
    items_a_call: int | None = None
    """Images of one call at most. None: as many as the batch has."""
    frames: Callable[[Any], int] = _one
    """How often a patch is repeated to fill its frames: the first layer takes patches as flat rows if there are any."""
    pooled_width: Callable[[Any], int] | None = None
    """The length of the image's one vector, a second matrix beside the rows of its tokens. None: there is none."""
    absent: tuple[str, ...] = ("language_model",)
    """Members of the model that are no part of its towers."""
    videos: VideoFamily | None = None
    """None: no videos."""


def _vision_width(config: Any) -> int:
    return int(config.vision_config.hidden_size)


def _own_width(config: Any) -> int:
    return int(config.hidden_size)


def _glm(model: str, *, by_duration: bool = False) -> ImageFamily:
    return ImageFamily(
        model,
        temporal_merged_rows,
        temporal_grid,
        width=lambda config: int(config.vision_config.out_hidden_size),
        inputs=make_glm_inputs,
        arguments=("image_grid_thw",),
        placeholder=("image_grid_thw",),
        frames=lambda config: int(config.vision_config.temporal_patch_size),
        videos=VideoFamily(
            lambda checkpoint, _, config: GlmVideos(checkpoint, config, by_duration=by_duration), ("video_grid_thw",)
        ),
    )


def _pixtral(model: str) -> ImageFamily:
    return ImageFamily(
        model,
        merged_rows,
        sized_grid,
        processor="PixtralImageProcessor",
        processing=lambda config: {"patch_size": config.vision_config.patch_size * merge_size(config)},
        arguments=("image_sizes",),
        placeholder=("image_sizes",),
        joining=Joining.PADDED,
        # The tower attends over all images of a call with one dense mask.
        items_a_call=2,
    )


DESCRIPTIONS: dict[tuple[str, str], ImageFamily] = {
    ("llava", ""): ImageFamily("LlavaModel", selected_rows, patch_grid, processor="LlavaImageProcessor"),
    ("llava", "pixtral"): _pixtral("LlavaModel"),
    ("llava_onevision", ""): ImageFamily(
        "LlavaOnevisionModel",
        unpadded_rows,
        processor="LlavaOnevisionImageProcessor",
        low_is_one_of_several=True,
        arguments=("image_sizes",),
        placeholder=("image_sizes",),
        videos=VideoFamily(
            lambda checkpoint, *_: SquareVideos(checkpoint, shifted=False), rows=pooled_rows, apart=True
        ),
    ),
    ("internvl", ""): ImageFamily(
        "InternVLModel",
        shuffled_rows,
        processor="GotOcr2ImageProcessor",
        processing=lambda config: {"crop_to_patches": True},
        low_detail={"crop_to_patches": False},
        placeholder=("num_patches",),
        videos=VideoFamily(lambda checkpoint, *_: SquareVideos(checkpoint, shifted=True)),
    ),
    ("gemma3", ""): ImageFamily(
        "Gemma3Model",
        constant_rows("mm_tokens_per_image"),
        processor="Gemma3ImageProcessor",
        processing=lambda config: {
            "do_pan_and_scan": False,
            "pan_and_scan_min_crop_size": 256,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
        high_detail={"do_pan_and_scan": True},
    ),
    ("mistral3", ""): _pixtral("Mistral3Model"),
    ("glm4v", ""): _glm("Glm4vModel"),
    ("glm4v_moe", ""): _glm("Glm4vMoeModel"),
    ("glm46v", ""): _glm("Glm46VModel", by_duration=True),
    ("minicpmv4_6", ""): ImageFamily(
        "MiniCPMV4_6Model",
        sliced_rows,
        processor="MiniCPMV4_6ImageProcessor",
        processing=lambda config: {"downsample_mode": config.downsample_mode},
        low_detail={"slice_mode": False},
        arguments=("target_sizes",),
        placeholder=("target_sizes", "grids", "use_image_id"),
        settings=("use_image_id",),
        joining=Joining.STRIP,
        videos=VideoFamily(
            lambda checkpoint, _, config: MiniCPMVideos(checkpoint, config.downsample_mode),
            ("target_sizes_videos", "grids_videos", "use_image_id"),
            grid=frame_grid,
        ),
    ),
    ("kimi_k25", ""): ImageFamily(
        "Kimi_K25Model",
        temporal_mean_rows,
        temporal_grid,
        inputs=make_kimi_inputs,
        arguments=("image_grid_thw",),
        placeholder=("image_grid_thw",),
        videos=VideoFamily(KimiVideos, ("video_grid_thw",)),
    ),
    ("siglip", ""): ImageFamily(
        "SiglipModel",
        class_token_rows,
        patch_grid,
        _vision_width,
        processor="SiglipImageProcessor",
        pooled_width=_vision_width,
        absent=("text_model", "logit_scale", "logit_bias"),
    ),
    ("clip", ""): ImageFamily(
        "CLIPModel",
        class_token_rows,
        patch_grid,
        _vision_width,
        processor="CLIPImageProcessor",
        pooled_width=lambda config: int(config.projection_dim),
        absent=("text_model", "text_projection", "logit_scale"),
    ),
    ("dinov2", ""): ImageFamily(
        "Dinov2Model",
        class_token_rows,
        patch_grid,
        _own_width,
        processor="BitImageProcessor",
        method="forward",
        pooled_width=_own_width,
        absent=(),
    ),
}
"""By ``model_type``, and ``model_type`` of the vision tower where families of one name differ in it."""


def describe(model_type: str, tower_type: str) -> ImageFamily:
    """The row of a checkpoint.

    Args:
        model_type: of the family.
        tower_type: ``model_type`` of the config's ``vision_config``; empty if it names none.

    Raises:
        KeyError: there is none.
    """
    return DESCRIPTIONS.get((model_type, tower_type)) or DESCRIPTIONS[model_type, ""]
