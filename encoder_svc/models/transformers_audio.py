"""Any family of transformers that encodes sound by ``get_audio_features``: the half of it that prepares.

What differs between families is data (:mod:`~encoder_svc.models.audio_families`); features are made by transformers'
own extractor, of one sound at a time. The tower is in :mod:`~encoder_svc.models.transformers_audio_tower`.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import torch

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.adapter import Adapter, Progress, Tower
from encoder_svc.models.audio_families import DESCRIPTIONS, AudioFamily
from encoder_svc.models.audio_family import AudioFamilyAdapter, PreparedSound, silence, too_short
from encoder_svc.models.checkpoint import Checkpoint, open_checkpoint
from encoder_svc.models.mel import find_sampling_rate
from encoder_svc.models.registry import find_family

log = logging.getLogger(__name__)


class LibrarySounds:
    """Turns waveforms into a tower's input.

    Args:
        checkpoint: the checkpoint.
        family: its family.
        config: its configuration, as transformers reads it.

    Raises:
        SetupError: there is no such feature extractor, or its settings are wrong.
    """

    def __init__(self, checkpoint: Checkpoint, family: AudioFamily, config: Any) -> None:
        self._family = family
        self._config = config
        self._extractor = _make_extractor(checkpoint, family.extractor)
        self.sampling_rate = find_sampling_rate(checkpoint)
        self._window = self.sampling_rate * int(getattr(self._extractor, "chunk_length", 0))
        if family.has_windows and self._window < 1:
            raise SetupError(f"the feature extractor's settings of {checkpoint.path} have no chunk_length")
        self.constants = {
            "extractor": type(self._extractor).__name__,
            "settings": {name: value for name, value in self._extractor.to_dict().items() if not name.startswith("_")},
            "arguments": dict(family.extraction),
        }

    def __call__(self, waveform: torch.Tensor) -> PreparedSound:
        """See :data:`~encoder_svc.models.audio_family.PrepareSound`."""
        family, seconds = self._family, len(waveform) / self.sampling_rate
        if family.most_seconds is not None and seconds > family.most_seconds:
            raise ServiceError(
                Reason.MEDIA_TOO_LARGE,
                f"the sound is {seconds:.2f} s long and the model hears {family.most_seconds:g} s; send it in parts of "
                "that length (start_seconds, end_seconds)",
            )
        windows = waveform.split(self._window) if family.has_windows else (waveform,)
        given = self._extractor(
            [window.numpy() for window in windows],
            sampling_rate=self.sampling_rate,
            return_attention_mask=True,
            return_tensors="pt",
            **family.extraction,
        )
        features, mask = given["input_features"].float(), given["attention_mask"].to(torch.int64)
        valid = mask.sum(-1).tolist()
        rows = sum(family.rows(self._config, frames) for frames in valid)
        if rows < 1:
            raise too_short(waveform, self.sampling_rate)
        return PreparedSound(features, mask.numel(), sum(valid), rows, mask)


def make_adapter(path: Path, dtype: torch.dtype) -> Adapter:
    """The factory of these families.

    Raises:
        SetupError: the checkpoint cannot be served.
    """
    from transformers import CONFIG_MAPPING  # takes seconds, and only workers and engines need it

    from encoder_svc.models.weights import read_config

    checkpoint = open_checkpoint(path)
    row = find_family(checkpoint)
    family = DESCRIPTIONS[row.model_type]
    config = read_config(CONFIG_MAPPING[row.model_type], checkpoint)
    sounds = LibrarySounds(checkpoint, family, config)
    width = family.width(config)

    def load(device: torch.device, progress: Progress) -> Tower:
        from encoder_svc.models.transformers_audio_tower import load_tower

        tower = load_tower(checkpoint, family, row, config, sounds.constants, dtype, device, progress)
        ((rows,),) = tower.encode([silence(sounds, sounds.sampling_rate).item])
        promised = sounds(torch.zeros(sounds.sampling_rate)).rows, width
        if tuple(rows.shape) != promised:
            raise SetupError(
                f"the tower of {path} makes rows of shape {tuple(rows.shape)} where config.json promises {promised}; "
                "config, weights and preprocessor_config.json must come from the same checkpoint"
            )
        return tower

    return AudioFamilyAdapter(row, dtype, sounds.sampling_rate, sounds, width, load)


def _make_extractor(checkpoint: Checkpoint, default: str) -> Any:
    import transformers

    name = str(checkpoint.feature_extractor.get("feature_extractor_type") or default)
    found = getattr(transformers, name, None)
    if not inspect.isclass(found) or not issubclass(found, transformers.SequenceFeatureExtractor):
        raise SetupError(
            f"preprocessor_config.json of {checkpoint.path} names the feature extractor {name}, which transformers "
            "does not have; this checkpoint cannot be served"
        )
    try:
        return found(**checkpoint.feature_extractor)
    except (TypeError, ValueError, KeyError, AttributeError, ImportError):
        log.debug("transformers refuses the settings", exc_info=True)
        raise SetupError(
            f"transformers cannot make {name} of the feature extractor's settings of {checkpoint.path}: a value in "
            "them is wrong, or a package is missing; --log-level debug tells which"
        ) from None
