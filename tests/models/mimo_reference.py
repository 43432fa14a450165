"""MiMo-V2's towers once more, as plainly as they can be written: one item at a time, dense masks, loops.

No release of transformers has this model, so this is what its towers are compared with. Nothing is shared with them but
the checkpoint's files: patches never change their order, bands are masks, sounds are never packed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional

Grid = tuple[int, int, int]


class MimoReference:
    """A checkpoint, all of it in memory."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.tokenizer: dict[str, Any] = json.loads((directory / "audio_tokenizer/config.json").read_text())
        self.weights: dict[str, torch.Tensor] = {}
        for file in sorted(directory.glob("model-*.safetensors")):
            self.weights |= load_file(file)
        self.codebooks = load_file(directory / "audio_tokenizer/model.safetensors")

    # Vision

    def see(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Normalised patches in merge-block order, shape (patches, 3 · 2 · 16 · 16) → rows."""
        config, weights = self.config["vision_config"], self.weights
        frames, high, wide = grid
        kernel = weights["visual.patch_embed.proj.weight"]
        hidden = functional.conv3d(pixels.view(-1, *kernel.shape[1:]), kernel).flatten(1)
        places = [
            (row, column)
            for top in range(0, high, 2)
            for left in range(0, wide, 2)
            for row in (top, top + 1)
            for column in (left, left + 1)
        ]
        # The place that each patch would have, if merge blocks stood column by column.
        by_column = sorted(range(len(places)), key=lambda n: (places[n][1] // 2, places[n][0] // 2, n))
        column_rank = torch.empty(len(places), dtype=torch.int64)
        column_rank[by_column] = torch.arange(len(places))
        ranks = {1: column_rank, 0: torch.arange(len(places)), -1: torch.arange(len(places))}
        angles = self._angles(places, config["qk_channels"])
        rows = []
        for x in hidden.view(frames, high * wide, -1).unbind(0):
            for block, kind in enumerate(config["vit_window_attn_types"]):
                x = self._vision_block(x, block, ranks[kind], angles)  # noqa: PLW2901
            rows.append(self._merge(x))
        return torch.cat(rows)

    def _angles(self, places: list[tuple[int, int]], size: int) -> torch.Tensor:
        frequencies = [10_000.0 ** (-2 * i / (size // 2)) for i in range(size // 4)]
        angles = [[row * f for f in frequencies] + [column * f for f in frequencies] for row, column in places]
        return torch.tensor(angles).repeat(1, 2)

    def _vision_block(self, x: torch.Tensor, block: int, rank: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        config, name = self.config["vision_config"], f"visual.blocks.{block}"
        size, heads, key_heads = config["qk_channels"], config["num_heads"], config["num_key_value_heads"]
        normal = self._rms(x, f"{name}.norm1")
        fused = self._linear(normal, f"{name}.attn.qkv").view(len(x), -1, size)
        query, key, value = fused.split([heads, key_heads, key_heads], dim=1)
        query, key = _rotate(query, angles), _rotate(key, angles)
        sinks = self.weights.get(f"{name}.attn.sinks")
        full = block in config["fullatt_block_indexes"]
        outside = (rank[:, None] - rank).abs() > config["visual_token_window_size"]
        attended = []
        for head in range(heads):
            group = head // (heads // key_heads)
            scores = query[:, head] @ key[:, group].T / math.sqrt(size)
            if not full:
                scores = scores.masked_fill(outside, -math.inf)
            if sinks is not None and config.get("sink_form", "first_key") == "first_key":
                # Patch 0 is the first in both orders.
                scores[:, 0] += sinks[head]
            weights = scores.exp()
            total = weights.sum(dim=1, keepdim=True)
            if sinks is not None and config.get("sink_form") == "softmax":
                total = total + sinks[head].exp()
            attended.append(weights / total @ value[:, group])
        x = x + self._linear(torch.cat(attended, dim=1), f"{name}.attn.proj")
        normal = self._rms(x, f"{name}.norm2")
        gated = functional.silu(self._linear(normal, f"{name}.mlp.gate_proj"))
        return x + self._linear(gated * self._linear(normal, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")

    def _merge(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights["visual.merger.ln_q.weight"]
        if self.config["vision_config"].get("merger_norm", "layer_norm") == "layer_norm":
            x = (x - x.mean(dim=1, keepdim=True)) / (x.var(dim=1, keepdim=True, correction=0) + 1e-6).sqrt() * weight
        else:
            x = x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * weight
        x = functional.gelu(x.reshape(-1, 4 * x.shape[1]) @ self.weights["visual.merger.mlp.0.weight"].T)
        return x @ self.weights["visual.merger.mlp.2.weight"].T

    # Sound

    def mel(self, waveform: np.ndarray) -> torch.Tensor:
        """Samples at 24 kHz → shape (n_mels, frames)."""
        from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

        config = self.tokenizer
        filters = mel_filter_bank(
            config["nfft"] // 2 + 1, config["n_mels"], 0.0, config["sampling_rate"] / 2, config["sampling_rate"],
            norm=None, mel_scale="htk",
        )  # fmt: skip
        levels = spectrogram(
            waveform, window_function(config["nfft"], "hann"), config["nfft"], config["hop_length"], config["nfft"],
            power=1.0, mel_filters=filters, mel_floor=1e-7, log_mel=None,
        )  # fmt: skip
        return torch.from_numpy(np.log(levels)).float()

    def codes(self, mel: torch.Tensor) -> torch.Tensor:
        """One segment → its codes, shape (codes, codebooks)."""
        residual, codes = self.features(mel), []
        for number in range(self.tokenizer["num_quantizers"]):
            entries = self.codebooks[f"encoder.quantizer.vq.layers.{number}._codebook.embed"]
            nearest = torch.tensor([(entries - row).square().sum(dim=1).argmin() for row in residual])
            residual = residual - entries[nearest]
            codes.append(nearest)
        return torch.stack(codes, dim=1)

    def features(self, mel: torch.Tensor) -> torch.Tensor:
        """One segment → what is quantized."""
        weights, config = self.codebooks, self.tokenizer

        def convolve(x: torch.Tensor, name: str, stride: int) -> torch.Tensor:
            bias = weights[f"encoder.{name}.bias"]
            return functional.gelu(functional.conv1d(x, weights[f"encoder.{name}.weight"], bias, stride, 1))

        x = convolve(convolve(mel[None], "conv1", 1), "conv2", 2)[0].T
        kept = torch.zeros(())
        for layer in range(config["encoder_layers"]):
            x = self._tokenizer_layer(x, layer)
            if layer + 1 == config["encoder_skip_layer_id"]:
                kept = x
        x = self._layer_norm(x + kept, "encoder.layer_norm")
        if len(x) % 2:
            x = torch.cat([x, torch.zeros(1, x.shape[1])])
        x = functional.conv1d(x.T[None], weights["encoder.down_sample_layer.0.weight"], stride=2)[0].T
        return self._layer_norm(functional.gelu(x), "encoder.down_sample_norm")

    def _tokenizer_layer(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        config, name = self.tokenizer, f"encoder.layers.{layer}"
        heads = config["encoder_attention_heads"]
        normal = self._layer_norm(x, f"{name}.self_attn_layer_norm")
        size = x.shape[1] // heads
        query, key, value = (
            self._linear(normal, f"{name}.self_attn.{kind}_proj", self.codebooks).view(len(x), heads, size)
            for kind in "qkv"
        )
        angles = _angles_in_time(len(x), size, 10_000.0)
        query, key = _rotate(query, angles), _rotate(key, angles)
        back, ahead = config["encoder_attn_window_size"]
        distance = torch.arange(len(x)) - torch.arange(len(x))[:, None]
        seen = torch.ones(len(x), len(x), dtype=torch.bool)
        if layer % config["swa_per_block"] < config["swa_per_block"] - 1 or not config["hybrid_attention"]:
            seen &= (distance >= -back) if back >= 0 else True
            seen &= (distance <= ahead) if ahead >= 0 else True
        if config["encoder_causal"]:
            seen &= distance <= 0
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(dim=-1), value)
        x = x + self._linear(attended.flatten(1), f"{name}.self_attn.out_proj", self.codebooks)
        normal = self._layer_norm(x, f"{name}.final_layer_norm")
        inner = functional.gelu(self._linear(normal, f"{name}.fc1", self.codebooks))
        return x + self._linear(inner, f"{name}.fc2", self.codebooks)

    def hear(self, mel: torch.Tensor) -> torch.Tensor:
        """A whole sound, shape (n_mels, frames) → rows."""
        config = self.config["audio_config"]
        step = config["audio_segment_size"]
        codes = torch.cat([self.codes(mel[:, start : start + step]) for start in range(0, mel.shape[1], step)])
        while len(codes) % config["group_size"]:
            codes = torch.cat([codes, codes[-1:]])
        tables = [self.weights[f"speech_embeddings.{channel}.weight"] for channel in range(config["audio_channels"])]
        embedded = torch.stack(
            [torch.stack([table[code] for table, code in zip(tables, row, strict=True)]).sum(0) for row in codes]
        )
        groups = embedded.view(-1, config["group_size"], embedded.shape[1])
        hidden = self._local_transformer(groups).flatten(1)
        hidden = functional.gelu(hidden @ self.weights["audio_encoder.projection.mlp.0.weight"].T)
        return hidden @ self.weights["audio_encoder.projection.mlp.2.weight"].T

    def _local_transformer(self, groups: torch.Tensor) -> torch.Tensor:
        """Qwen2 of transformers, told that every step of a group sees every other."""
        from transformers import Qwen2Config, Qwen2Model

        config, prefix = self.config["audio_config"], "audio_encoder.input_local_transformer."
        width = config["input_local_dim"]
        model = Qwen2Model(
            Qwen2Config(
                vocab_size=1,
                hidden_size=width,
                num_hidden_layers=config["input_local_layers"],
                num_attention_heads=config["input_local_attn_heads"],
                num_key_value_heads=config["input_local_attn_heads"],
                intermediate_size=config["input_local_intermediate_size"],
                rope_parameters={"rope_type": "default", "rope_theta": float(config["rope_theta"])},
                rms_norm_eps=1e-6,
            )
        ).eval()
        state = {n.removeprefix(prefix): tensor for n, tensor in self.weights.items() if n.startswith(prefix)}
        model.load_state_dict({**state, "embed_tokens.weight": torch.zeros(1, width)})
        everything = torch.zeros(len(groups), 1, config["group_size"], config["group_size"])
        with torch.inference_mode():
            hidden: torch.Tensor = model(inputs_embeds=groups, attention_mask=everything).last_hidden_state
        return hidden

    # Pieces

    def _linear(self, x: torch.Tensor, name: str, weights: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        weights = self.weights if weights is None else weights
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def _rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * self.weights[f"{name}.weight"]

    def _layer_norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.codebooks[f"{name}.weight"], self.codebooks[f"{name}.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, 1e-5)


def _angles_in_time(steps: int, size: int, theta: float) -> torch.Tensor:
    return torch.tensor([[t * theta ** (-2 * i / size) for i in range(size // 2)] for t in range(steps)]).repeat(1, 2)


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Shape (n, heads, size), angles (n, size)."""
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos()[:, None] + torch.cat([-second, first], dim=-1) * angles.sin()[:, None]
