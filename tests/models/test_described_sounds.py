"""Families that hear through a tower of transformers: what needs no code, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.audio_families import DESCRIPTIONS, AudioFamily
from encoder_svc.models.registry import FAMILIES, Family, open_adapter
from epd.encoder.v1.media_pb2 import Modality
from tests.models.cases.audio import some_sounds, waveform, window_sounds
from tests.models.family_cases import prepare


def rows_of_asr(config: Any, frames: int) -> int:
    """13 rows for each 100 frames, three convolutions of stride 2 for the rest."""
    whole, rest = divmod(frames, 100)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return 13 * whole + rest


def test_a_family_that_is_described_needs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/models.md."""
    from transformers import Qwen3ASRConfig, Qwen3ASRFeatureExtractor, Qwen3ASRForConditionalGeneration

    described = AudioFamily(
        "Qwen3ASRModel",
        rows_of_asr,
        extractor="Qwen3ASRFeatureExtractor",
        extraction={"padding": True, "truncation": False},
        has_windows=False,
    )
    monkeypatch.setitem(DESCRIPTIONS, "qwen3_asr", described)
    monkeypatch.setitem(
        FAMILIES,
        "qwen3_asr",
        Family(
            model_type="qwen3_asr",
            architectures=("Qwen3ASRForConditionalGeneration",),
            modalities=(Modality.MODALITY_AUDIO,),
            tensors=("embedding",),
            prefixes=("model.audio_tower.", "model.multi_modal_projector."),
            adapter="encoder_svc.models.transformers_audio:make_adapter",
            verified="embeddings",
        ),
    )
    config = Qwen3ASRConfig(
        audio_config={
            "d_model": 256, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 256,
            "downsample_hidden_size": 32, "output_dim": 64,
        },
        text_config={
            "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 300,
        },
        audio_token_id=299,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen3ASRForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    extractor: Any = Qwen3ASRFeatureExtractor()
    extractor.save_pretrained(tmp_path)

    adapter = open_adapter(tmp_path, "float32")
    tower = adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)
    sounds = window_sounds()[:4]
    prepared = [prepare(adapter, sound) for sound in sounds]
    encoded = tower.encode([one.input for one in prepared])
    for sound, one, (rows,) in zip(sounds, prepared, encoded, strict=True):
        made = extractor(
            [waveform(sound)], sampling_rate=16_000, padding=True, truncation=False, return_attention_mask=True
        )
        with torch.inference_mode():
            expected = model.get_audio_features(made["input_features"], made["attention_mask"]).pooler_output
        assert one.layout.chunk.token_count == len(rows)
        torch.testing.assert_close(rows, expected.flatten(0, -2), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glmasr") / "glmasr"
    write_checkpoint("glmasr", folder)
    return folder


def test_a_sound_that_transformers_would_cut_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DESCRIPTIONS, "glmasr", AudioFamily("GlmAsrModel", DESCRIPTIONS["glmasr"].rows, most_seconds=1))
    with pytest.raises(ServiceError, match="hears 1 s") as refused:
        prepare(open_adapter(checkpoint, "float32"), window_sounds()[0])
    assert refused.value.reason is Reason.MEDIA_TOO_LARGE


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("feature_extractor_type", "NoSuchExtractor", "NoSuchExtractor"),
        ("feature_extractor_type", "AutoModel", "AutoModel"),
        ("hop_length", "long", "wrong"),
        ("chunk_length", 0, "chunk_length"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused_at_start(
    field: str, value: Any, told: str, tmp_path: Path, checkpoint: Path
) -> None:
    for source in checkpoint.iterdir():
        (tmp_path / source.name).symlink_to(source)
    file = tmp_path / "preprocessor_config.json"
    content = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps({**content, field: value}))
    with pytest.raises(SetupError, match=told):
        open_adapter(tmp_path, "float32")


def test_layout_tells_the_frames_of_sound(checkpoint: Path) -> None:
    for sound in some_sounds():
        prepared = prepare(open_adapter(checkpoint, "float32"), sound)
        seconds = prepared.layout.chunk.audio.duration_seconds
        assert prepared.layout.chunk.audio.mel_frames == -(-round(seconds * 16_000) // 160)
        assert list(prepared.layout.chunk.grid_dim) == [3000]
