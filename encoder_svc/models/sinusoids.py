"""Positions as sines and cosines, as Whisper's kin compute those that are not in their checkpoints."""

from __future__ import annotations

import math

import torch

LONGEST = 10_000
"""The greatest wavelength, over 2π."""


def sinusoids(positions: int, width: int) -> torch.Tensor:
    """Sines in the first half of a row, cosines in the second; float32, shape (positions, width)."""
    step = math.log(LONGEST) / (width // 2 - 1)
    wavelengths = torch.exp(-step * torch.arange(width // 2).float())
    angles = torch.arange(positions)[:, None] * wavelengths[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1)
