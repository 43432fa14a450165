"""The log-mel spectrogram of Whisper and its kin, as ``transformers.WhisperFeatureExtractor`` makes it.

An item is prepared alone, so its features never depend on a neighbour's length. Only frames in which there is sound are
computed; those of the padding behind them have one value, which is known.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.nn import functional

from encoder_svc.errors import SetupError
from encoder_svc.models.checkpoint import Checkpoint

log = logging.getLogger(__name__)

USUAL_SAMPLING_RATE = 16_000
"""Hertz: what is taken where a checkpoint names no rate."""

HIGHEST_FREQUENCY = 8_000.0
"""Hertz: where the highest mel band ends, whatever the sampling rate."""

FAINTEST = 1e-10
"""The least power of a band."""

BLOCK_FRAMES = 1000
"""Frames that are computed at a time: their spectrum takes 1.6 MB, and stays in a CPU's cache."""

RANGE = 8.0
"""Powers of ten between the loudest and the faintest value of an item."""


class MelSettings(BaseModel):
    """What the feature extractor's settings say. Defaults are those of transformers 5.24."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    sampling_rate: int = Field(ge=1)
    feature_size: int = Field(default=80, ge=1)
    """Mel bands."""
    hop_length: int = Field(default=160, ge=1)
    """Samples from one frame to the next."""
    n_fft: int = Field(default=400, ge=2)
    """Samples that a frame looks at."""
    chunk_length: int = Field(default=30, ge=1)
    """Seconds of the window that the model takes."""
    padding_value: Literal[0] = 0
    dither: Literal[0] = 0
    """transformers can add noise, which would make equal sounds differ."""

    @property
    def window_samples(self) -> int:
        """Samples of the window that the model takes."""
        return self.chunk_length * self.sampling_rate

    @property
    def window_frames(self) -> int:
        """Frames of the window that the model takes."""
        return self.window_samples // self.hop_length


def read_mel_settings(checkpoint: Checkpoint) -> MelSettings:
    """The settings of a checkpoint's feature extractor.

    Raises:
        SetupError: they are none that can be computed.
    """
    settings = {**checkpoint.feature_extractor, "sampling_rate": find_sampling_rate(checkpoint)}
    try:
        return MelSettings.model_validate(settings)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise SetupError(
            f"the feature extractor's settings of {checkpoint.path}: {where}: {fault['msg']}; they must be those of a "
            "WhisperFeatureExtractor"
        ) from None


def find_sampling_rate(checkpoint: Checkpoint) -> int:
    """The rate in hertz that a checkpoint's audio tower takes.

    It is looked for in the feature extractor's settings, then in the audio section of the config. If neither names it,
    16 kHz is taken, with a warning in the log.
    """
    config = checkpoint.config
    thinker: Any = config.get("thinker_config")
    sections = (
        checkpoint.feature_extractor,
        thinker.get("audio_config") if isinstance(thinker, dict) else None,
        config.get("audio_config"),
        config,
    )
    for section in sections:
        rate = section.get("sampling_rate") if isinstance(section, dict) else None
        if isinstance(rate, int) and rate > 0:
            return rate
    log.warning(
        "%s names no sampling rate; %d Hz are taken. If the model takes another, set sampling_rate in its "
        "preprocessor_config.json",
        checkpoint.path, USUAL_SAMPLING_RATE,
    )  # fmt: skip
    return USUAL_SAMPLING_RATE


def log_mel(waveform: torch.Tensor, settings: MelSettings, padded: int, frames: int) -> torch.Tensor:
    """The log-mel spectrogram of a sound with silence behind it.

    ``(max(log10 P, max log10 P − 8) + 4) / 4`` of the mel powers P of the padded sound, without its last frame.

    Args:
        waveform: float32, shape (samples,), at least one, at ``settings.sampling_rate``.
        settings: of the feature extractor.
        padded: samples with the silence; more than ``n_fft`` / 2.
        frames: to return, from the start; at most ``padded`` // hop_length.

    Returns:
        float32, shape (feature_size, frames).
    """
    hop, reach = settings.hop_length, settings.n_fft // 2
    every = padded // hop
    # A frame looks at `reach` samples to both sides of its place.
    sounding = min(every, -(-(len(waveform) + reach) // hop))
    length = padded if sounding == every else sounding * hop
    sound = functional.pad(waveform, (0, length - len(waveform)))
    sound = functional.pad(sound[None], (reach, reach), mode="reflect")[0]
    levels = torch.empty(settings.feature_size, sounding)
    for begin in range(0, sounding, BLOCK_FRAMES):
        end = min(sounding, begin + BLOCK_FRAMES)
        part = sound[begin * hop : (end - 1) * hop + settings.n_fft]
        spectrum = torch.stft(
            part, settings.n_fft, hop, window=_window(settings.n_fft), center=False, return_complex=True
        )
        # Not abs(): it takes a root that would be squared again.
        powers = spectrum.real.square().addcmul_(spectrum.imag, spectrum.imag)
        torch.matmul(_filters(settings), powers, out=levels[:, begin:end])
    levels.clamp_(min=FAINTEST).log10_()
    loudest = levels.max()
    if sounding < every:
        loudest = loudest.clamp(min=math.log10(FAINTEST))
    levels = torch.maximum(levels, loudest - RANGE).add_(4.0).div_(4.0)
    if frames <= sounding:
        return levels[:, :frames].contiguous()
    silence = (torch.clamp(loudest - RANGE, min=math.log10(FAINTEST)) + 4.0) / 4.0
    features = silence.repeat(settings.feature_size, frames)
    features[:, :sounding] = levels
    return features


@lru_cache(maxsize=4)
def _window(size: int) -> torch.Tensor:
    return torch.hann_window(size)


@lru_cache(maxsize=4)
def _filters(settings: MelSettings) -> torch.Tensor:
    """Triangles that are equally far apart on Slaney's mel scale and of equal area; shape (bands, n_fft / 2 + 1)."""
    bins = torch.linspace(0, settings.sampling_rate // 2, settings.n_fft // 2 + 1, dtype=torch.float64)
    corners = _hertz(torch.linspace(0, _mel(HIGHEST_FREQUENCY), settings.feature_size + 2, dtype=torch.float64))
    lower, center, upper = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (bins - lower) / (center - lower), (upper - bins) / (upper - center)
    triangles = torch.minimum(rising, falling).clamp(min=0)
    return (triangles * 2 / (upper - lower)).float()


# Slaney's scale (Auditory Toolbox, 1998): linear up to 1 kHz, which is 15 mel, and logarithmic above.
_KNEE_HERTZ, _KNEE_MEL = 1_000.0, 15.0
_STEP = math.log(6.4) / 27


def _mel(hertz: float) -> float:
    return 3 * hertz / 200 if hertz < _KNEE_HERTZ else _KNEE_MEL + math.log(hertz / _KNEE_HERTZ) / _STEP


def _hertz(mel: torch.Tensor) -> torch.Tensor:
    return torch.where(mel < _KNEE_MEL, 200 * mel / 3, _KNEE_HERTZ * torch.exp(_STEP * (mel - _KNEE_MEL)))
