"""The mel spectrogram of MiMo-V2's audio tokenizer: magnitudes, HTK's mel scale, natural logarithm."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional

from encoder_svc.models.mimo_v2_config import MimoTokenizer

FAINTEST = 1e-7
"""The least magnitude of a band."""

CHUNK_FRAMES = 6000
"""Frames that are transformed at a time: the spectrum of an hour would take gigabytes."""


def log_mel(waveform: torch.Tensor, config: MimoTokenizer) -> torch.Tensor:
    """The logarithms of mel magnitudes of a sound.

    Equal to torchaudio's ``MelSpectrogram(power=1.0, center=True, norm=None, mel_scale="htk")`` behind
    ``log(clip(…, 1e-7))``. A sound shorter than half a window, which that refuses, gets silence behind it.

    Args:
        waveform: float32, shape (samples,), at ``config.sampling_rate``.
        config: the settings.

    Returns:
        float32, shape (n_mels, frames), with ``samples // hop_length + 1`` frames.
    """
    hop, size = config.hop_length, config.nfft
    waveform = functional.pad(waveform, (0, max(0, size // 2 + 1 - len(waveform))))
    frames = len(waveform) // hop + 1
    mirrored = functional.pad(waveform[None], (size // 2, size // 2), mode="reflect")[0]
    window, filters = torch.hann_window(size), _filters(config)
    levels = torch.empty(config.n_mels, frames)
    for start in range(0, frames, CHUNK_FRAMES):
        count = min(CHUNK_FRAMES, frames - start)
        part = mirrored[start * hop : (start + count - 1) * hop + size]
        spectrum = torch.stft(part, size, hop, window=window, center=False, return_complex=True)
        torch.mm(filters, spectrum.abs(), out=levels[:, start : start + count])
    return levels.clamp_(min=FAINTEST).log_()


@lru_cache(maxsize=4)
def _filters(config: MimoTokenizer) -> torch.Tensor:
    """Triangles of height 1, equally far apart on HTK's mel scale; shape (n_mels, nfft / 2 + 1)."""
    nyquist = config.sampling_rate / 2
    bins = torch.linspace(0, nyquist, config.nfft // 2 + 1, dtype=torch.float64)
    lowest, highest = (
        2595 * torch.log10(torch.tensor(1 + hertz / 700, dtype=torch.float64)).item()
        for hertz in (config.fmin, nyquist if config.fmax is None else config.fmax)
    )
    mels = torch.linspace(lowest, highest, config.n_mels + 2, dtype=torch.float64)
    corners = 700 * (10 ** (mels / 2595) - 1)
    lower, center, upper = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (bins - lower) / (center - lower), (upper - bins) / (upper - center)
    return torch.minimum(rising, falling).clamp(min=0).float()
