"""The Omni families: what Qwen-VL sees and what the hearing families hear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from encoder_svc.models.registry import FAMILIES, open_adapter
from epd.encoder.v1.media_pb2 import Modality
from tests.media.sounds import plain, tones
from tests.models.cases.audio import extract, sound, window_sounds
from tests.models.cases.qwen_vl import features
from tests.models.cases.qwen_vl import media as seen
from tests.models.family_cases import FamilyCase, Medium, Prepared


def media() -> tuple[Medium, ...]:
    """Some of each kind; the longest sound has a whole window for attention, and a piece of one."""
    return (
        *seen()[:3],
        *window_sounds()[:3],
        sound("two-whole-seconds", plain(tones(2, 16_000), 16_000)),
        sound("wav-11.37s", plain(tones(11.37, 16_000), 16_000)),
    )


def load(checkpoint: Path) -> Any:
    """The thinker, which has both towers and the language model."""
    import transformers

    (architecture,) = FAMILIES[checkpoint.name].architectures
    thinker = getattr(transformers, architecture.replace("ForConditional", "ThinkerForConditional"))
    return thinker.from_pretrained(checkpoint, dtype=torch.float32).eval()


def reference(model: Any, checkpoint: Path, medium: Medium, prepared: Prepared) -> torch.Tensor:
    adapter: Any = open_adapter(checkpoint, "float32")
    if medium.item.modality != Modality.MODALITY_AUDIO:
        return features(model, adapter.vision, medium, prepared)
    # As the processors of the two families call their feature extractor.
    unpadded = {"padding": True, "truncation": False}
    made = extract(
        checkpoint, medium, **({"padding": "max_length"} if adapter.model_type == "qwen2_5_omni" else unpadded)
    )
    assert prepared.layout.chunk.audio.mel_frames == int(made["attention_mask"].sum())
    rows: torch.Tensor = model.get_audio_features(made["input_features"], made["attention_mask"]).last_hidden_state
    return rows


CASES = tuple(FamilyCase(family, media, load, reference) for family in ("qwen2_5_omni", "qwen3_omni_moe"))
