"""An audio tower on a device: from the items of a batch to rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from encoder_svc.models.adapter import Progress, TowerInput
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.mel import MelSettings
from encoder_svc.models.placing import place_weights
from encoder_svc.models.registry import Family
from encoder_svc.models.weights import fingerprint, read_towers
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo

PREPROCESSING_VERSION = 1
"""Counts changes of this code that change embeddings."""

Forward = Callable[[Sequence[torch.Tensor], Sequence[int]], list[torch.Tensor]]
"""(features of each sound, shape (mels, frames), on the tower's device and in its dtype; ``grid_dim`` of each) → the
rows of each, shape (rows, width)."""

Module = TypeVar("Module", bound=torch.nn.Module)


class AudioTower:
    """A loaded tower of a family that only hears.

    Args:
        forward: the family's.
        device: where it runs.
        dtype: that it runs in.
        weights: what was read.
        compatibility_fingerprint: 32 bytes.
    """

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        dtype: torch.dtype,
        weights: WeightsInfo,
        compatibility_fingerprint: bytes,
    ) -> None:
        self.weights = weights
        self.compatibility_fingerprint = compatibility_fingerprint
        self._forward = forward
        self._device = device
        self._dtype = dtype

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        """See :meth:`Tower.encode <encoder_svc.models.adapter.Tower.encode>`."""
        return encode_sounds(self._forward, items, self._device, self._dtype)


def encode_sounds(
    forward: Forward, items: Sequence[TowerInput], device: torch.device, dtype: torch.dtype
) -> list[tuple[torch.Tensor, ...]]:
    """Takes the sounds of a batch through a forward; as :meth:`Tower.encode` gives them."""
    features = [item.tensors[0].to(device, non_blocking=True).to(dtype) for item in items]
    return [(rows,) for rows in forward(features, [item.grid[0] for item in items])]


def load_audio_tower(
    checkpoint: Checkpoint,
    family: Family,
    make: Callable[[], Module],
    outer: Sequence[str],
    begin: Callable[[Module, torch.device], Forward],
    mel: MelSettings,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> AudioTower:
    """Reads the tower of a checkpoint onto a device.

    Args:
        checkpoint: where from.
        family: its row in the table.
        make: makes the module that has the checkpoint's names.
        outer: what stands before these names in the checkpoint.
        begin: makes the forward of the module, whose layers it may take away.
        mel: of the feature extractor.
        width: of a row.
        dtype: of weights and rows.
        device: where it runs.
        progress: told how far it is.

    Raises:
        SetupError: config or weights are wrong; the message says what to change.
    """
    weights = read_towers(checkpoint, family.prefixes, dtype, progress)
    module = place_weights(make, weights, outer)
    preprocessing = {"version": PREPROCESSING_VERSION, **mel.model_dump()}
    identity = fingerprint(weights, family.model_type, dtype, preprocessing, width)
    info = weights.info
    # It refers to every tensor, and the forward keeps its own.
    del weights
    tower = AudioTower(begin(module, device), device, dtype, info, identity)
    progress("moving weights", 1.0)
    return tower
