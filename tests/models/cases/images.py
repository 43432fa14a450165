"""The families that see through a tower of transformers: images, and videos where they take them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from encoder_svc.models.registry import FAMILIES, open_adapter
from epd.encoder.v1.media_pb2 import (
    IMAGE_DETAIL_HIGH,
    IMAGE_DETAIL_LOW,
    FrameSequence,
    ImageOptions,
    MediaItem,
    Modality,
    VideoOptions,
)
from tests.media.videos import Clip, png
from tests.models.family_cases import FamilyCase, Medium, Prepared
from tests.models.whole_kimi_vl import load_whole_kimi_vl
from tests.photograph import photo

IMAGE = Modality.MODALITY_IMAGE
DETAILS: dict[tuple[str, int], dict[str, bool]] = {
    ("internvl", IMAGE_DETAIL_LOW): {"crop_to_patches": False},
    ("minicpmv4_6", IMAGE_DETAIL_LOW): {"slice_mode": False},
    ("gemma3", IMAGE_DETAIL_HIGH): {"do_pan_and_scan": True},
}
"""Arguments of image processors, by family and level of detail."""


@cache
def media() -> tuple[Medium, ...]:
    """Wide, high, tiny and just fitting: other tilings, paddings and groups of a batch."""
    return tuple(
        Medium(f"{height}x{width}", MediaItem(modality=IMAGE), (photo(width, height),))
        for height, width in ((97, 131), (300, 220), (1, 1), (20, 400), (260, 390))
    )


@cache
def detailed_media() -> tuple[Medium, ...]:
    """The same, and one with few and with many details."""
    return (
        *media(),
        *(
            Medium(name, MediaItem(modality=IMAGE, image=ImageOptions(detail=detail)), (photo(800, 300),))
            for name, detail in (("low detail", IMAGE_DETAIL_LOW), ("high detail", IMAGE_DETAIL_HIGH))
        ),
    )


VIDEO = Modality.MODALITY_VIDEO


def videos(*options: VideoOptions) -> tuple[Medium, ...]:
    """Of an odd number of frames, of one, and as images; with each of some options."""
    clip = Clip(frames=11, rate=Fraction(3), height=60, width=90)
    return (
        Medium("a video", MediaItem(modality=VIDEO), (clip.make(),)),
        Medium("one frame", MediaItem(modality=VIDEO), (replace(clip, frames=1, width=250).make(),)),
        Medium(
            "frames as images",
            MediaItem(modality=VIDEO, frames=FrameSequence(fps=2.0)),
            tuple(png(number) for number in range(5)),
        ),
        *(Medium(str(chosen), MediaItem(modality=VIDEO, video=chosen), (clip.make(),)) for chosen in options),
    )


def load(checkpoint: Path) -> Any:
    import transformers

    (architecture,) = FAMILIES[checkpoint.name].architectures
    return getattr(transformers, architecture).from_pretrained(checkpoint, dtype=torch.float32).eval()


def processed(checkpoint: Path, medium: Medium, processor: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers' image processor makes of a medium, normalised by itself."""
    import transformers

    made = getattr(transformers, f"{processor}Pil").from_pretrained(checkpoint)
    picture = Image.open(io.BytesIO(medium.files[0])).convert("RGB")
    several = checkpoint.name == "llava_onevision" and medium.item.image.detail == IMAGE_DETAIL_LOW
    # As in a prompt of two images, where neither is tiled.
    given: dict[str, Any] = dict(made([[picture] * 2] if several else picture, return_tensors="pt", **arguments))
    return given


def video_rows(model: Any, adapter: Any, prepared: Prepared) -> torch.Tensor:
    """Rows of transformers' model for frames that we cut; test_library_videos compares those."""
    pixels, *arguments = prepared.input.tensors
    values = adapter._videos.normalisation(pixels)
    match adapter.model_type:
        case "internvl":
            found = model.get_image_features(values).pooler_output
        case "llava_onevision":
            found = model.get_video_features(values[None]).pooler_output
        case "minicpmv4_6":
            found = model.get_video_features(values, arguments[0]).pooler_output
        case "kimi_k25":
            found = model.get_video_features(values, arguments[0]).pooler_output
        case _:
            found = model.get_video_features(values.flatten(1), torch.tensor([prepared.input.grid])).pooler_output
    return torch.cat([piece.flatten(0, -2) for piece in found])


def library_rows(
    processor: str,
    names: tuple[str, ...],
    model: Any,
    checkpoint: Path,
    medium: Medium,
    prepared: Prepared,
    arguments: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Rows of transformers' processor and model alone, nothing of ours between them but a video's frames."""
    if medium.item.modality == VIDEO:
        return video_rows(model, open_adapter(checkpoint, "float32"), prepared)
    detail = DETAILS.get((checkpoint.name, medium.item.image.detail), {})
    inputs = processed(checkpoint, medium, processor, {**(arguments or {}), **detail})
    taken = {name: inputs[name] for name in ("pixel_values", *names)}
    alone = prepared.layout.chunk.token_count > 1
    if not alone:
        # Mistral3Model fails where it makes one row in all.
        taken = {name: torch.cat([values, values]) for name, values in taken.items()}
    taken |= {name: value for name, value in inputs.items() if name == "batch_num_images"}
    found = model.get_image_features(**taken).pooler_output
    found = found[:1] if inputs.get("batch_num_images") == 2 else found
    rows = found.flatten(0, 1) if isinstance(found, torch.Tensor) else torch.cat(list(found))
    rows = rows if alone else rows[:1]
    assert len(rows) == prepared.layout.chunk.token_count, medium.name
    return rows


def patch_rows(model: Any, checkpoint: Path, medium: Medium, prepared: Prepared) -> torch.Tensor:
    """Rows of transformers' model for patches that we cut; test_image_inputs compares those."""
    if medium.item.modality == VIDEO:
        return video_rows(model, open_adapter(checkpoint, "float32"), prepared)
    pixels = prepared.input.tensors[0]
    grid = torch.tensor([prepared.input.grid])
    values = pixels.float() / 255
    if checkpoint.name == "kimi_k25":
        values = (values - 0.5) / 0.5
    elif checkpoint.name == "kimi_vl":
        # Merge blocks to lines, as Kimi K2.5 takes them.
        (rows, columns), grid = prepared.input.grid, torch.tensor([[1, *prepared.input.grid]])
        blocks = values.view(rows // 2, columns // 2, 2, 2, 3, 14, 14)
        values = (blocks.transpose(1, 2).reshape(-1, 3, 14, 14) - 0.5) / 0.5
    else:
        mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1)
        deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1)
        values = ((values - mean) / deviation).unsqueeze(2).expand(-1, 3, 2, -1).reshape(len(values), -1)
    (rows,) = model.get_image_features(values, grid).pooler_output
    return torch.as_tensor(rows)


def token_rows(
    processor: str, forward: Callable[[Any, Any], Any], model: Any, checkpoint: Path, medium: Medium, prepared: Prepared
) -> torch.Tensor:
    """Rows of the tokens; test_image_families compares the one vector of the image."""
    pixels = processed(checkpoint, medium, processor, {})["pixel_values"]
    rows: torch.Tensor = forward(model, pixels).last_hidden_state[0]
    return rows


def _and_videos(
    images: Callable[[], tuple[Medium, ...]] = media, *options: VideoOptions
) -> Callable[[], tuple[Medium, ...]]:
    return lambda: (*images(), *videos(*options))


_SAMPLED = VideoOptions(num_frames=5), VideoOptions(fps=1.0)


def _library(
    family: str,
    processor: str,
    names: tuple[str, ...] = (),
    media: Callable[[], tuple[Medium, ...]] = media,
    language: bool = True,
    **arguments: Any,
) -> FamilyCase:
    return FamilyCase(
        family, media, load, partial(library_rows, processor, names, arguments=arguments), language=language
    )


def _tokens(family: str, processor: str, forward: Callable[[Any, Any], Any]) -> FamilyCase:
    return FamilyCase(family, media, load, partial(token_rows, processor, forward), language=False)


CASES = (
    _library("llava", "CLIPImageProcessor"),
    _library(
        "llava_onevision", "LlavaOnevisionImageProcessor", ("image_sizes",), _and_videos(detailed_media, *_SAMPLED)
    ),
    _library("internvl", "GotOcr2ImageProcessor", media=_and_videos(detailed_media, *_SAMPLED), crop_to_patches=True),
    _library(
        "gemma3",
        "Gemma3ImageProcessor",
        media=detailed_media,
        pan_and_scan_min_crop_size=256,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
    ),
    _library(
        "minicpmv4_6",
        "MiniCPMV4_6ImageProcessor",
        ("target_sizes",),
        media=_and_videos(detailed_media, VideoOptions(max_frames=2)),
    ),
    _library("mistral3", "PixtralImageProcessor", ("image_sizes",), patch_size=28),
    *(
        FamilyCase(family, _and_videos(media, VideoOptions(fps=1.0, max_pixels=4000)), load, patch_rows)
        for family in ("glm4v", "glm4v_moe")
    ),
    FamilyCase("glm46v", _and_videos(media, VideoOptions(max_pixels=4000)), load, patch_rows),
    FamilyCase("kimi_k25", _and_videos(media, *_SAMPLED), load, patch_rows),
    FamilyCase("kimi_vl", media, load_whole_kimi_vl, patch_rows),
    _tokens("siglip", "SiglipImageProcessor", lambda model, pixels: model.vision_model(pixels)),
    _tokens("clip", "CLIPImageProcessor", lambda model, pixels: model.vision_model(pixels)),
    _tokens("dinov2", "BitImageProcessor", lambda model, pixels: model(pixels)),
)
