"""The families that only hear."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from encoder_svc.media.audio import AudioFileProbe
from encoder_svc.models.registry import FAMILIES
from epd.encoder.v1.media_pb2 import AudioOptions, MediaItem, Modality
from tests.media.sounds import contained, plain, tones
from tests.models.family_cases import FamilyCase, Medium, Prepared


def sound(name: str, file: bytes, **options: float) -> Medium:
    return Medium(name, MediaItem(modality=Modality.MODALITY_AUDIO, audio=AudioOptions(**options)), (file,))


@cache
def window_sounds() -> tuple[Medium, ...]:
    """Sounds of up to 30 s."""
    return (
        sound("wav-16k-2.5s", plain(tones(2.5, 16_000), 16_000)),
        sound("flac-six-channels", plain(tones(0.7, 22_050, 6), 22_050, "FLAC", "PCM_24")),
        sound("opus-48k", plain(tones(1.0, 48_000, 2), 48_000, "OGG", "OPUS")),
        sound("m4a-44.1k-part", contained(tones(4, 44_100), 44_100, "ipod", "aac"), start_seconds=1, end_seconds=2.3),
        sound("wav-8k-29.99s", plain(tones(29.99, 8_000), 8_000, subtype="PCM_U8")),
        sound("wav-0.05s", plain(tones(0.05, 16_000), 16_000)),
    )


def some_sounds() -> tuple[Medium, ...]:
    """Fewer, where every one costs a whole window."""
    return window_sounds()[1:5:3]


def long_sounds() -> tuple[Medium, ...]:
    """One that is longer than a window."""
    return (window_sounds()[3], sound("mp3-95s", plain(tones(95, 8_000), 8_000, "MP3")))


def waveform(medium: Medium, rate: int = 16_000) -> Any:
    """The samples, as NumPy."""
    options = medium.item.audio
    return AudioFileProbe(medium.files[0], 600, options.start_seconds, options.end_seconds).waveform(rate).numpy()


def extract(checkpoint: Path, medium: Medium, **options: Any) -> Any:
    """What transformers' feature extractor makes of a sound."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(checkpoint)
    return extractor(waveform(medium), sampling_rate=16_000, return_tensors="pt", return_attention_mask=True, **options)


def load_whisper(checkpoint: Path) -> Any:
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


def load_qwen2_audio(checkpoint: Path) -> Any:
    from transformers import Qwen2AudioForConditionalGeneration

    return Qwen2AudioForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


def load_voxtral(checkpoint: Path) -> Any:
    from transformers import VoxtralForConditionalGeneration

    return VoxtralForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


def whisper_rows(model: Any, checkpoint: Path, medium: Medium, prepared: Prepared) -> torch.Tensor:
    rows: torch.Tensor = model.model.encoder(extract(checkpoint, medium)["input_features"]).last_hidden_state[0]
    return rows


def qwen2_audio_rows(model: Any, checkpoint: Path, medium: Medium, prepared: Prepared) -> torch.Tensor:
    """The tower as ``Qwen2AudioModel.forward`` uses it, which has no method for it alone."""
    features = extract(checkpoint, medium, padding="max_length")
    base = model.model
    positions, rows = base.audio_tower._get_feat_extract_output_lengths(features["attention_mask"].sum(-1))
    mask = (torch.arange(1500) < positions[:, None])[:, None, None, :].expand(1, 1, 1500, 1500)
    hidden = base.audio_tower(features["input_features"], attention_mask=mask).last_hidden_state
    found: torch.Tensor = base.multi_modal_projector(hidden)[0, : int(rows)]
    return found


def voxtral_rows(model: Any, checkpoint: Path, medium: Medium, prepared: Prepared) -> torch.Tensor:
    """As ``VoxtralProcessor`` cuts windows of 30 s."""
    made = extract(checkpoint, medium, truncation=False, padding=True, pad_to_multiple_of=480_000)
    windows = made["input_features"][0].reshape(128, -1, 3000).transpose(0, 1)
    rows: torch.Tensor = model.get_audio_features(windows).pooler_output
    return rows


def load_described(checkpoint: Path) -> Any:
    import transformers

    (architecture,) = FAMILIES[checkpoint.name].architectures
    return getattr(transformers, architecture).from_pretrained(checkpoint, dtype=torch.float32).eval()


def windowed_rows(model: Any, checkpoint: Path, medium: Medium, prepared: Prepared) -> torch.Tensor:
    """As ``AudioFlamingo3Processor`` and ``GlmAsrProcessor`` cut windows of 30 s."""
    from transformers import WhisperFeatureExtractor

    samples = waveform(medium)
    windows = [samples[start : start + 480_000] for start in range(0, len(samples), 480_000)]
    extractor = WhisperFeatureExtractor.from_pretrained(checkpoint)
    made = extractor(windows, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True)
    rows: torch.Tensor = model.get_audio_features(made["input_features"], made["attention_mask"]).pooler_output
    return rows


CASES = (
    FamilyCase("whisper", some_sounds, load_whisper, whisper_rows),
    FamilyCase("qwen2_audio", window_sounds, load_qwen2_audio, qwen2_audio_rows),
    FamilyCase("voxtral", long_sounds, load_voxtral, voxtral_rows),
    *(FamilyCase(family, long_sounds, load_described, windowed_rows) for family in ("audioflamingo3", "glmasr")),
)
