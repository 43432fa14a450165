"""Qwen2-Audio: up to 30 s; four mel frames make a row, and only frames of sound are attended to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from encoder_svc.models.adapter import Adapter, Progress, Tower
from encoder_svc.models.audio_config import AudioEncoderConfig, check_mel, read_section
from encoder_svc.models.audio_encoder import ConvolutionStem, LayerNorm, LayerStack, to_linear
from encoder_svc.models.audio_family import AudioFamilyAdapter, PreparedSound, check_fits, too_short, valid_frames
from encoder_svc.models.audio_parameters import WhisperEncoder
from encoder_svc.models.audio_tower import load_audio_tower
from encoder_svc.models.checkpoint import open_checkpoint
from encoder_svc.models.mel import MelSettings, log_mel, read_mel_settings
from encoder_svc.models.registry import FAMILIES

SEEN_BEYOND = 2
"""Frames of silence behind the last one of sound that its position sees through the two convolutions."""


class TextConfig(BaseModel):
    """What ``text_config`` says. Defaults are those of transformers 5.24."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    hidden_size: int = Field(default=4096, ge=1)


class Projector(nn.Module):
    """``multi_modal_projector``."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden_size)


class AudioModel(nn.Module):
    """What a checkpoint holds of the tower."""

    def __init__(self, config: AudioEncoderConfig, hidden_size: int) -> None:
        super().__init__()
        self.audio_tower = WhisperEncoder(config)
        self.multi_modal_projector = Projector(config.width, hidden_size)


def positions_of(frames: int) -> int:
    """Positions behind the convolutions."""
    return (frames - 1) // 2 + 1


def rows_of(frames: int) -> int:
    """Rows of so many frames of sound (``_get_feat_extract_output_lengths`` of transformers)."""
    return (positions_of(frames) - 2) // 2 + 1


def prepare_sound(waveform: torch.Tensor, mel: MelSettings) -> PreparedSound:
    """See :data:`~encoder_svc.models.audio_family.PrepareSound`."""
    check_fits(waveform, mel)
    frames = valid_frames(waveform, mel)
    if rows_of(frames) < 1:
        raise too_short(waveform, mel.sampling_rate)
    features = log_mel(waveform, mel, mel.window_samples, min(frames + SEEN_BEYOND, mel.window_frames))
    return PreparedSound(features, frames, frames, rows_of(frames))


class Qwen2AudioForward:
    """The forward of the frames of sound.

    Args:
        source: the weights. Its layers are taken from it.
        device: where it runs.
    """

    def __init__(self, source: AudioModel, device: torch.device) -> None:
        encoder = source.audio_tower
        self._stem = ConvolutionStem(encoder, device)
        self._positions = encoder.embed_positions.weight.detach().to(device)
        self._layers = LayerStack(encoder, device)
        self._norm = LayerNorm(encoder.layer_norm, device)
        self._project = to_linear(source.multi_modal_projector.linear, device)

    def __call__(self, features: Sequence[torch.Tensor], frames: Sequence[int]) -> list[torch.Tensor]:
        """See :data:`~encoder_svc.models.audio_tower.Forward`."""
        counts = [positions_of(count) for count in frames]
        parts = self._layers(
            [
                self._stem(sound[None])[0, :count] + self._positions[:count]
                for sound, count in zip(features, counts, strict=True)
            ]
        )
        pooled = [mean_of_pairs(part) for part in parts]
        rows = self._project(self._norm(torch.cat(pooled)))
        return list(rows.split([len(part) for part in pooled]))


def mean_of_pairs(hidden: torch.Tensor) -> torch.Tensor:
    """Shape (positions, width) → (⌊positions / 2⌋, width)."""
    count = len(hidden) // 2
    return hidden[: 2 * count].view(count, 2, -1).mean(1)


def make_adapter(path: Path, dtype: torch.dtype) -> Adapter:
    """The factory of this family.

    Raises:
        SetupError: the checkpoint cannot be served.
    """
    family, checkpoint = FAMILIES["qwen2_audio"], open_checkpoint(path)
    config = read_section(AudioEncoderConfig, checkpoint.config.get("audio_config"), "audio_config", checkpoint)
    hidden_size = read_section(TextConfig, checkpoint.config.get("text_config"), "text_config", checkpoint).hidden_size
    mel = read_mel_settings(checkpoint)
    check_mel(config, mel, checkpoint, window=True)

    def load(device: torch.device, progress: Progress) -> Tower:
        return load_audio_tower(
            checkpoint,
            family,
            lambda: AudioModel(config, hidden_size),
            ("model.", ""),
            Qwen2AudioForward,
            mel,
            hidden_size,
            dtype,
            device,
            progress,
        )

    return AudioFamilyAdapter(
        family, dtype, mel.sampling_rate, lambda waveform: prepare_sound(waveform, mel), hidden_size, load
    )
