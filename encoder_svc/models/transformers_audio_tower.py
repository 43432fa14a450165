"""Any family of transformers that hears: the loaded tower, in transformers' own forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from encoder_svc.models.adapter import Progress, Tower, TowerInput
from encoder_svc.models.audio_families import AudioFamily
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.registry import Family
from encoder_svc.models.weights import build_towers, fingerprint, read_towers
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo

PREPROCESSING_VERSION = 1
"""Counts changes of this code that change embeddings."""


class TransformersAudioTower:
    """The loaded tower.

    Args:
        model: transformers' base model without its language model, on the device.
        family: how it differs.
        config: its configuration.
        dtype: of weights and embeddings.
        device: of the model.
        weights: what was read.
        compatibility_fingerprint: 32 bytes.
    """

    def __init__(
        self,
        model: Any,
        family: AudioFamily,
        config: Any,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightsInfo,
        compatibility_fingerprint: bytes,
    ) -> None:
        self.weights = weights
        self.compatibility_fingerprint = compatibility_fingerprint
        self._call = model.get_audio_features
        self._family = family
        self._config = config
        self._dtype = dtype
        self._device = device

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        """See :meth:`Tower.encode <encoder_svc.models.adapter.Tower.encode>`."""
        # Windows of one length share a call: padding them to another would change what the model sees.
        alike: dict[int, list[int]] = {}
        for number, item in enumerate(items):
            alike.setdefault(item.tensors[0].shape[-1], []).append(number)
        encoded: dict[int, tuple[torch.Tensor, ...]] = {}
        for numbers in alike.values():
            rows = self._encode([items[number] for number in numbers])
            encoded.update((number, (one,)) for number, one in zip(numbers, rows, strict=True))
        return [encoded[number] for number in range(len(items))]

    def _encode(self, items: Sequence[TowerInput]) -> list[torch.Tensor]:
        features, mask = (torch.cat([item.tensors[place] for item in items]).to(self._device) for place in (0, 1))
        output = self._call(input_features=features.to(self._dtype), input_features_mask=mask)
        counts = [
            sum(self._family.rows(self._config, frames) for frames in item.tensors[1].sum(-1).tolist())
            for item in items
        ]
        rows: torch.Tensor = output.pooler_output
        return list(torch.split(rows.flatten(0, -2), counts))


def load_tower(
    checkpoint: Checkpoint,
    family: AudioFamily,
    row: Family,
    config: Any,
    constants: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Tower:
    """Reads the tower's weights and puts them on a device.

    Raises:
        SetupError: a weight is missing, left over, or of the wrong shape.
    """
    weights = read_towers(checkpoint, row.prefixes, dtype, progress)
    model = build_towers(family.model, config, weights, dtype, family.absent)
    identity = fingerprint(
        weights, row.model_type, dtype, {"version": PREPROCESSING_VERSION, **constants}, family.width(config)
    )
    return TransformersAudioTower(model.to(device), family, config, dtype, device, weights.info, identity)
