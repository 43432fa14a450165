"""MoonViT, the vision tower of Kimi-VL, with its projector: a forward of our own that packs a batch.

Patches of images of any sizes are one sequence, in merge-block order, and attend within their own image. A learned grid
of positions is stretched to each image's grid, and rotary positions turn neighbouring elements of queries and keys:
even pairs by the column, odd ones by the row. The forward is compared with transformers' tower of Kimi K2.5, which is
this one for a single frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from encoder_svc.models.adapter import Tower, TowerInput
from encoder_svc.models.image_preprocessing import Normalisation
from encoder_svc.models.packing import Segments, cut_windows, pack
from encoder_svc.models.placing import place_weights
from encoder_svc.models.rotary import THETA, rotate
from encoder_svc.models.segment_attention import attend, takes_any_lengths
from encoder_svc.models.weights import TowerWeights
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo

EPSILON = 1e-5
"""Of every normalisation."""

GRIDS = 64
"""Grids whose positions are kept."""

WHOLE = 1 << 20
"""The side of a window, in merge blocks, that no image exceeds: each is one window."""


class _Perceptron(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc0 = nn.Linear(width, inner)
        self.fc1 = nn.Linear(inner, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.fc1(functional.gelu(self.fc0(hidden), approximate="tanh"))
        return inner


class _Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm0 = nn.LayerNorm(width, EPSILON)
        self.norm1 = nn.LayerNorm(width, EPSILON)
        self.mlp = _Perceptron(width, inner)
        self.wqkv = nn.Linear(width, 3 * width)
        self.wo = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, by: torch.Tensor, segments: Segments) -> torch.Tensor:
        """``hidden``: shape (patches, width) → the same; ``by``: the rotations of the patches."""
        fused = self.wqkv(self.norm0(hidden)).view(len(hidden), 3, self.heads, -1)
        rotate(fused, by)
        hidden = hidden + self.wo(attend(fused, segments))
        inner: torch.Tensor = hidden + self.mlp(self.norm1(hidden))
        return inner


class _PositionTable(nn.Module):
    def __init__(self, rows: int, columns: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, width))


class _PatchEmbedding(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.pos_emb = _PositionTable(config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size)


class _Encoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
        self.blocks = nn.ModuleList(_Block(width, inner, heads) for _ in range(config.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(width, EPSILON)


class _MoonViT(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.patch_embed = _PatchEmbedding(config)
        self.encoder = _Encoder(config)


class _Projector(nn.Module):
    def __init__(self, config: Any, out: int) -> None:
        super().__init__()
        merged = config.hidden_size * config.merge_kernel_size[0] ** 2
        self.pre_norm = nn.LayerNorm(config.hidden_size, EPSILON)
        self.linear_1 = nn.Linear(merged, merged)
        self.linear_2 = nn.Linear(merged, out)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        blocks = self.pre_norm(hidden).view(-1, self.linear_1.in_features)
        rows: torch.Tensor = self.linear_2(functional.gelu(self.linear_1(blocks)))
        return rows


class MoonViTModules(nn.Module):
    """The parameters, under the names of checkpoints.

    Args:
        config: ``vision_config``.
        out: the length of a row.
    """

    def __init__(self, config: Any, out: int) -> None:
        super().__init__()
        self.vision_tower = _MoonViT(config)
        self.multi_modal_projector = _Projector(config, out)


class MoonViTTower:
    """The loaded tower.

    Args:
        modules: the parameters, on the device.
        config: ``vision_config``.
        normalisation: of pixels.
        dtype: of weights and embeddings.
        device: of the parameters.
        weights: what was read.
        compatibility_fingerprint: 32 bytes.
    """

    def __init__(
        self,
        modules: MoonViTModules,
        config: Any,
        normalisation: Normalisation,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightsInfo,
        compatibility_fingerprint: bytes,
    ) -> None:
        self.weights = weights
        self.compatibility_fingerprint = compatibility_fingerprint
        self._modules = modules
        self._merge_size: int = config.merge_kernel_size[0]
        self._head_size: int = config.hidden_size // config.num_attention_heads
        self._normalisation = normalisation
        self._dtype = dtype
        self._device = device
        self._any_lengths = takes_any_lengths(device, dtype, self._head_size)
        self._positions = lru_cache(maxsize=GRIDS)(self._stretch_positions)

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        """See :meth:`Tower.encode <encoder_svc.models.adapter.Tower.encode>`."""
        grids = [(1, item.grid[0], item.grid[1]) for item in items]
        batch = pack(grids, self._merge_size, WHOLE, self._any_lengths).to(self._device)
        tower = self._modules.vision_tower
        pixels = self._normalisation(torch.cat([item.tensors[0] for item in items]).to(self._device))
        weight, bias = tower.patch_embed.proj.weight, tower.patch_embed.proj.bias
        hidden = functional.linear(pixels.to(self._dtype).flatten(1), weight.flatten(1), bias)
        hidden += torch.cat([self._positions(rows, columns) for _, rows, columns in grids])
        hidden = hidden.index_select(0, batch.order)
        by = self._rotations(batch.positions)
        for block in tower.encoder.blocks:
            hidden = block(hidden, by, batch.frames)
        rows = self._modules.multi_modal_projector(tower.encoder.final_layernorm(hidden))
        counts = [rows * columns // self._merge_size**2 for _, rows, columns in grids]
        return [(part,) for part in torch.split(rows.index_select(0, batch.block_order_inverse), counts)]

    def _stretch_positions(self, rows: int, columns: int) -> torch.Tensor:
        """The learned positions of a grid, its patches in merge-block order; shape (patches, width)."""
        table: torch.Tensor = self._modules.vision_tower.patch_embed.pos_emb.weight
        if table.shape[:2] != (rows, columns):
            planes = table.permute(2, 0, 1).unsqueeze(0).float()
            stretched = functional.interpolate(planes, size=(rows, columns), mode="bicubic")
            table = stretched.squeeze(0).permute(1, 2, 0).to(self._dtype)
        places = cut_windows((1, rows, columns), self._merge_size, WHOLE).positions.long().to(self._device)
        return table[places[:, 0], places[:, 1]]

    def _rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """The complex numbers that queries and keys are multiplied with, shape (patches, 1, head size / 2).

        Pair 2i turns with the column and pair 2i + 1 with the row, by ``position · THETA^(−4i / head size)``.
        """
        steps = torch.arange(0, self._head_size, 4, dtype=torch.float32, device=self._device) / self._head_size
        angles = positions.flip(-1).unsqueeze(1).float() * (1.0 / THETA**steps).unsqueeze(-1)
        return torch.polar(torch.ones_like(angles), angles).flatten(1)[:, None]


def build_tower(
    config: Any,
    width: int,
    normalisation: Normalisation,
    weights: TowerWeights,
    identity: bytes,
    dtype: torch.dtype,
    device: torch.device,
) -> Tower:
    """Puts weights that were read into the tower.

    Raises:
        SetupError: a weight is missing, left over, or of the wrong shape.
    """
    modules = place_weights(lambda: MoonViTModules(config, width), weights, ("",))
    return MoonViTTower(modules.to(device=device), config, normalisation, dtype, device, weights.info, identity)
