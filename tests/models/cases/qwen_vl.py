"""The Qwen-VL families: images and videos, the latter of an odd number of frames, of one, and as images."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from encoder_svc.models.image_patches import ImagePreprocessing
from encoder_svc.models.registry import FAMILIES, open_adapter
from epd.encoder.v1.media_pb2 import FrameSequence, ImageOptions, MediaItem, Modality, VideoOptions
from tests.media.videos import MP4, Clip, png
from tests.models.family_cases import FamilyCase, Medium, Prepared
from tests.photograph import photo

IMAGE, VIDEO = Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO


@cache
def media() -> tuple[Medium, ...]:
    return (
        Medium("an image", MediaItem(modality=IMAGE), (photo(97, 131),)),
        Medium(
            "a video of an odd number of frames",
            MediaItem(modality=VIDEO, video=VideoOptions(num_frames=14)),
            (Clip(frames=15, options=MP4.options).make(),),
        ),
        Medium("a large image", MediaItem(modality=IMAGE, image=ImageOptions(min_pixels=150_000)), (photo(300, 220),)),
        Medium("one frame", MediaItem(modality=VIDEO), (Clip(frames=1, height=60, width=200).make(),)),
        Medium(
            "frames as images",
            MediaItem(
                modality=VIDEO, frames=FrameSequence(fps=2.0), video=VideoOptions(min_pixels=3136, max_pixels=9000)
            ),
            tuple(png(number) for number in range(5)),
        ),
    )


def load(checkpoint: Path) -> Any:
    import transformers

    (architecture,) = FAMILIES[checkpoint.name].architectures
    return getattr(transformers, architecture).from_pretrained(checkpoint, dtype=torch.float32).eval()


def normalised(patches: torch.Tensor, constants: ImagePreprocessing) -> torch.Tensor:
    """The processor's output for uint8 patches: each value as it is normalised there, equal frames repeated."""
    area = constants.patch_size**2
    values = patches.view(len(patches), 3, -1, area).float()
    mean, deviation = (
        (torch.tensor(numbers) * (1.0 / constants.rescale_factor)).view(1, 3, 1, 1)
        for numbers in (constants.image_mean, constants.image_std)
    )
    return ((values - mean) / deviation).expand(-1, 3, constants.temporal_patch_size, area).reshape(len(patches), -1)


def features(model: Any, vision: Any, medium: Medium, prepared: Prepared) -> torch.Tensor:
    """Rows of transformers for what we prepared, with those of deepstack beside them."""
    still = medium.item.modality == IMAGE
    pixels = normalised(prepared.input.tensors[0], vision.image if still else vision.video)
    grid = torch.tensor([prepared.input.grid])
    found = (model.get_image_features if still else model.get_video_features)(pixels, grid)
    levels = getattr(found, "deepstack_features", None) or ()
    return torch.cat([found.pooler_output[0], *(level[0] for level in levels)], dim=1)


def reference(model: Any, checkpoint: Path, medium: Medium, prepared: Prepared) -> torch.Tensor:
    adapter: Any = open_adapter(checkpoint, "float32")
    return features(model, adapter.vision, medium, prepared)


CASES = tuple(
    FamilyCase(family, media, load, reference)
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
)
