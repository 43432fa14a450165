"""What is the same for every family, so that one set of tests can hold all of them.

A family's row says which media to encode and how its reference in transformers makes rows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from encoder_svc.media.item import open_media
from encoder_svc.media.limits import MediaLimits
from encoder_svc.models.adapter import Adapter, Layout, TowerInput
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from epd.internal.v1.media_worker_pb2 import Tower as TowerName

LIMITS = MediaLimits(
    image_pixels=64_000_000, video_pixels=9_000_000, video_frames=10_000, video_seconds=600.0, audio_seconds=600.0
)


@dataclass(frozen=True)
class Medium:
    """A media file and how it is asked for."""

    name: str
    item: MediaItem
    """Modality and options, without the bytes."""
    files: tuple[bytes, ...]
    """One file, or the frames of a video."""


@dataclass(frozen=True)
class Prepared:
    """A medium after a media worker's work."""

    layout: Layout
    input: TowerInput
    sound: TowerInput | None = None
    """Of a video, for the other tower."""


Reference = Callable[[Any, Path, Medium, Prepared], torch.Tensor]
"""(whole model, checkpoint, medium, what we prepared) → rows as transformers makes them, shape (token_count, width)."""


@dataclass(frozen=True)
class FamilyCase:
    """One family."""

    family: str
    """As ``tiny-checkpoint`` names it."""
    media: Callable[[], tuple[Medium, ...]]
    """Several sizes, and every modality that the family encodes."""
    load: Callable[[Path], Any]
    """The whole model as transformers loads it, float32, in evaluation mode."""
    reference: Reference
    tolerance: float = 1e-4
    """Largest difference in float32."""
    language: bool = True
    """The checkpoint has a language side."""


def prepare(adapter: Adapter, medium: Medium) -> Prepared:
    """Takes a medium through an adapter as a media worker does, without its process."""
    probe = open_media(medium.item, medium.files, LIMITS)
    layout = adapter.measure(medium.item, probe)
    tensors = tuple(adapter.prepare(medium.item, probe, layout))
    told = [tuple(spec.shape) for taken in layout.inputs for spec in taken.tensors]
    assert told == [tuple(tensor.shape) for tensor in tensors], "the input is not what was measured"
    return Prepared(layout, *tower_inputs(medium.item.modality, layout, tensors))


def tower_inputs(modality: Modality, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[TowerInput]:
    """What each tower gets, as front and engine deal it out."""
    rest, inputs = list(tensors), []
    for taken in layout.inputs:
        of_it, rest = rest[: len(taken.tensors)], rest[len(taken.tensors) :]
        heard = taken.tower == TowerName.TOWER_AUDIO
        grid = tuple(taken.grid_dim or layout.chunk.grid_dim)
        inputs.append(TowerInput(Modality.MODALITY_AUDIO if heard else modality, grid, tuple(of_it)))
    return inputs
