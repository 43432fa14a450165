"""Voxtral: sound of any length in windows of 30 s, silence in the last one included; four positions make a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn import functional

from encoder_svc.errors import SetupError
from encoder_svc.models.adapter import Adapter, Progress, Tower
from encoder_svc.models.audio_config import AudioEncoderConfig, check_mel, read_section
from encoder_svc.models.audio_encoder import to_linear
from encoder_svc.models.audio_family import AudioFamilyAdapter, PreparedSound, valid_frames
from encoder_svc.models.audio_parameters import WhisperEncoder
from encoder_svc.models.audio_tower import load_audio_tower
from encoder_svc.models.checkpoint import open_checkpoint
from encoder_svc.models.mel import MelSettings, log_mel, read_mel_settings
from encoder_svc.models.registry import FAMILIES
from encoder_svc.models.whisper import WhisperForward


class TextConfig(BaseModel):
    """What ``text_config`` says. Defaults are those of transformers 5.24."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    hidden_size: int = Field(default=3072, ge=1)


class ProjectorConfig(BaseModel):
    """What config.json says of the projector."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    projector_hidden_act: Literal["gelu"] = "gelu"


class Projector(nn.Module):
    """``multi_modal_projector``."""

    def __init__(self, inputs: int, hidden_size: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, hidden_size, bias=False)
        self.linear_2 = nn.Linear(hidden_size, hidden_size, bias=False)


class AudioModel(nn.Module):
    """What a checkpoint holds of the tower."""

    def __init__(self, config: AudioEncoderConfig, hidden_size: int) -> None:
        super().__init__()
        self.audio_tower = WhisperEncoder(config)
        self.multi_modal_projector = Projector(config.intermediate, hidden_size)


def prepare_sound(waveform: torch.Tensor, mel: MelSettings, rows_of_window: int) -> PreparedSound:
    """See :data:`~encoder_svc.models.audio_family.PrepareSound`."""
    windows = -(-len(waveform) // mel.window_samples)
    frames = windows * mel.window_frames
    features = log_mel(waveform, mel, windows * mel.window_samples, frames)
    return PreparedSound(features, frames, valid_frames(waveform, mel), windows * rows_of_window)


class VoxtralForward:
    """The forward of whole windows of all sounds.

    Args:
        source: the weights. Its layers are taken from it.
        device: where it runs.
        window_frames: mel frames of a window.
    """

    def __init__(self, source: AudioModel, device: torch.device, window_frames: int) -> None:
        projector = source.multi_modal_projector
        self._inputs: int = projector.linear_1.in_features
        self._encode = WhisperForward(source.audio_tower, device)
        self._first, self._second = (to_linear(layer, device) for layer in (projector.linear_1, projector.linear_2))
        self._window_frames = window_frames

    def __call__(self, features: Sequence[torch.Tensor], frames: Sequence[int]) -> list[torch.Tensor]:
        """See :data:`~encoder_svc.models.audio_tower.Forward`."""
        windows = [window for sound in features for window in sound.split(self._window_frames, dim=1)]
        hidden = torch.cat(self._encode(windows, frames)).view(-1, self._inputs)
        rows = self._second(functional.gelu(self._first(hidden)))
        return list(rows.split([len(rows) * count // sum(frames) for count in frames]))


def make_adapter(path: Path, dtype: torch.dtype) -> Adapter:
    """The factory of this family.

    Raises:
        SetupError: the checkpoint cannot be served.
    """
    family, checkpoint = FAMILIES["voxtral"], open_checkpoint(path)
    config = read_section(AudioEncoderConfig, checkpoint.config.get("audio_config"), "audio_config", checkpoint)
    hidden_size = read_section(TextConfig, checkpoint.config.get("text_config"), "text_config", checkpoint).hidden_size
    read_section(ProjectorConfig, checkpoint.config, "config", checkpoint)
    mel = read_mel_settings(checkpoint)
    check_mel(config, mel, checkpoint, window=True)
    rows, rest = divmod(config.max_source_positions * config.width, config.intermediate)
    if rest:
        raise SetupError(
            f"config.json of {path}: the positions of a window cannot be put together to rows of intermediate_size "
            f"{config.intermediate}"
        )

    def load(device: torch.device, progress: Progress) -> Tower:
        return load_audio_tower(
            checkpoint,
            family,
            lambda: AudioModel(config, hidden_size),
            ("model.", ""),
            lambda module, where: VoxtralForward(module, where, mel.window_frames),
            mel,
            hidden_size,
            dtype,
            device,
            progress,
        )

    return AudioFamilyAdapter(
        family, dtype, mel.sampling_rate, lambda waveform: prepare_sound(waveform, mel, rows), hidden_size, load
    )
