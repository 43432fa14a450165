"""How transformers' families that hear differ, as data: a row for each, read by one adapter and one tower.

A family whose model has ``get_audio_features(input_features, input_features_mask)`` needs a row here and one in
:mod:`~encoder_svc.models.registry`, and no code (docs/models.md has an example).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

RowsOfFrames = Callable[[Any, int], int]
"""(the configuration as transformers reads it, mel frames of sound in a window) → rows."""


def _text_width(config: Any) -> int:
    return int(config.text_config.hidden_size)


@dataclass(frozen=True)
class AudioFamily:
    """One family."""

    model: str
    """Transformers' base class, such as ``GlmAsrModel``."""
    rows: RowsOfFrames
    """How many rows a window becomes."""
    width: Callable[[Any], int] = _text_width
    """The length of a row."""
    extractor: str = "WhisperFeatureExtractor"
    """Transformers' feature extractor, where ``feature_extractor_type`` of the checkpoint names none."""
    extraction: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the feature extractor that the family's processor of sound and text sets."""
    has_windows: bool = True
    """A sound is cut into windows of ``chunk_length`` seconds. False: it is one window, whatever its length."""
    most_seconds: float | None = None
    """A longer sound is refused: transformers would cut it."""
    absent: tuple[str, ...] = ("language_model",)
    """Members of the model that are no part of its towers."""


def pooled_rows(config: Any, frames: int) -> int:
    """A convolution of stride 2, then the mean of pairs."""
    return ((frames - 1) // 2 + 1) // 2


def merged_rows(config: Any, frames: int) -> int:
    """A convolution of stride 2, then whole groups of four."""
    return ((frames - 1) // 2 + 1) // 4


DESCRIPTIONS: dict[str, AudioFamily] = {
    "audioflamingo3": AudioFamily("AudioFlamingo3Model", pooled_rows, most_seconds=600),
    "glmasr": AudioFamily("GlmAsrModel", merged_rows, most_seconds=655),
}
"""By ``model_type``."""
