"""The vision tower of Qwen2.5-VL: the checkpoint's weights in a forward of our own that packs a batch.

transformers reads the weights and is what tests compare with. Differences from its forward: patches of a still image
are uint8 and embedded by a folded linear layer; the batch is ordered so that attention takes many segments in one call;
element-wise steps are done in place, or in the same pass as the matrix product before them. docs/towers.md says what
each gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from encoder_svc.models.adapter import Progress, TowerInput
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.image_patches import ImagePreprocessing
from encoder_svc.models.linear import Linear
from encoder_svc.models.packing import Grid, PackedBatch, Segments, pack
from encoder_svc.models.patch_embedding import PatchEmbedding
from encoder_svc.models.registry import FAMILIES
from encoder_svc.models.rotary import pair_halves, rotate, rotations
from encoder_svc.models.segment_attention import attend, takes_any_lengths
from encoder_svc.models.weights import build_towers, fingerprint, read_config, read_towers
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo

PREPROCESSING_VERSION = 1
"""Counts changes of this family's code that change embeddings."""

EPSILON = 1e-6
"""Of every normalisation."""

PLANS = 8
"""Batches of the same grids in the same order that are planned once. A plan takes about 300 bytes a patch."""


class Block:
    """One layer: attention and a gated perceptron, each on a normalised copy and added to what came in.

    Args:
        source: transformers' block.
        device: where it runs.
    """

    def __init__(self, source: Any, device: torch.device) -> None:
        self._heads: int = source.attn.num_heads
        self._norm_attention = source.norm1.weight.detach().to(device)
        self._norm_perceptron = source.norm2.weight.detach().to(device)
        paired = pair_halves(self._heads, source.attn.head_dim)
        qkv = source.attn.qkv
        self._qkv = Linear(qkv.weight.detach()[paired].to(device), qkv.bias.detach()[paired].to(device))
        self._proj = _linear(source.attn.proj, device)
        self._gate = _linear(source.mlp.gate_proj, device)
        self._up = _linear(source.mlp.up_proj, device)
        self._down = _linear(source.mlp.down_proj, device)

    def __call__(self, hidden: torch.Tensor, by: torch.Tensor, segments: Segments) -> torch.Tensor:
        """``hidden``: shape (patches, hidden) → the same; ``by``: the rotations of the patches."""
        fused = self._qkv(_normalise(hidden, self._norm_attention)).view(len(hidden), 3, self._heads, -1)
        rotate(fused, by)
        hidden = self._proj.plus(attend(fused, segments), hidden)
        normal = _normalise(hidden, self._norm_perceptron)
        gate = functional.silu(self._gate(normal), inplace=True)
        return self._down.plus(self._up.times(normal, gate), hidden)


@dataclass(frozen=True)
class Plan:
    """What the forward of a batch needs and only its grids decide, on the device."""

    batch: PackedBatch
    rotations: torch.Tensor
    """Complex, shape (patches, 1, head size / 2)."""


class Qwen25VLTower:
    """The loaded tower.

    Args:
        visual: transformers' vision transformer, on the host. Its blocks are taken from it one by one.
        patch_embedding: its first layer, folded.
        device: where it runs.
        weights: what was read.
        compatibility_fingerprint: 32 bytes.
    """

    def __init__(
        self,
        visual: Any,
        patch_embedding: PatchEmbedding,
        device: torch.device,
        weights: WeightsInfo,
        compatibility_fingerprint: bytes,
    ) -> None:
        self.weights = weights
        self.compatibility_fingerprint = compatibility_fingerprint
        self._device = device
        self._patch_embedding = patch_embedding
        self._merge_size: int = visual.spatial_merge_size
        self._window_blocks: int = visual.window_size // visual.spatial_merge_size // visual.patch_size
        self._over_frames = frozenset(visual.fullatt_block_indexes)
        attention = visual.blocks[0].attn
        self._head_size: int = attention.head_dim
        self._any_lengths = takes_any_lengths(device, attention.qkv.weight.dtype, self._head_size)
        self._blocks: list[Block] = []
        while len(visual.blocks):
            # One by one, so that weights are not held twice.
            self._blocks.append(Block(visual.blocks[0], device))
            del visual.blocks[0]
        self._merger_norm = visual.merger.ln_q.weight.detach().to(device)
        self._merger_in, self._merger_out = (_linear(visual.merger.mlp[index], device) for index in (0, 2))
        self._plan = lru_cache(maxsize=PLANS)(self._make_plan)

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerInput]) -> list[torch.Tensor]:
        """See :meth:`Tower.encode <encoder_svc.models.adapter.Tower.encode>`."""
        grids: tuple[Grid, ...] = tuple((item.grid[0], item.grid[1], item.grid[2]) for item in items)
        plan = self._plan(grids)
        hidden = self._patch_embedding(self._gather(items).index_select(0, plan.batch.order))
        for number, block in enumerate(self._blocks):
            segments = plan.batch.frames if number in self._over_frames else plan.batch.windows
            hidden = block(hidden, plan.rotations, segments)
        blocks = _normalise(hidden, self._merger_norm).view(-1, self._merge_size**2 * hidden.shape[1])
        rows = self._merger_out(functional.gelu(self._merger_in(blocks))).index_select(
            0, plan.batch.block_order_inverse
        )
        return list(torch.split(rows, [t * h * w // self._merge_size**2 for t, h, w in grids]))

    def _make_plan(self, grids: tuple[Grid, ...]) -> Plan:
        batch = pack(grids, self._merge_size, self._window_blocks, self._any_lengths).to(self._device)
        return Plan(batch, rotations(batch.positions, self._head_size))

    def _gather(self, items: Sequence[TowerInput]) -> torch.Tensor:
        """The patches of all items on the device: one copy of each, asynchronous if its memory is pinned."""
        sizes = [len(item.tensors[0]) for item in items]
        patches = torch.empty((sum(sizes), *items[0].tensors[0].shape[1:]), dtype=torch.uint8, device=self._device)
        for place, item in zip(patches.split(sizes), items, strict=True):
            place.copy_(item.tensors[0], non_blocking=True)
        return patches


def _linear(source: torch.nn.Linear, device: torch.device) -> Linear:
    return Linear(source.weight.detach().to(device), source.bias.detach().to(device))


def _normalise(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden, weight.shape, weight, EPSILON)


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
    identity = fingerprint(
        weights,
        "qwen2_5_vl",
        dtype,
        {"version": PREPROCESSING_VERSION, **preprocessing.model_dump()},
        visual.merger.mlp[-1].out_features,
    )
    info = weights.info
    # It refers to every tensor, and the tower below keeps its own.
    del weights
    patch_embedding = PatchEmbedding(visual.patch_embed.proj.weight, preprocessing, device)
    tower = Qwen25VLTower(visual, patch_embedding, device, info, identity)
    progress("moving weights", 1.0)
    return tower
