"""Sound in Qwen3-Omni: pieces of 1 s go through convolutions by themselves and attend in windows of eight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional

from encoder_svc.models.audio_config import AudioEncoderConfig
from encoder_svc.models.audio_encoder import LayerNorm, LayerStack, to_linear
from encoder_svc.models.audio_family import PreparedSound, too_short
from encoder_svc.models.audio_parameters import Layers
from encoder_svc.models.mel import MelSettings, log_mel
from encoder_svc.models.sinusoids import sinusoids

ROWS_OF_PIECE = 13
"""Rows of a whole piece. transformers has the number in its code."""


class Qwen3OmniAudioConfig(AudioEncoderConfig):
    """``audio_config`` of the thinker. Defaults are those of transformers 5.24."""

    n_window: int = Field(default=50, ge=1)
    """Half the frames of a piece."""
    n_window_infer: int = Field(default=800, ge=1)
    """Frames that attend to each other."""
    conv_chunksize: int = Field(default=500, ge=1)
    """Pieces that go through the convolutions at a time."""
    downsample_hidden_size: int = Field(default=480, ge=1)
    output_dim: int = Field(default=3584, ge=1)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if _thrice_halved(2 * self.n_window) != ROWS_OF_PIECE:
            raise ValueError(f"n_window {self.n_window} does not give {ROWS_OF_PIECE} rows; 50 does")
        if self.n_window_infer < 2 * self.n_window:
            raise ValueError(f"n_window_infer {self.n_window_infer} is less than a piece of {2 * self.n_window} frames")
        return self


class Qwen3OmniAudioEncoder(Layers):
    """What a checkpoint holds of the tower.

    Args:
        config: of the tower.
    """

    def __init__(self, config: Qwen3OmniAudioConfig) -> None:
        super().__init__(config, key_bias=True)
        channels = config.downsample_hidden_size
        self.conv2d1 = nn.Conv2d(1, channels, 3)
        self.conv2d2 = nn.Conv2d(channels, channels, 3)
        self.conv2d3 = nn.Conv2d(channels, channels, 3)
        self.conv_out = nn.Linear(channels * _thrice_halved(config.num_mel_bins), config.width, bias=False)
        self.ln_post = nn.LayerNorm(config.width)
        self.proj1 = nn.Linear(config.width, config.width)
        self.proj2 = nn.Linear(config.width, config.output_dim)


def rows_of(frames: int, n_window: int) -> int:
    """Rows of so many frames of sound (``_get_feat_extract_output_lengths`` of transformers)."""
    pieces, rest = divmod(frames, 2 * n_window)
    return pieces * ROWS_OF_PIECE + _thrice_halved(rest)


def _thrice_halved(size: int) -> int:
    for _ in range(3):
        size = (size + 1) // 2
    return size


def prepare_sound(waveform: torch.Tensor, mel: MelSettings, n_window: int) -> PreparedSound:
    """See :data:`~encoder_svc.models.audio_family.PrepareSound`. The sound is not padded, and may be of any length."""
    if len(waveform) <= mel.n_fft // 2:
        raise too_short(waveform, mel.sampling_rate)
    frames = len(waveform) // mel.hop_length
    return PreparedSound(log_mel(waveform, mel, len(waveform), frames), frames, frames, rows_of(frames, n_window))


class Qwen3OmniAudioForward:
    """The forward of all pieces of all sounds.

    Args:
        source: the weights. Its layers are taken from it.
        config: of the tower.
        device: where it runs.
    """

    def __init__(self, source: Qwen3OmniAudioEncoder, config: Qwen3OmniAudioConfig, device: torch.device) -> None:
        self._piece = 2 * config.n_window
        self._window = ROWS_OF_PIECE * (config.n_window_infer // self._piece)
        self._at_a_time = config.conv_chunksize
        self._convolutions = [
            (module.weight.detach().to(device), module.bias.detach().to(device))
            for module in (source.conv2d1, source.conv2d2, source.conv2d3)
            if module.bias is not None
        ]
        self._out = to_linear(source.conv_out, device)
        self._positions = sinusoids(ROWS_OF_PIECE, config.width).to(device, source.conv_out.weight.dtype)
        self._layers = LayerStack(source, device)
        self._norm = LayerNorm(source.ln_post, device)
        self._first, self._second = (to_linear(layer, device) for layer in (source.proj1, source.proj2))

    def __call__(self, features: Sequence[torch.Tensor], frames: Sequence[int]) -> list[torch.Tensor]:
        """See :data:`~encoder_svc.models.audio_tower.Forward`."""
        windows = [part.split(self._window) for part in self._embed(features)]
        counts = [sum(len(window) for window in sound) for sound in windows]
        hidden = torch.cat(self._layers([window for sound in windows for window in sound]))
        rows = self._second(functional.gelu(self._first(self._norm(hidden))))
        return list(rows.split(counts))

    def _embed(self, features: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The positions of each sound.

        The last piece of a sound is filled up with zeros, of which the convolutions see some; the only piece of a short
        sound is not. So a sound's rows do not depend on its neighbours, as they do in a batch of transformers.
        """
        cut = [self._pieces(sound) for sound in features]
        whole = [piece for pieces in cut for piece in pieces if piece.shape[1] == self._piece]
        together = iter(self._convolve(torch.stack(whole)) if whole else ())
        embedded = []
        for sound, pieces in zip(features, cut, strict=True):
            parts = [
                next(together) if piece.shape[1] == self._piece else self._convolve(piece[None])[0] for piece in pieces
            ]
            embedded.append(torch.cat(parts)[: rows_of(sound.shape[1], self._piece // 2)])
        return embedded

    def _pieces(self, sound: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = sound.shape[1] % self._piece
        if sound.shape[1] > self._piece and rest:
            sound = functional.pad(sound, (0, self._piece - rest))
        return tuple(sound.split(self._piece, dim=1))

    def _convolve(self, pieces: torch.Tensor) -> torch.Tensor:
        """Shape (pieces, mels, frames) → (pieces, rows, width)."""
        made = []
        for some in pieces[:, None].split(self._at_a_time):
            hidden = some
            for weight, bias in self._convolutions:
                hidden = functional.gelu(functional.conv2d(hidden, weight, bias, stride=2, padding=1))
            made.append(hidden.permute(0, 3, 1, 2).flatten(2))
        flat = torch.cat(made)
        count, rows, _ = flat.shape
        return self._out(flat.flatten(0, 1)).view(count, rows, -1) + self._positions[:rows]
