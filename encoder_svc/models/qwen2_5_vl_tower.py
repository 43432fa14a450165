"""The vision tower of Qwen2.5-VL: transformers' layers and weights, in a forward of our own that packs a batch.

Differences from transformers' forward: patches of a still image are uint8 and embedded by a folded linear layer; the
batch is ordered by window length, and one call of attention takes all segments of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel, apply_rotary_pos_emb_vision

from encoder_svc.models.adapter import Progress, TowerInput
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.image_patches import ImagePreprocessing
from encoder_svc.models.packing import Grid, SegmentGroup, pack
from encoder_svc.models.patch_embedding import PatchEmbedding
from encoder_svc.models.registry import FAMILIES
from encoder_svc.models.segment_attention import attend
from encoder_svc.models.weights import build_towers, fingerprint, read_config, read_towers
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo

PREPROCESSING_VERSION = 1
"""Counts changes of this family's code that change embeddings."""


class Qwen25VLTower:
    """The loaded tower.

    Args:
        visual: transformers' vision transformer, on its device.
        patch_embedding: its first layer, folded.
        weights: what was read.
        compatibility_fingerprint: 32 bytes.
    """

    def __init__(
        self, visual: Any, patch_embedding: PatchEmbedding, weights: WeightsInfo, compatibility_fingerprint: bytes
    ) -> None:
        self.weights = weights
        self.compatibility_fingerprint = compatibility_fingerprint
        self._visual = visual
        self._patch_embedding = patch_embedding
        self._device = patch_embedding.weight.device
        self._merge_size: int = visual.spatial_merge_size
        self._window_blocks: int = visual.window_size // visual.spatial_merge_size // visual.patch_size

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerInput]) -> list[torch.Tensor]:
        """See :meth:`Tower.encode <encoder_svc.models.adapter.Tower.encode>`."""
        grids: list[Grid] = [(item.grid[0], item.grid[1], item.grid[2]) for item in items]
        batch = pack(grids, self._merge_size, self._window_blocks).to(self._device)
        patches = torch.cat([item.tensors[0] for item in items]).to(self._device)
        hidden = self._patch_embedding(patches[batch.order])
        cos, sin = self._visual.rotary_pos_emb(hidden, batch.positions)
        for number, block in enumerate(self._visual.blocks):
            groups = batch.frames if number in self._visual.fullatt_block_indexes else batch.windows
            hidden = hidden + _attention(block.attn, block.norm1(hidden), cos, sin, groups)
            hidden = hidden + block.mlp(block.norm2(hidden))
        rows: torch.Tensor = self._visual.merger(hidden)[batch.block_order_inverse]
        return list(torch.split(rows, [t * h * w // self._merge_size**2 for t, h, w in grids]))


def _attention(
    layer: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, groups: Sequence[SegmentGroup]
) -> torch.Tensor:
    query, key, value = layer.qkv(hidden).view(hidden.shape[0], 3, layer.num_heads, layer.head_dim).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
    mixed: torch.Tensor = layer.proj(attend(query, key, value, groups))
    return mixed


def load_tower(
    checkpoint: Checkpoint,
    preprocessing: ImagePreprocessing,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Qwen25VLTower:
    """Reads the tower of a checkpoint onto a device.

    Raises:
        SetupError: config or weights are wrong; the message says what to change.
    """
    config = read_config(Qwen2_5_VLConfig, checkpoint)
    weights = read_towers(checkpoint, FAMILIES["qwen2_5_vl"].prefixes, dtype, progress)
    visual = build_towers(Qwen2_5_VLModel, config, weights, dtype).visual
    patch_embedding = PatchEmbedding(visual.patch_embed.proj.weight, preprocessing)
    del visual.patch_embed
    identity = fingerprint(
        weights,
        "qwen2_5_vl",
        dtype,
        {"version": PREPROCESSING_VERSION, **preprocessing.model_dump()},
        visual.merger.mlp[-1].out_features,
    )
    progress("moving weights", 1.0)
    return Qwen25VLTower(visual.to(device), patch_embedding.to(device), weights.info, identity)
