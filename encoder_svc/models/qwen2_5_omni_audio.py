"""Sound in Qwen2.5-Omni: windows of 2 s that see nothing of each other; four mel frames make a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import nn

from encoder_svc.models.audio_config import AudioEncoderConfig
from encoder_svc.models.audio_encoder import ConvolutionStem, LayerNorm, LayerStack, to_linear
from encoder_svc.models.audio_family import PreparedSound, check_fits, too_short, valid_frames
from encoder_svc.models.audio_parameters import ConvolutionLayers
from encoder_svc.models.mel import MelSettings, log_mel
from encoder_svc.models.qwen2_audio import mean_of_pairs, rows_of
from encoder_svc.models.sinusoids import sinusoids


class Qwen25OmniAudioConfig(AudioEncoderConfig):
    """``audio_config`` of the thinker. Defaults are those of transformers 5.24."""

    n_window: int = Field(default=100, ge=1)
    """Half the frames of a window."""
    output_dim: int = Field(default=3584, ge=1)


class Qwen25OmniAudioEncoder(ConvolutionLayers):
    """What a checkpoint holds of the tower.

    Args:
        config: of the tower.
    """

    def __init__(self, config: Qwen25OmniAudioConfig) -> None:
        super().__init__(config)
        self.ln_post = nn.LayerNorm(config.width)
        self.proj = nn.Linear(config.width, config.output_dim)
        # The language model's, for the tokens around a sound; transformers keeps them here and uses its own table.
        self.audio_bos_eos_token = nn.Embedding(2, config.output_dim)


def prepare_sound(waveform: torch.Tensor, mel: MelSettings) -> PreparedSound:
    """See :data:`~encoder_svc.models.audio_family.PrepareSound`."""
    check_fits(waveform, mel)
    frames = valid_frames(waveform, mel)
    if rows_of(frames) < 1:
        raise too_short(waveform, mel.sampling_rate)
    return PreparedSound(log_mel(waveform, mel, mel.window_samples, frames), frames, frames, rows_of(frames))


class Qwen25OmniAudioForward:
    """The forward of all windows of all sounds.

    Args:
        source: the weights. Its layers are taken from it.
        config: of the tower.
        device: where it runs.
    """

    def __init__(self, source: Qwen25OmniAudioEncoder, config: Qwen25OmniAudioConfig, device: torch.device) -> None:
        self._window = 2 * config.n_window
        self._stem = ConvolutionStem(source, device)
        self._positions = sinusoids(config.n_window, config.width).to(device, source.conv1.weight.dtype)
        self._layers = LayerStack(source, device)
        self._norm = LayerNorm(source.ln_post, device)
        self._project = to_linear(source.proj, device)

    def __call__(self, features: Sequence[torch.Tensor], frames: Sequence[int]) -> list[torch.Tensor]:
        """See :data:`~encoder_svc.models.audio_tower.Forward`."""
        windows = [sound.split(self._window, dim=1) for sound in features]
        parts = iter(self._layers(self._embed([window for sound in windows for window in sound])))
        pooled = [mean_of_pairs(torch.cat([next(parts) for _ in sound])) for sound in windows]
        rows = self._project(self._norm(torch.cat(pooled)))
        return list(rows.split([len(part) for part in pooled]))

    def _embed(self, windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The positions of each window; whole ones go through the convolutions together."""
        whole = [window for window in windows if window.shape[1] == self._window]
        together = iter(self._stem(torch.stack(whole)) if whole else ())
        hidden = [
            next(together) if window.shape[1] == self._window else self._stem(window[None])[0] for window in windows
        ]
        return [part + self._positions[: len(part)] for part in hidden]
