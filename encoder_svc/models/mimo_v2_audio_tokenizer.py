"""MiMo-V2's audio tokenizer: mel spectrograms to codes. It always runs in float32.

Codes are the nearest entries of codebooks, a step function: an error of bfloat16's size changes codes, and each wrong
code changes the residual that all codebooks behind it see.

A segment is tokenized by itself. Where segments are padded to one length, as in public ports, the first convolution's
bias leaks into the last code of a shorter one, and a sound's codes depend on its neighbours; here they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from encoder_svc.models.audio_encoder import LayerNorm, to_linear
from encoder_svc.models.banded_attention import Band, BlockGroup, attend_in_band, plan_band
from encoder_svc.models.linear import Linear
from encoder_svc.models.mimo_v2_config import MimoTokenizer
from encoder_svc.models.mimo_v2_lengths import positions_of

CONVOLVED_FRAMES = 1 << 16
"""Mel frames that are convolved at a time."""


class Layer:
    """Attention and a perceptron, each on a normalised copy and added to what came in.

    Args:
        source: the weights of the layer.
        heads: of the attention.
        device: where it runs.
    """

    def __init__(self, source: Any, heads: int, device: torch.device) -> None:
        self._heads = heads
        attention = source.self_attn
        self._query, self._key, self._value, self._out, self._fc1, self._fc2 = (
            to_linear(layer, device)
            for layer in (
                attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, source.fc1, source.fc2,
            )
        )  # fmt: skip
        self._norm_attention = LayerNorm(source.self_attn_layer_norm, device)
        self._norm_perceptron = LayerNorm(source.final_layer_norm, device)

    def __call__(self, hidden: torch.Tensor, by: torch.Tensor, groups: Sequence[BlockGroup]) -> torch.Tensor:
        """``hidden``: shape (positions, width) → the same; ``by``: the rotations of the positions."""
        normal = self._norm_attention(hidden)
        query, key, value = (
            layer(normal).view(len(hidden), self._heads, -1) for layer in (self._query, self._key, self._value)
        )
        attended = attend_in_band(rotate_halves(query, by), rotate_halves(key, by), value, groups)
        hidden = self._out.plus(attended, hidden)
        return self._fc2.plus(functional.gelu(self._fc1(self._norm_perceptron(hidden))), hidden)


class AudioTokenizer:
    """The encoder and its quantizer.

    Args:
        source: the weights, float32. Its layers are taken from it one by one.
        config: of the tokenizer.
        device: where it runs.
    """

    def __init__(self, source: Any, config: MimoTokenizer, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._first, self._second = (
            (layer.weight.detach().to(device), layer.bias.detach().to(device)) for layer in (source.conv1, source.conv2)
        )
        self._layers: list[Layer] = []
        while len(source.layers):
            self._layers.append(Layer(source.layers[0], config.encoder_attention_heads, device))
            del source.layers[0]
        self._norm = LayerNorm(source.layer_norm, device)
        self._pooler: Linear | None = None
        if config.avg_pooler != 1:
            # A convolution whose stride is its kernel is a product with the positions of a code side by side.
            kernel = source.down_sample_layer[0].weight.detach().transpose(1, 2).flatten(1).to(device)
            self._pooler = Linear(kernel, kernel.new_zeros(len(kernel)))
            self._pooler_norm = LayerNorm(source.down_sample_norm, device)
        self._codebooks = [layer._codebook["embed"].detach().to(device) for layer in source.quantizer.vq.layers]
        back, ahead = (None if size < 0 else size for size in config.encoder_attn_window_size)
        self._window = Band(back, 0 if config.encoder_causal else ahead)
        self._everything = Band(None, 0 if config.encoder_causal else None)

    def __call__(self, segments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tokenizes segments.

        Args:
            segments: mel, each float32, shape (n_mels, frames), on the device.

        Returns:
            The codes of each: int64, shape (codes, codebooks).
        """
        features, lengths = self.features(segments)
        return list(self.quantize(features).split(lengths))

    def features(self, segments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """What the quantizer takes.

        Returns:
            float32, shape (codes of all segments, d_model), and the codes of each segment.
        """
        lengths = [positions_of(segment.shape[1]) for segment in segments]
        hidden = torch.cat([self._convolve(part) for part in _batches(segments)])
        places = torch.cat([torch.arange(length) for length in lengths]).to(self._device)
        by = rotations_in_time(
            places, self._config.d_model // self._config.encoder_attention_heads, self._config.rope_theta
        )
        plans = {band: plan_band(lengths, band, self._device) for band in {self._window, self._everything}}
        kept: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            band = self._window if self._config.is_windowed(number) else self._everything
            hidden = layer(hidden, by, plans[band])
            if number + 1 == self._config.encoder_skip_layer_id:
                kept = hidden
        hidden = self._norm(hidden if kept is None else hidden + kept)
        if self._pooler is None:
            return hidden, lengths
        side = self._config.avg_pooler
        padded = [functional.pad(part, (0, 0, 0, -len(part) % side)) for part in hidden.split(lengths)]
        pooled = self._pooler(torch.cat(padded).view(-1, side * hidden.shape[1]))
        return self._pooler_norm(functional.gelu(pooled)), [len(part) // side for part in padded]

    def quantize(self, features: torch.Tensor) -> torch.Tensor:
        """Codes of features: for each codebook the entry nearest to what those before it left.

        Args:
            features: float32, shape (codes, d_model).

        Returns:
            int64, shape (codes, codebooks).
        """
        residual, codes = features.clone(), []
        for entries in self._codebooks:
            # |r − e|² without |r|², which is the same for all entries.
            distances = torch.addmm(entries.square().sum(1), residual, entries.T, alpha=-2)
            nearest = distances.argmin(dim=1)
            residual -= entries.index_select(0, nearest)
            codes.append(nearest)
        return torch.stack(codes, dim=1)

    def _convolve(self, segments: Sequence[torch.Tensor]) -> torch.Tensor:
        """The two convolutions, for all segments in one: they stand apart in a sequence of silence.

        A segment begins at an even place, so that the second's stride meets it as it would alone, and has at least one
        place behind it, which is zero before each convolution as padding is.
        """
        sizes = [segment.shape[1] for segment in segments]
        starts = list(accumulate((size + 2 - size % 2 for size in sizes), initial=0))
        line = segments[0].new_zeros(len(segments[0]), starts.pop())
        sounding = line.new_zeros(line.shape[1])
        for segment, start, size in zip(segments, starts, sizes, strict=True):
            line[:, start : start + size] = segment
            sounding[start : start + size] = 1
        hidden = functional.gelu(functional.conv1d(line[None], *self._first, padding=1)).mul_(sounding)
        hidden = functional.gelu(functional.conv1d(hidden, *self._second, stride=2, padding=1))[0].T
        return torch.cat(
            [hidden[start // 2 : start // 2 + positions_of(size)] for start, size in zip(starts, sizes, strict=True)]
        )


def _batches(segments: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Segments of about :data:`CONVOLVED_FRAMES` frames together, in their order."""
    batches: list[list[torch.Tensor]] = []
    room = 0
    for segment in segments:
        if segment.shape[1] > room:
            batches.append([])
            room = CONVOLVED_FRAMES
        batches[-1].append(segment)
        room -= segment.shape[1]
    return batches


def rotations_in_time(positions: torch.Tensor, head_size: int, theta: float) -> torch.Tensor:
    """The complex numbers that pairs are multiplied with; the angle of pair i is ``position · theta^(−2i / size)``.

    Args:
        positions: int64, shape (n,).
        head_size: even.
        theta: the base of the frequencies.

    Returns:
        complex64, shape (n, 1, head size / 2), on the device of ``positions``.
    """
    steps = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size
    angles = positions[:, None].float() * (1.0 / theta**steps)
    return torch.polar(torch.ones_like(angles), angles)[:, None]


def rotate_halves(heads: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rotates pairs that stand half a head apart, in float32 whatever the type.

    Args:
        heads: shape (n, heads, head size).
        by: what :func:`rotations_in_time` gave.

    Returns:
        The same shape and type.
    """
    pairs = torch.complex(*heads.float().chunk(2, dim=-1)).mul_(by)
    return torch.cat([pairs.real, pairs.imag], dim=-1).to(heads.dtype)
