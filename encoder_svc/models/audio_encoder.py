"""The audio encoder of Whisper and its kin as a forward of our own that packs a batch.

transformers reads the weights and is what tests compare with. Differences from its forward: only frames that count are
computed; sounds of all lengths go through a layer together, and attention takes all segments of one length in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch.nn import functional

from encoder_svc.models.linear import Linear
from encoder_svc.models.packing import SegmentBounds, SegmentGroup, Segments
from encoder_svc.models.segment_attention import attend, takes_any_lengths

FLOAT16_LIMIT = torch.finfo(torch.float16).max - 1000
"""transformers keeps hidden states of this type below it."""


class LayerNorm:
    """A layer norm.

    Args:
        source: transformers' module.
        device: where it runs.
    """

    def __init__(self, source: torch.nn.LayerNorm, device: torch.device) -> None:
        self._weight = source.weight.detach().to(device)
        self._bias = source.bias.detach().to(device)
        self._epsilon = source.eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (…, width) → the same."""
        return functional.layer_norm(hidden, self._weight.shape, self._weight, self._bias, self._epsilon)


class ConvolutionStem:
    """The two convolutions that make a position of every two mel frames.

    Args:
        source: transformers' encoder, with ``conv1`` and ``conv2``.
        device: where it runs.
    """

    def __init__(self, source: Any, device: torch.device) -> None:
        self._first, self._second = (
            (module.weight.detach().to(device), module.bias.detach().to(device))
            for module in (source.conv1, source.conv2)
        )

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """``features``: shape (sounds, mels, frames) → shape (sounds, ⌈frames / 2⌉, width)."""
        hidden = functional.gelu(functional.conv1d(features, *self._first, padding=1))
        hidden = functional.gelu(functional.conv1d(hidden, *self._second, stride=2, padding=1))
        return hidden.transpose(1, 2)


class Layer:
    """Attention and a perceptron, each on a normalised copy and added to what came in.

    Args:
        source: transformers' layer.
        device: where it runs.
    """

    def __init__(self, source: Any, device: torch.device) -> None:
        attention = source.self_attn
        self._heads: int = attention.num_heads
        self._norm_attention = LayerNorm(source.self_attn_layer_norm, device)
        self._norm_perceptron = LayerNorm(source.final_layer_norm, device)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._qkv = Linear(
            torch.cat([projection.weight.detach() for projection in projections]).to(device),
            torch.cat([_bias(projection) for projection in projections]).to(device),
        )
        self._out, self._fc1, self._fc2 = (
            to_linear(module, device) for module in (attention.out_proj, source.fc1, source.fc2)
        )

    def __call__(self, hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
        """``hidden``: shape (positions, width) → the same."""
        fused = self._qkv(self._norm_attention(hidden)).view(len(hidden), 3, self._heads, -1)
        hidden = self._out.plus(attend(fused, segments), hidden)
        hidden = self._fc2.plus(functional.gelu(self._fc1(self._norm_perceptron(hidden))), hidden)
        return hidden.clamp_(-FLOAT16_LIMIT, FLOAT16_LIMIT) if hidden.dtype == torch.float16 else hidden


class LayerStack:
    """The layers of an encoder.

    Args:
        source: transformers' encoder. Its layers are taken from it one by one.
        device: where they run.
    """

    def __init__(self, source: Any, device: torch.device) -> None:
        attention = source.layers[0].self_attn
        self._any_lengths = takes_any_lengths(device, attention.q_proj.weight.dtype, attention.head_dim)
        self._layers: list[Layer] = []
        while len(source.layers):
            # One by one, so that weights are not held twice.
            self._layers.append(Layer(source.layers[0], device))
            del source.layers[0]

    def __call__(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Takes positions through the layers; those of one part attend to each other.

        Args:
            parts: at least one, each of shape (positions, width).

        Returns:
            The same shapes.
        """
        order = sorted(range(len(parts)), key=lambda number: len(parts[number]))
        lengths = [len(parts[number]) for number in order]
        hidden = torch.cat([parts[number] for number in order])
        segments = self._bounds(lengths, hidden.device) if self._any_lengths else _groups(lengths)
        for layer in self._layers:
            hidden = layer(hidden, segments)
        made = dict(zip(order, hidden.split(lengths), strict=True))
        return [made[number] for number in range(len(parts))]

    def _bounds(self, lengths: Sequence[int], device: torch.device) -> SegmentBounds:
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        # A copy out of memory that is not pinned would wait until the batch before has run.
        return SegmentBounds(bounds.pin_memory().to(device, non_blocking=True), max(lengths))


def to_linear(source: torch.nn.Linear, device: torch.device) -> Linear:
    """A linear layer of transformers, on a device."""
    return Linear(source.weight.detach().to(device), _bias(source).to(device))


def _bias(source: torch.nn.Linear) -> torch.Tensor:
    bias: torch.Tensor | None = source.bias
    return source.weight.new_zeros(source.out_features) if bias is None else bias.detach()


def _groups(lengths: Sequence[int]) -> tuple[SegmentGroup, ...]:
    groups, start = [], 0
    for length, run in groupby(lengths):
        count = len(list(run))
        groups.append(SegmentGroup(count, length, start, None))
        start += count * length
    return tuple(groups)
