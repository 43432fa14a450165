"""MiMo-V2's vision tower in a forward of our own that packs a batch.

Most blocks attend in a band: a patch sees those up to ``visual_token_window_size`` before and behind it in its frame,
in the order row by row in some blocks and column by column in others; a few attend over whole frames. Images and videos
of any sizes stand one after another, and only the order within a frame changes between blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from encoder_svc.models.audio_encoder import to_linear
from encoder_svc.models.banded_attention import Band, BlockGroup, Sinks, attend_in_band, plan_band
from encoder_svc.models.image_patches import ImagePreprocessing
from encoder_svc.models.linear import Linear
from encoder_svc.models.mimo_v2_config import MergerNorm, MimoVision
from encoder_svc.models.packing import Grid
from encoder_svc.models.patch_embedding import PatchEmbedding
from encoder_svc.models.rotary import rotations

EPSILON = 1e-6
"""Of every normalisation."""

PLANS = 8
"""Batches of the same grids in the same order that are planned once. A plan takes about 2 kB a patch."""

EVERYTHING = Band(None, None)


@dataclass(frozen=True)
class Order:
    """An order of the patches of a batch."""

    rotations: torch.Tensor
    """Of the patches in this order; complex, shape (patches, 1, head size / 2)."""
    entry: torch.Tensor
    """The places of the patches in the order before, to come to this one; int64, shape (patches,)."""


@dataclass(frozen=True)
class Plan:
    """What the forward of a batch needs and only its grids decide, on the device."""

    by_row: Order
    """Merge block by merge block, row by row: how patches come, and how the merger takes them."""
    by_column: Order
    """Merge block by merge block, column by column."""
    frames: tuple[BlockGroup, ...]
    """Who sees whom in blocks that attend over whole frames."""
    band: tuple[BlockGroup, ...]
    """Who sees whom in the others."""


class Block:
    """One layer: attention and a gated perceptron, each on a normalised copy and added to what came in.

    Args:
        source: the weights of the block.
        config: of the tower.
        number: of the block.
        device: where it runs.
    """

    def __init__(self, source: Any, config: MimoVision, number: int, device: torch.device) -> None:
        self.is_full = config.is_full(number)
        self.in_columns = config.in_columns(number)
        self._heads, self._key_heads, self._size = config.num_heads, config.num_key_value_heads, config.qk_channels
        self._norm_attention, self._norm_perceptron = (
            norm.weight.detach().to(device) for norm in (source.norm1, source.norm2)
        )
        paired = _pair_halves(self._heads + self._key_heads, self._key_heads, self._size)
        qkv = source.attn.qkv
        self._qkv = Linear(qkv.weight.detach()[paired].to(device), qkv.bias.detach()[paired].to(device))
        self._proj = to_linear(source.attn.proj, device)
        sinks = getattr(source.attn, "sinks", None)
        self._sinks = None if sinks is None else Sinks(sinks.detach().to(device), config.sink_form)
        self._gate, self._up, self._down = (
            to_linear(layer, device) for layer in (source.mlp.gate_proj, source.mlp.up_proj, source.mlp.down_proj)
        )

    def __call__(self, hidden: torch.Tensor, by: torch.Tensor, groups: Sequence[BlockGroup]) -> torch.Tensor:
        """``hidden``: shape (patches, hidden) → the same; ``by``: the rotations of the patches."""
        fused = self._qkv(_normalise(hidden, self._norm_attention)).view(len(hidden), -1, self._size)
        _rotate(fused[:, : self._heads + self._key_heads], by)
        query, key, value = fused.split((self._heads, self._key_heads, self._key_heads), dim=1)
        hidden = self._proj.plus(attend_in_band(query, key, value, groups, self._sinks), hidden)
        normal = _normalise(hidden, self._norm_perceptron)
        gate = functional.silu(self._gate(normal), inplace=True)
        return self._down.plus(self._up.times(normal, gate), hidden)


class VisionForward:
    """The tower.

    Args:
        source: its weights, on the host. Its blocks are taken from it one by one.
        config: of the tower.
        image: how images are normalised.
        video: how videos are normalised.
        device: where it runs.
    """

    def __init__(
        self,
        source: Any,
        config: MimoVision,
        image: ImagePreprocessing,
        video: ImagePreprocessing,
        device: torch.device,
    ) -> None:
        self._device = device
        self._config = config
        convolution = source.patch_embed.proj
        self._of_images = PatchEmbedding(convolution, image, device, still=True)
        self._of_videos = PatchEmbedding(convolution, video, device, still=False)
        window = config.visual_token_window_size
        self._band = Band(window, window) if window > 0 else EVERYTHING
        self._blocks: list[Block] = []
        while len(source.blocks):
            # One by one, so that weights are not held twice.
            self._blocks.append(Block(source.blocks[0], config, len(self._blocks), device))
            del source.blocks[0]
        self._merger_norm = source.merger.ln_q.weight.detach().to(device)
        self._merger_in, self._merger_out = (to_linear(source.merger.mlp[index], device) for index in (0, 2))
        self._plan = lru_cache(maxsize=PLANS)(self._make_plan)

    def __call__(self, patches: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Encodes images and videos.

        Args:
            patches: of each, uint8, in merge-block order: shape (patches, 3 · patch²) for a still image, and
                (patches, 3 · temporal_patch_size · patch²) for a video.
            grids: of each.

        Returns:
            The rows of each, shape (t·h·w / merge², out_hidden_size).
        """
        plan = self._plan(tuple(grids))
        hidden = torch.cat([self._embed(part) for part in patches])
        in_columns = False
        for block in self._blocks:
            order = plan.by_column if block.in_columns else plan.by_row
            if block.in_columns != in_columns:
                hidden = hidden.index_select(0, order.entry)
                in_columns = block.in_columns
            hidden = block(hidden, order.rotations, plan.frames if block.is_full else plan.band)
        if in_columns:
            hidden = hidden.index_select(0, plan.by_row.entry)
        merged = self._config.spatial_merge_size**2
        rows = self._merge(hidden.view(-1, merged, hidden.shape[1]))
        return list(rows.split([frames * high * wide // merged for frames, high, wide in grids]))

    def _embed(self, patches: torch.Tensor) -> torch.Tensor:
        layer = self._of_images if patches.shape[1] == self._of_images.values else self._of_videos
        return layer(patches.to(self._device, non_blocking=True))

    def _merge(self, blocks: torch.Tensor) -> torch.Tensor:
        weight = self._merger_norm
        if self._config.merger_norm is MergerNorm.LAYER_NORM:
            normal = functional.layer_norm(blocks, weight.shape, weight, None, EPSILON)
        else:
            normal = _normalise(blocks, weight)
        return self._merger_out(functional.gelu(self._merger_in(normal.flatten(1))))

    def _make_plan(self, grids: tuple[Grid, ...]) -> Plan:
        merge = self._config.spatial_merge_size
        starts = accumulate((frames * rows * columns for frames, rows, columns in grids), initial=0)
        columns = torch.cat([_columns(grid, merge) + start for grid, start in zip(grids, starts, strict=False)])
        back = torch.empty_like(columns)
        back[columns] = torch.arange(len(columns))
        positions = torch.cat([_positions(grid, merge) for grid in grids])
        lengths = [rows * wide for frames, rows, wide in grids for _ in range(frames)]
        size = self._config.qk_channels
        by_row, by_column = (rotations(order.to(self._device), size) for order in (positions, positions[columns]))
        return Plan(
            by_row=Order(by_row, back.to(self._device)),
            by_column=Order(by_column, columns.to(self._device)),
            frames=plan_band(lengths, EVERYTHING, self._device),
            band=plan_band(lengths, self._band, self._device),
        )


def _columns(grid: Grid, merge: int) -> torch.Tensor:
    """For each place of the order by columns, the place of its patch in the order by rows; int64, (patches,)."""
    frames, rows, columns = grid
    places = torch.arange(frames * rows * columns).view(frames, rows // merge, columns // merge, merge**2)
    return places.transpose(1, 2).reshape(-1)


def _positions(grid: Grid, merge: int) -> torch.Tensor:
    """Row and column of each patch, in merge-block order; int64, shape (patches, 2)."""
    frames, rows, columns = grid
    axes = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    blocks = [axis.view(rows // merge, merge, columns // merge, merge).transpose(1, 2).reshape(-1) for axis in axes]
    return torch.stack(blocks, dim=-1).repeat(frames, 1)


def _pair_halves(rotated: int, others: int, size: int) -> torch.Tensor:
    """As :func:`~encoder_svc.models.rotary.pair_halves`, where fewer heads have keys than have queries."""
    rows = torch.arange((rotated + others) * size)
    paired = rows[: rotated * size].view(rotated, 2, size // 2).transpose(1, 2).reshape(-1)
    return torch.cat([paired, rows[rotated * size :]])


def _rotate(heads: torch.Tensor, by: torch.Tensor) -> None:
    """Rotates in place, in float32 whatever the type; ``heads``: shape (patches, heads, head size)."""
    turned = heads.view(*heads.shape[:2], -1, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(turned).mul_(by)
    else:
        turned.copy_(torch.view_as_real(torch.view_as_complex(turned.float()).mul_(by)))


def _normalise(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden, weight.shape, weight, EPSILON)
