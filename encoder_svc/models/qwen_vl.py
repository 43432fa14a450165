"""The Qwen-VL families: Qwen2-VL, Qwen2.5-VL, Qwen3-VL Qwen3.5, and mixtures of experts of both. Images and videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from encoder_svc.models.adapter import Adapter, Layout, MediaProbe, Progress, Tower, TowerInput, WarmUp
from encoder_svc.models.checkpoint import Checkpoint, open_checkpoint
from encoder_svc.models.dtypes import DATA_TYPES
from encoder_svc.models.qwen_vision import (
    MEASURED,
    QwenVision,
    Timing,
    VisionFamily,
    of_frames,
    of_whole_videos,
)
from encoder_svc.models.qwen_vision_config import Qwen2Vision, Qwen3Vision, Qwen25Vision, Qwen35Vision
from encoder_svc.models.registry import FAMILIES, find_family
from epd.encoder.v1.embedding_pb2 import DataType
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo
from epd.encoder.v1.media_pb2 import MediaItem, Modality

if TYPE_CHECKING:
    from encoder_svc.models.qwen_vision_tower import QwenVisionTower

PREPROCESSING_VERSION = 2
"""Counts changes of this code that change embeddings."""

VISION: dict[str, VisionFamily] = {
    "qwen2_vl": of_frames(Qwen2Vision, Timing()),
    "qwen2_5_vl": of_frames(Qwen25Vision, MEASURED),
    "qwen3_vl": of_whole_videos(Qwen3Vision),
    "qwen3_vl_moe": of_whole_videos(Qwen3Vision),
    "qwen3_5": of_whole_videos(Qwen35Vision),
    "qwen3_5_moe": of_whole_videos(Qwen35Vision),
}
"""By ``model_type``."""


@dataclass(frozen=True)
class QwenVLTower:
    """A vision tower that is all there is."""

    weights: WeightsInfo
    compatibility_fingerprint: bytes
    vision: QwenVisionTower
    """Its forward."""

    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        """See :meth:`Tower.encode <encoder_svc.models.adapter.Tower.encode>`."""
        return self.vision.encode(items)


class QwenVLAdapter:
    """One of these families as one checkpoint configures it.

    Args:
        checkpoint: the checkpoint.
        dtype: of weights and embeddings.

    Raises:
        SetupError: its configuration is wrong or contradicts itself.
    """

    audio_sampling_rate = None

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self.model_type: str = find_family(checkpoint).model_type
        self.modalities: tuple[Modality, ...] = FAMILIES[self.model_type].modalities
        name = str(dtype).removeprefix("torch.")
        self.dtype: DataType = DATA_TYPES[name]
        self.vision = QwenVision(VISION[self.model_type], checkpoint, checkpoint.config, name)
        self.hidden_size = self.vision.hidden_size
        self.tensors = self.vision.tensors

    def measure(self, item: MediaItem, probe: MediaProbe) -> Layout:
        """See :meth:`Adapter.measure <encoder_svc.models.adapter.Adapter.measure>`."""
        return self.vision.measure(item, probe)

    def prepare(self, item: MediaItem, probe: MediaProbe, layout: Layout) -> Sequence[torch.Tensor]:
        """See :meth:`Adapter.prepare <encoder_svc.models.adapter.Adapter.prepare>`."""
        return self.vision.prepare(item, probe, layout)

    def warm_up(self) -> WarmUp:
        """A grid of two by two merge blocks, mid-grey."""
        return self.vision.warm_up()

    def load_tower(self, device: torch.device, progress: Progress) -> Tower:
        """See :meth:`Adapter.load_tower <encoder_svc.models.adapter.Adapter.load_tower>`."""
        from encoder_svc.models.placing import place_weights
        from encoder_svc.models.qwen_vision_parameters import VisionTower
        from encoder_svc.models.qwen_vision_tower import QwenVisionTower
        from encoder_svc.models.weights import fingerprint, read_towers

        prefixes = FAMILIES[self.model_type].prefixes
        weights = read_towers(self._checkpoint, prefixes, self._dtype, progress)
        visual = place_weights(lambda: VisionTower(self.vision.config), weights, prefixes)
        identity = fingerprint(
            weights,
            self.model_type,
            self._dtype,
            {"version": PREPROCESSING_VERSION, **self.vision.identity},
            self.hidden_size * len(self.tensors),
        )
        info = weights.info
        # It refers to every tensor, and the tower below keeps its own.
        del weights
        tower = QwenVisionTower(visual, self.vision.config, self.vision.image, self.vision.video, device)
        progress("moving weights", 1.0)
        return QwenVLTower(info, identity, tower)


def make_adapter(path: Path, dtype: torch.dtype) -> Adapter:
    """The factory of these families.

    Raises:
        SetupError: the checkpoint cannot be served.
    """
    return QwenVLAdapter(open_checkpoint(path), dtype)
