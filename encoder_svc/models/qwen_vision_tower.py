"""The vision tower of the Qwen-VL families: the checkpoint's weights in a forward of our own that packs a batch.

transformers' is what tests compare with. Differences from its forward: patches are uint8 and embedded by a folded
linear layer; the batch is ordered so that attention takes many segments in one call; element-wise steps are done in
place, or in the same pass as the matrix product before them. docs/towers.md says what each gains.

The families differ in few places, each a piece that is chosen when weights are loaded: how a norm, a perceptron and a
merger are made, which blocks attend within windows, whether there are learned positions, and whether rows of some
blocks are kept (deepstack).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

from encoder_svc.models.adapter import TowerInput
from encoder_svc.models.image_patches import ImagePreprocessing
from encoder_svc.models.linear import Linear
from encoder_svc.models.packing import Grid, PackedBatch, Segments, pack
from encoder_svc.models.patch_embedding import PatchEmbedding
from encoder_svc.models.position_table import PositionTable, Taps
from encoder_svc.models.qwen_vision_config import Qwen3Vision, Qwen25Vision, VisionConfig
from encoder_svc.models.rotary import pair_halves, rotate, rotations
from encoder_svc.models.segment_attention import attend, takes_any_lengths

EPSILON = 1e-6
"""Of every normalisation."""

PLANS = 8
"""Batches of the same grids in the same order that are planned once. A plan takes about 400 bytes a patch."""

WHOLE_FRAME = 1 << 30
"""Merge blocks of a window's side, where no block attends within windows: a window is then a frame."""


class Norm:
    """Layer normalisation, or where the checkpoint has no bias, by the root mean square."""

    def __init__(self, source: Any, device: torch.device) -> None:
        self._weight = source.weight.detach().to(device)
        bias = getattr(source, "bias", None)
        self._bias = None if bias is None else bias.detach().to(device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (n, width) → the same."""
        if self._bias is None:
            return _normalise(hidden, self._weight)
        return functional.layer_norm(hidden, self._weight.shape, self._weight, self._bias, EPSILON)


class GatedPerceptron:
    """Qwen2.5: ``down(up(x) · SiLU(gate(x)))``."""

    def __init__(self, source: Any, device: torch.device) -> None:
        self._gate, self._up, self._down = (
            _linear(layer, device) for layer in (source.gate_proj, source.up_proj, source.down_proj)
        )

    def plus(self, normal: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Its output for ``normal``, plus ``hidden``: shapes (n, width) → the same."""
        gate = functional.silu(self._gate(normal), inplace=True)
        return self._down.plus(self._up.times(normal, gate), hidden)


class Perceptron:
    """The others: ``out(activation(in(x)))``."""

    def __init__(
        self, layers: tuple[Any, Any], activation: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> None:
        self._in, self._out = (_linear(layer, device) for layer in layers)
        self._activation = activation

    def plus(self, normal: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Its output for ``normal``, plus ``hidden``: shapes (n, width) → the same."""
        return self._out.plus(self._activation(self._in(normal)), hidden)


class Block:
    """One layer: attention and a perceptron, each on a normalised copy and added to what came in.

    Args:
        source: the weights of the block, by transformers' names.
        device: where it runs.
    """

    def __init__(self, source: Any, device: torch.device) -> None:
        self._heads: int = source.attn.num_heads
        self._norm_attention, self._norm_perceptron = (Norm(norm, device) for norm in (source.norm1, source.norm2))
        paired = pair_halves(self._heads, source.attn.head_dim)
        qkv = source.attn.qkv
        self._qkv = Linear(qkv.weight.detach()[paired].to(device), qkv.bias.detach()[paired].to(device))
        self._proj = _linear(source.attn.proj, device)
        self._perceptron = _make_perceptron(source.mlp, device)

    def __call__(self, hidden: torch.Tensor, by: torch.Tensor, segments: Segments) -> torch.Tensor:
        """``hidden``: shape (patches, width) → the same; ``by``: the rotations of the patches."""
        fused = self._qkv(self._norm_attention(hidden)).view(len(hidden), 3, self._heads, -1)
        rotate(fused, by)
        hidden = self._proj.plus(attend(fused, segments), hidden)
        return self._perceptron.plus(self._norm_perceptron(hidden), hidden)


class Merger:
    """The projector: a merge block of patches → one row."""

    def __init__(self, source: Any, merge_size: int, device: torch.device) -> None:
        numbered = hasattr(source, "ln_q")
        layers = (source.mlp[0], source.mlp[2]) if numbered else (source.linear_fc1, source.linear_fc2)
        self._norm = Norm(source.ln_q if numbered else source.norm, device)
        self._in, self._out = (_linear(layer, device) for layer in layers)
        self._patches = merge_size**2
        self._normalises_blocks: bool = getattr(source, "use_postshuffle_norm", False)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (patches, width) → (merge blocks, row width)."""
        shape = -1, self._patches * hidden.shape[1]
        blocks = self._norm(hidden.view(shape)) if self._normalises_blocks else self._norm(hidden).view(shape)
        return self._out(functional.gelu(self._in(blocks)))


@dataclass(frozen=True)
class Plan:
    """What the forward of a batch needs and only its grids decide, on the device."""

    batch: PackedBatch
    rotations: torch.Tensor
    """Complex, shape (patches, 1, head size / 2)."""
    taps: Taps | None
    """Of the learned positions."""


class QwenVisionTower:
    """The loaded tower.

    Args:
        visual: the weights by transformers' names, on the host. Its blocks are taken from it one by one.
        config: of the tower.
        image: the constants of images.
        video: the constants of videos.
        device: where it runs.
    """

    def __init__(
        self,
        visual: Any,
        config: VisionConfig,
        image: ImagePreprocessing,
        video: ImagePreprocessing,
        device: torch.device,
    ) -> None:
        self._device = device
        convolution = visual.patch_embed.proj
        self._still = PatchEmbedding(convolution, image, device, still=True)
        self._moving = PatchEmbedding(convolution, video, device, still=False)
        self._merge_size = config.spatial_merge_size
        self._window_blocks, self._over_frames = WHOLE_FRAME, frozenset(range(config.depth))
        if isinstance(config, Qwen25Vision):
            self._window_blocks = config.window_size // config.spatial_merge_size // config.patch_size
            self._over_frames = frozenset(config.fullatt_block_indexes)
        attention = visual.blocks[0].attn
        self._head_size: int = attention.head_dim
        self._any_lengths = takes_any_lengths(device, attention.qkv.weight.dtype, self._head_size)
        table = getattr(visual, "pos_embed", None)
        self._positions = None if table is None else PositionTable(table.weight.detach(), device)
        self._blocks: list[Block] = []
        while len(visual.blocks):
            # One by one, so that weights are not held twice.
            self._blocks.append(Block(visual.blocks[0], device))
            del visual.blocks[0]
        self._merger = Merger(visual.merger, self._merge_size, device)
        self._deepstack: dict[int, Merger] = {}
        if isinstance(config, Qwen3Vision):
            mergers = visual.deepstack_merger_list if hasattr(visual, "deepstack_merger_list") else visual.merger_list
            for index, merger in zip(config.deepstack_visual_indexes, mergers, strict=True):
                self._deepstack[index] = Merger(merger, self._merge_size, device)
        self._levels = [*self._deepstack]
        self._plan = lru_cache(maxsize=PLANS)(self._make_plan)

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        """See :meth:`Tower.encode <encoder_svc.models.adapter.Tower.encode>`."""
        # Images before videos: patches of a kind are embedded together.
        places = sorted(range(len(items)), key=lambda place: items[place].tensors[0].shape[1])
        kinds = [items[place] for place in places]
        grids: tuple[Grid, ...] = tuple((item.grid[0], item.grid[1], item.grid[2]) for item in kinds)
        plan = self._plan(grids)
        hidden = self._embed(kinds, plan.batch.order)
        if self._positions is not None and plan.taps is not None:
            hidden += self._positions(plan.taps).to(hidden.dtype)
        levels: dict[int, torch.Tensor] = {}
        for number, block in enumerate(self._blocks):
            segments = plan.batch.frames if number in self._over_frames else plan.batch.windows
            hidden = block(hidden, plan.rotations, segments)
            if number in self._deepstack:
                levels[number] = self._deepstack[number](hidden)
        rows = self._merger(hidden)
        if levels:
            rows = torch.cat([rows, *(levels[number] for number in self._levels)], dim=1)
        rows = rows.index_select(0, plan.batch.block_order_inverse)
        parts = torch.split(rows, [t * h * w // self._merge_size**2 for t, h, w in grids])
        found = dict(zip(places, parts, strict=True))
        return [(found[place],) for place in range(len(items))]

    def _make_plan(self, grids: tuple[Grid, ...]) -> Plan:
        batch = pack(grids, self._merge_size, self._window_blocks, self._any_lengths).to(self._device)
        taps = None
        if self._positions is not None:
            taps = self._positions.taps(grids, batch.positions, batch.order)
        return Plan(batch, rotations(batch.positions, self._head_size), taps)

    def _embed(self, items: Sequence[TowerInput], order: torch.Tensor) -> torch.Tensor:
        """The patches of all items, still ones first, as hidden states in packed order."""
        stills = sum(item.tensors[0].shape[1] == self._still.values for item in items)
        kinds = [
            (embedding, self._gather(part))
            for embedding, part in ((self._still, items[:stills]), (self._moving, items[stills:]))
            if part
        ]
        if len(kinds) == 1:
            embedding, patches = kinds[0]
            return embedding(patches.index_select(0, order))
        return torch.cat([embedding(patches) for embedding, patches in kinds]).index_select(0, order)

    def _gather(self, items: Sequence[TowerInput]) -> torch.Tensor:
        """The patches of items of one kind on the device: one copy of each, asynchronous if its memory is pinned."""
        sizes = [len(item.tensors[0]) for item in items]
        patches = torch.empty((sum(sizes), *items[0].tensors[0].shape[1:]), dtype=torch.uint8, device=self._device)
        for place, item in zip(patches.split(sizes), items, strict=True):
            place.copy_(item.tensors[0], non_blocking=True)
        return patches


def _make_perceptron(source: Any, device: torch.device) -> GatedPerceptron | Perceptron:
    names = dict(source.named_children())
    if "gate_proj" in names:
        return GatedPerceptron(source, device)
    if "fc1" in names:
        return Perceptron((names["fc1"], names["fc2"]), _quick_gelu, device)
    return Perceptron((names["linear_fc1"], names["linear_fc2"]), _tanh_gelu, device)


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(1.702 * x).mul_(x)


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _linear(source: torch.nn.Linear, device: torch.device) -> Linear:
    return Linear(source.weight.detach().to(device), source.bias.detach().to(device))


def _normalise(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden, weight.shape, weight, EPSILON)
