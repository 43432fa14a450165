"""What media may be at most, so that a small file cannot take a worker's memory or hours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MediaLimits:
    """The limits, as the settings ``max_*`` name them."""

    image_pixels: int
    """Of a still image."""
    video_pixels: int
    """Of one frame."""
    video_frames: int
    """Of the file, whether or not the model looks at them."""
    video_seconds: float
    audio_seconds: float
