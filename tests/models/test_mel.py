"""The log-mel spectrogram, against ``WhisperFeatureExtractor``; sampling rates; sounds that a family cannot take."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperFeatureExtractor

from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models import qwen2_5_omni_audio, qwen2_audio, qwen3_omni_audio, whisper
from encoder_svc.models.checkpoint import open_checkpoint
from encoder_svc.models.mel import MelSettings, find_sampling_rate, log_mel, read_mel_settings
from encoder_svc.models.registry import open_adapter

RATE = 16_000
TOLERANCE = 1e-5


def waves(samples: int) -> torch.Tensor:
    """Noise that swells, so that the loudest frame is the last one, with a short stillness in it."""
    noise = torch.randn(samples, generator=torch.Generator().manual_seed(samples)) * torch.linspace(0.01, 0.3, samples)
    noise[samples // 3 : samples // 2] = 0
    return noise


def reference(extractor: Any, waveform: torch.Tensor, **options: Any) -> torch.Tensor:
    made = extractor(waveform.numpy(), sampling_rate=RATE, return_tensors="pt", **options)
    features: torch.Tensor = made["input_features"][0]
    return features


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("seconds", [30, 300])
def test_windows_are_the_references(bands: int, seconds: int) -> None:
    extractor = WhisperFeatureExtractor(feature_size=bands, chunk_length=seconds)
    settings = MelSettings(sampling_rate=RATE, feature_size=bands, chunk_length=seconds)
    for samples in (1, 160, 80_001, 479_840, 480_000):
        waveform = waves(samples)
        expected = reference(extractor, waveform)
        found = log_mel(waveform, settings, settings.window_samples, settings.window_frames)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        some = log_mel(waveform, settings, settings.window_samples, 7)
        torch.testing.assert_close(some, expected[:, :7], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("samples", [201, 5_000, 480_160, 95 * RATE + 77])
def test_sounds_of_any_length_are_the_references(samples: int) -> None:
    extractor = WhisperFeatureExtractor(feature_size=128)
    settings = MelSettings(sampling_rate=RATE, feature_size=128)
    waveform = waves(samples)
    expected = reference(extractor, waveform, padding=True, truncation=False)
    torch.testing.assert_close(log_mel(waveform, settings, samples, samples // 160), expected, atol=TOLERANCE, rtol=0)
    expected = reference(extractor, waveform, padding=True, truncation=False, pad_to_multiple_of=480_000)
    padded = -(-samples // 480_000) * 480_000
    torch.testing.assert_close(log_mel(waveform, settings, padded, padded // 160), expected, atol=TOLERANCE, rtol=0)


def test_the_silence_behind_a_sound_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds of thirty are transformed; the reference transforms them all."""
    frames: list[int] = []
    stft = torch.stft

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        spectrum = stft(*arguments, **options)
        frames.append(spectrum.shape[-1])
        return spectrum

    monkeypatch.setattr(torch, "stft", counted)
    settings = MelSettings(sampling_rate=RATE)
    waveform = waves(10 * RATE)
    log_mel(waveform, settings, settings.window_samples, settings.window_frames)
    ours = sum(frames)
    frames.clear()
    reference(WhisperFeatureExtractor(feature_size=80, chunk_length=30), waveform)
    assert ours == pytest.approx(sum(frames) / 3, rel=0.01)


def test_a_media_worker_needs_no_transformers() -> None:
    code = (
        "import sys, encoder_svc.models.whisper, encoder_svc.models.qwen2_audio, encoder_svc.models.voxtral, "
        "encoder_svc.models.qwen_omni, encoder_svc.media.item; sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_f34_the_rate_is_that_of_the_extractor_then_of_the_config_then_the_usual(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint("whisper", tmp_path / "whisper")
    file, config = tmp_path / "whisper" / "preprocessor_config.json", tmp_path / "whisper" / "config.json"

    def rate(extractor: dict[str, Any], **more: Any) -> int:
        file.write_text(json.dumps({**settings, **extractor}))
        config.write_text(json.dumps({**plain, **more}))
        return find_sampling_rate(open_checkpoint(tmp_path / "whisper"))

    settings, plain = json.loads(file.read_text()), json.loads(config.read_text())
    del settings["sampling_rate"]
    with caplog.at_level(logging.WARNING):
        assert rate({"sampling_rate": 24_000}, audio_config={"sampling_rate": 8_000}) == 24_000
        assert rate({}, thinker_config={"audio_config": {"sampling_rate": 12_000}}) == 12_000
        assert rate({}, audio_config={"sampling_rate": 8_000}) == 8_000
        assert not caplog.records
        assert rate({}) == 16_000
        assert "names no sampling rate" in caplog.text
    file.write_text(json.dumps({**settings, "sampling_rate": 24_000}))
    config.write_text(json.dumps(plain))
    with pytest.raises(SetupError, match="4500 frames"):
        open_adapter(tmp_path / "whisper", "float32")


def test_settings_that_are_not_those_of_whisper_are_refused(tmp_path: Path) -> None:
    write_checkpoint("qwen2_audio", tmp_path / "model")
    file = tmp_path / "model" / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    for change, message in (
        ({"dither": 0.1}, "dither"),
        ({"hop_length": "long"}, "hop_length"),
        ({"feature_size": 80}, "feature_size is 80 .* num_mel_bins is 128"),
    ):
        file.write_text(json.dumps({**settings, **change}))
        with pytest.raises(SetupError, match=message):
            open_adapter(tmp_path / "model", "float32")
    file.write_text(json.dumps({"padding_value": 0.0, "dither": 0.0}))
    assert read_mel_settings(open_checkpoint(tmp_path / "model")) == MelSettings(sampling_rate=RATE)


def test_sounds_that_do_not_fit_are_refused_and_never_cut() -> None:
    mel, omni = MelSettings(sampling_rate=RATE), MelSettings(sampling_rate=RATE, chunk_length=300)
    longer, longest = torch.zeros(480_001), torch.zeros(4_800_001)
    too_long: tuple[Callable[[], object], ...] = (
        lambda: whisper.prepare_sound(longer, mel),
        lambda: qwen2_audio.prepare_sound(longer, mel),
        lambda: qwen2_5_omni_audio.prepare_sound(longest, omni),
    )
    for prepare in too_long:
        with pytest.raises(ServiceError, match="start_seconds") as caught:
            prepare()
        assert caught.value.reason is Reason.MEDIA_TOO_LARGE
    too_short: tuple[Callable[[], object], ...] = (
        lambda: qwen2_audio.prepare_sound(waves(320), mel),
        lambda: qwen2_5_omni_audio.prepare_sound(waves(320), omni),
        lambda: qwen3_omni_audio.prepare_sound(waves(200), mel, 50),
    )
    for prepare in too_short:
        with pytest.raises(ServiceError, match="too short") as caught:
            prepare()
        assert caught.value.reason is Reason.MEDIA_UNSUPPORTED
    assert qwen2_audio.prepare_sound(waves(321), mel).rows == 1
    assert qwen3_omni_audio.prepare_sound(waves(201), mel, 50).rows == 1
    assert whisper.prepare_sound(waves(160), mel).rows == 1500
