"""MiMo-V2's way from a sound to rows: tokenizer, speech embeddings, local transformer, projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from encoder_svc.models.audio_encoder import to_linear
from encoder_svc.models.linear import Linear
from encoder_svc.models.mimo_v2_audio_tokenizer import AudioTokenizer, rotate_halves, rotations_in_time
from encoder_svc.models.mimo_v2_config import MimoAudio

EPSILON = 1e-6
"""Of every normalisation."""


class LocalLayer:
    """A layer of Qwen2 over groups of time steps that look at nobody outside their group.

    Args:
        source: the weights of the layer.
        config: of the tower.
        device: where it runs.
    """

    def __init__(self, source: Any, config: MimoAudio, device: torch.device) -> None:
        self._config = config
        self._norm_attention, self._norm_perceptron = (
            norm.weight.detach().to(device) for norm in (source.input_layernorm, source.post_attention_layernorm)
        )
        attention = source.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._qkv = Linear(
            torch.cat([layer.weight.detach() for layer in projections]).to(device),
            torch.cat([layer.bias.detach() for layer in projections]).to(device),
        )
        self._out, self._gate, self._up, self._down = (
            to_linear(layer, device)
            for layer in (attention.o_proj, source.mlp.gate_proj, source.mlp.up_proj, source.mlp.down_proj)
        )

    def __call__(self, hidden: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """``hidden``: shape (groups · group_size, width) → the same; ``by``: the rotations of all steps."""
        config = self._config
        fused = self._qkv(_normalise(hidden, self._norm_attention))
        fused = fused.view(len(hidden), 3 * config.input_local_attn_heads, config.input_local_head_dim)
        query, key, value = fused.chunk(3, dim=1)
        query, key, value = (
            part.reshape(-1, config.group_size, *part.shape[1:]).transpose(1, 2)
            for part in (rotate_halves(query, by), rotate_halves(key, by), value)
        )
        causal = not config.input_full_attention
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        hidden = self._out.plus(attended.transpose(1, 2).reshape(len(hidden), -1), hidden)
        normal = _normalise(hidden, self._norm_perceptron)
        gate = functional.silu(self._gate(normal), inplace=True)
        return self._down.plus(self._up.times(normal, gate), hidden)


class SoundForward:
    """The audio tower.

    Args:
        source: the weights of embeddings, local transformer and projection. Its layers are taken from it one by one.
        config: of these.
        tokenizer: the tokenizer.
        device: where it runs.
    """

    def __init__(self, source: Any, config: MimoAudio, tokenizer: AudioTokenizer, device: torch.device) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._device = device
        self._tables = [table.weight.detach().to(device) for table in source.speech_embeddings]
        local = source.audio_encoder.input_local_transformer
        self._layers: list[LocalLayer] = []
        while len(local.layers):
            self._layers.append(LocalLayer(local.layers[0], config, device))
            del local.layers[0]
        self._norm = local.norm.weight.detach().to(device) if config.add_post_norm else None
        projection = source.audio_encoder.projection
        layers = (projection,) if config.projection_layers == 1 else (projection.mlp[0], projection.mlp[2])
        self._projection = [to_linear(layer, device) for layer in layers]

    def __call__(self, sounds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Encodes sounds.

        Args:
            sounds: mel of each, float32, shape (n_mels, frames).

        Returns:
            The rows of each, shape (rows, out_hidden_size).
        """
        segments = [
            segment
            for sound in sounds
            for segment in sound.to(self._device, non_blocking=True).split(self._config.audio_segment_size, dim=1)
        ]
        codes = self._tokenizer(segments)
        grouped, rows = [], []
        for sound in sounds:
            count = -(-sound.shape[1] // self._config.audio_segment_size)
            grouped.append(self._fill_group(torch.cat(codes[:count])))
            rows.append(len(grouped[-1]) // self._config.group_size)
            del codes[:count]
        return list(self.embed(torch.cat(grouped)).split(rows))

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes → rows.

        Args:
            codes: int64, shape (rows · group_size, channels).
        """
        hidden = self._tables[0].index_select(0, codes[:, 0])
        for table, channel in zip(self._tables[1:], codes.unbind(1)[1:], strict=False):
            hidden += table.index_select(0, channel)
        places = torch.arange(self._config.group_size, device=self._device).repeat(
            len(codes) // self._config.group_size
        )
        by = rotations_in_time(places, self._config.input_local_head_dim, self._config.rope_theta)
        for layer in self._layers:
            hidden = layer(hidden, by)
        if self._norm is not None:
            hidden = _normalise(hidden, self._norm)
        rows = self._projection[0](hidden.view(-1, self._config.group_size * hidden.shape[1]))
        for projection in self._projection[1:]:
            rows = projection(functional.gelu(rows))
        return rows

    def _fill_group(self, codes: torch.Tensor) -> torch.Tensor:
        """The channels that have a table; the last step is repeated to fill the last group."""
        missing = -len(codes) % self._config.group_size
        return torch.cat([codes, codes[-1:].expand(missing, -1)])[:, : self._config.audio_channels]


def _normalise(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden, weight.shape, weight, EPSILON)
