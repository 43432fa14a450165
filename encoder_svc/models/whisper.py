"""Whisper's encoder: a window of 30 s, of which every position is a row, sound or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import AliasChoices, Field

from encoder_svc.models.adapter import Adapter, Progress, Tower
from encoder_svc.models.audio_config import AudioEncoderConfig, check_mel, read_section
from encoder_svc.models.audio_encoder import ConvolutionStem, LayerNorm, LayerStack
from encoder_svc.models.audio_family import AudioFamilyAdapter, PreparedSound, check_fits, valid_frames
from encoder_svc.models.audio_parameters import WhisperEncoder
from encoder_svc.models.audio_tower import load_audio_tower
from encoder_svc.models.checkpoint import open_checkpoint
from encoder_svc.models.mel import MelSettings, log_mel, read_mel_settings
from encoder_svc.models.registry import FAMILIES


class WhisperConfig(AudioEncoderConfig):
    """The encoder's part of config.json. Defaults are those of transformers 5.24."""

    width: int = Field(default=384, ge=1, validation_alias=AliasChoices("d_model", "hidden_size"))
    layers: int = Field(default=4, ge=1, validation_alias="encoder_layers")
    heads: int = Field(default=6, ge=1, validation_alias="encoder_attention_heads")
    intermediate: int = Field(default=1536, ge=1, validation_alias="encoder_ffn_dim")
    num_mel_bins: int = Field(default=80, ge=1)


def prepare_sound(waveform: torch.Tensor, mel: MelSettings) -> PreparedSound:
    """See :data:`~encoder_svc.models.audio_family.PrepareSound`."""
    check_fits(waveform, mel)
    frames = mel.window_frames
    features = log_mel(waveform, mel, mel.window_samples, frames)
    return PreparedSound(features, frames, valid_frames(waveform, mel), frames // 2)


class WhisperForward:
    """The forward of whole windows.

    Args:
        source: the weights. Its layers are taken from it.
        device: where it runs.
    """

    def __init__(self, source: WhisperEncoder, device: torch.device) -> None:
        self._stem = ConvolutionStem(source, device)
        self._positions = source.embed_positions.weight.detach().to(device)
        self._layers = LayerStack(source, device)
        self._norm = LayerNorm(source.layer_norm, device)

    def __call__(self, features: Sequence[torch.Tensor], frames: Sequence[int]) -> list[torch.Tensor]:
        """See :data:`~encoder_svc.models.audio_tower.Forward`."""
        return [self._norm(rows) for rows in self.hidden(features)]

    def hidden(self, windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Windows, each of shape (mels, frames) → the last layer's positions of each, shape (positions, width)."""
        return self._layers((self._stem(torch.stack(list(windows))) + self._positions).unbind(0))


def make_adapter(path: Path, dtype: torch.dtype) -> Adapter:
    """The factory of this family.

    Raises:
        SetupError: the checkpoint cannot be served.
    """
    family, checkpoint = FAMILIES["whisper"], open_checkpoint(path)
    config = read_section(WhisperConfig, checkpoint.config, "config", checkpoint)
    mel = read_mel_settings(checkpoint)
    check_mel(config, mel, checkpoint, window=True)

    def load(device: torch.device, progress: Progress) -> Tower:
        return load_audio_tower(
            checkpoint,
            family,
            lambda: WhisperEncoder(config),
            family.prefixes,
            WhisperForward,
            mel,
            config.width,
            dtype,
            device,
            progress,
        )

    return AudioFamilyAdapter(
        family, dtype, mel.sampling_rate, lambda waveform: prepare_sound(waveform, mel), config.width, load
    )
