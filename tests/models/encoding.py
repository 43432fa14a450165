"""Takes a picture through an adapter as a media worker does, without its process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from encoder_svc.models.adapter import Adapter, Layout, TowerInput
from encoder_svc.models.registry import open_adapter
from epd.encoder.v1.media_pb2 import ImageOptions, MediaItem, Modality
from tests.models.pictures import Picture

MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class DecodedPicture:
    """A probe of pixels that are there already."""

    pixels: torch.Tensor

    @property
    def width(self) -> int:
        return self.pixels.shape[1]

    @property
    def height(self) -> int:
        return self.pixels.shape[0]

    def decode(self) -> torch.Tensor:
        return self.pixels


def image_item(picture: Picture) -> MediaItem:
    options = ImageOptions(min_pixels=picture.min_pixels, max_pixels=picture.max_pixels)
    return MediaItem(modality=Modality.MODALITY_IMAGE, image=options)


def prepare(adapter: Adapter, picture: Picture) -> tuple[Layout, TowerInput]:
    """Measures and prepares a picture."""
    item, probe = image_item(picture), DecodedPicture(picture.pixels())
    layout = adapter.measure(item, probe)
    (patches,) = adapter.prepare(item, probe, layout)
    return layout, TowerInput(item.modality, tuple(layout.chunk.grid_dim), (patches,))


def embed(tower: Any, items: Sequence[TowerInput]) -> list[torch.Tensor]:
    """The rows of each item of a batch."""
    return [matrices[0] for matrices in tower.encode(items)]


def pixel_values(patches: torch.Tensor) -> torch.Tensor:
    """The processor's float32 output for uint8 patches: normalised as it does, each patch with its two equal frames.

    Shape (patches, 588) → (patches, 1176).
    """
    values = patches.view(-1, 3, 1, 14 * 14).to(torch.float32)
    mean, deviation = (torch.tensor(constants) * (1.0 / (1 / 255)) for constants in (MEAN, DEVIATION))
    values = (values - mean.view(1, 3, 1, 1)) / deviation.view(1, 3, 1, 1)
    return values.expand(-1, 3, 2, 14 * 14).reshape(-1, 3 * 2 * 14 * 14)


def whole_model(checkpoint: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The whole model as transformers loads it."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype)
    return model.train(False)


def load(checkpoint: Path, dtype: str = "float32") -> tuple[Adapter, Any]:
    """The adapter and its tower on the CPU."""
    adapter = open_adapter(checkpoint, dtype)
    return adapter, adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)
