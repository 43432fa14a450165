"""MiMo-V2, whose reference is our own plain formulation."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from encoder_svc.models.registry import open_adapter
from epd.encoder.v1.media_pb2 import ImageOptions, MediaItem, Modality, VideoOptions
from tests.media.sounds import contained, plain, tones
from tests.media.videos import MP4, Clip
from tests.models.cases.audio import sound
from tests.models.cases.qwen_vl import normalised
from tests.models.family_cases import FamilyCase, Medium, Prepared
from tests.models.mimo_reference import MimoReference
from tests.photograph import photo

IMAGE, VIDEO = Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO


@cache
def media() -> tuple[Medium, ...]:
    """Images of less than a block of the band and of more; a video of several frames; sounds of odd lengths."""
    small = VideoOptions(num_frames=5, max_pixels=40_000)
    return (
        Medium("an image", MediaItem(modality=IMAGE), (photo(97, 131),)),
        Medium("a video", MediaItem(modality=VIDEO, video=small), (Clip(frames=15, options=MP4.options).make(),)),
        Medium("a large image", MediaItem(modality=IMAGE, image=ImageOptions(min_pixels=120_000)), (photo(300, 220),)),
        sound("wav-24k-2.5s", plain(tones(2.5, 24_000), 24_000)),
        sound("m4a-44.1k-part", contained(tones(4, 44_100), 44_100, "ipod", "aac"), start_seconds=1, end_seconds=2.3),
        sound("wav-8k-0.01s", plain(tones(0.01, 8_000), 8_000)),
    )


def reference(model: Any, checkpoint: Path, medium: Medium, prepared: Prepared) -> torch.Tensor:
    if medium.item.modality == Modality.MODALITY_AUDIO:
        rows: torch.Tensor = model.hear(prepared.input.tensors[0])
        return rows
    adapter: Any = open_adapter(checkpoint, "float32")
    constants = adapter.vision.image if medium.item.modality == IMAGE else adapter.vision.video
    seen: torch.Tensor = model.see(normalised(prepared.input.tensors[0], constants), prepared.input.grid)
    return seen


CASES = (FamilyCase("mimo_v2", media, MimoReference, reference),)
