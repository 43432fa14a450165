"""Sound files to samples, against ``transformers.audio_utils.load_audio``; caps, truncation and bombs."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.audio import AudioFileProbe
from tests.media.sounds import (
    Waves,
    contained,
    plain,
    silent_movie,
    tones,
    with_promised_bytes,
    with_promised_frames,
)

RATES = (8_000, 16_000, 22_050, 44_100, 48_000)
WIDTHS = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT")
LENGTHS = dict.fromkeys(WIDTHS, (0.01, 30.01)) | {"PCM_16": (0.01, 29.99, 30.01, 95.0)}
"""Seconds: less than a frame, both sides of Whisper's window of 30 s, and several windows."""
HOUR = 3600.0


def waveform(data: bytes, seconds: float = HOUR, start: float = 0.0, end: float = 0.0) -> torch.Tensor:
    return AudioFileProbe(data, seconds, start, end).waveform(16_000)


def reason_of(make: Callable[[], object]) -> Reason:
    with pytest.raises(ServiceError) as caught:
        make()
    assert re.search(r"; (send|save|convert|give)|before start_seconds|the server takes", caught.value.message)
    return caught.value.reason


@pytest.mark.parametrize("channels", [1, 6])
@pytest.mark.parametrize("rate", RATES)
def test_f34_samples_are_the_references_at_every_rate_width_and_length(
    rate: int, channels: int, tmp_path: Path
) -> None:
    from transformers.audio_utils import load_audio

    longest = tones(95.0, rate, channels)
    file = tmp_path / "sound.wav"
    for subtype in WIDTHS:
        for seconds in LENGTHS[subtype]:
            file.write_bytes(plain(longest[: round(seconds * rate)], rate, subtype=subtype))
            probe = AudioFileProbe(file.read_bytes(), HOUR)
            assert (probe.source_sampling_rate, probe.source_channels) == (rate, channels)
            samples = probe.waveform(16_000)
            assert samples.dtype == torch.float32
            assert len(samples) == -(-round(seconds * rate) * 16_000 // rate)
            np.testing.assert_array_equal(samples.numpy(), load_audio(str(file), 16_000, backend="soundfile"))
        empty = plain(longest[:0], rate, subtype=subtype)
        assert reason_of(partial(waveform, empty)) is Reason.MEDIA_EMPTY


@pytest.mark.parametrize("rate", RATES)
def test_f34_a_tone_keeps_its_pitch_and_length(rate: int) -> None:
    seconds = 2.0
    times = np.arange(round(seconds * rate)) / rate
    tone = (0.5 * np.sin(2 * np.pi * 1234.0 * times)).astype(np.float32)[:, None]
    samples = waveform(plain(tone, rate, "FLAC"))
    assert len(samples) == seconds * 16_000
    spectrum = torch.fft.rfft(samples * torch.hann_window(len(samples))).abs()
    assert int(spectrum.argmax()) / seconds == pytest.approx(1234.0, abs=0.5)


FORMATS: dict[str, tuple[Callable[[Waves], bytes], int]] = {
    "flac": (lambda waves: plain(waves, 48_000, "FLAC", "PCM_24"), 0),
    "flac that tells no length": (lambda waves: with_promised_frames(plain(waves, 48_000, "FLAC"), 0), 0),
    "vorbis": (lambda waves: plain(waves, 48_000, "OGG", "VORBIS"), 0),
    "opus": (lambda waves: plain(waves, 48_000, "OGG", "OPUS"), 0),
    "mp3": (lambda waves: plain(waves, 48_000, "MP3"), 0),
    "aiff": (lambda waves: plain(waves, 48_000, "AIFF", "PCM_16"), 0),
    "rf64": (lambda waves: plain(waves, 48_000, "RF64", "PCM_16"), 0),
    "wav that tells no length": (lambda waves: with_promised_bytes(plain(waves, 48_000), 0xFFFFFFFF), 0),
    "m4a": (lambda waves: contained(waves, 48_000, "ipod", "aac", "stereo"), 1024),
    "fragmented mp4": (
        lambda waves: contained(waves, 48_000, "mp4", "aac", "stereo", movflags="frag_keyframe+empty_moov"),
        1024,
    ),
    "adts": (lambda waves: contained(waves, 48_000, "adts", "aac", "stereo"), 1024),
    "webm": (lambda waves: contained(waves, 48_000, "webm", "libopus", "stereo"), 0),
    "mov": (lambda waves: contained(waves, 48_000, "mov", "pcm_s16le", "stereo"), 0),
    "avi": (lambda waves: contained(waves, 48_000, "avi", "pcm_s16le", "stereo"), 0),
}
"""Each with the samples that its coder puts before the sound."""


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_sounds_the_same(name: str) -> None:
    make, delay = FORMATS[name]
    waves = tones(1.5, 48_000, 2)
    data = make(waves)
    probe = AudioFileProbe(data, HOUR)
    assert (probe.source_sampling_rate, probe.source_channels) == (48_000, 2)
    found, exact = probe.waveform(48_000)[delay:], torch.from_numpy(waves.mean(axis=1))
    assert 0 <= len(found) - len(exact) <= delay
    # Coders may lose something, but neither where the sound is nor how loud it is.
    inside = slice(4_000, 60_000)
    assert float((found[inside] - exact[inside]).abs().mean()) < 0.01 < float(exact[inside].abs().mean())
    if name != "wav that tells no length":
        assert reason_of(lambda: waveform(data[: len(data) * 2 // 3])) is Reason.MEDIA_TRUNCATED


def test_a_part_is_the_part_of_the_whole() -> None:
    data = plain(tones(3.0, 16_000), 16_000, "FLAC")
    whole = waveform(data)
    assert torch.equal(waveform(data, start=0.5), whole[8_000:])
    assert torch.equal(waveform(data, start=0.5, end=1.25), whole[8_000:20_000])
    assert torch.equal(waveform(data, seconds=1.0, start=2.0, end=9.0), whole[32_000:])
    packed = contained(tones(3.0, 16_000), 16_000, "ipod", "aac")
    assert torch.equal(waveform(packed, start=0.5, end=1.25), waveform(packed)[8_000:20_000])
    assert reason_of(lambda: waveform(data, start=3.5)) is Reason.REQUEST_INVALID
    assert reason_of(lambda: waveform(data, start=1.0, end=0.5)) is Reason.REQUEST_INVALID


def test_what_is_no_sound_is_refused() -> None:
    nothing = plain(tones(0.0, 8_000), 8_000)
    broken = [
        plain(np.array([[value], [0.1]] * 100, np.float32), 8_000, subtype="FLOAT")
        for value in (np.nan, np.inf, -np.inf, 3e38)
    ]
    wav = plain(tones(0.1, 8_000), 8_000)
    hasty = wav[:24] + (900_000).to_bytes(4, "little") + wav[28:]
    for data, reason in (
        (nothing, Reason.MEDIA_EMPTY),
        *((data, Reason.MEDIA_CORRUPT) for data in broken),
        (plain(np.array([[3e38, 3e38]], np.float32), 8_000, subtype="FLOAT"), Reason.MEDIA_CORRUPT),
        (hasty, Reason.MEDIA_UNSUPPORTED),
        (silent_movie(), Reason.MEDIA_UNSUPPORTED),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), Reason.MEDIA_UNRECOGNIZED),
        (b"#EXTM3U\nhttp://127.0.0.1/secret.ts\n", Reason.MEDIA_UNRECOGNIZED),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", Reason.MEDIA_UNRECOGNIZED),
        (b"\x1aE\xdf\xa3" + bytes(200), Reason.MEDIA_CORRUPT),
        (b"fLaC" + bytes(200), Reason.MEDIA_CORRUPT),
        (b"RIFF\x24\0\0\0WAVEfmt ", Reason.MEDIA_CORRUPT),
    ):
        assert reason_of(partial(waveform, data)) is reason, data[:16]


def test_f20_a_header_that_promises_hours_is_refused_before_decoding() -> None:
    flac = plain(tones(1.0, 8_000), 8_000, "FLAC")
    assert reason_of(lambda: AudioFileProbe(with_promised_frames(flac, 8_000 * 3601), HOUR)) is Reason.MEDIA_TOO_LARGE
    long = plain(np.zeros((8_000 * 100, 1), np.float32), 8_000, "FLAC")
    assert len(long) < 40_000
    assert reason_of(lambda: AudioFileProbe(long, 99.0)) is Reason.MEDIA_TOO_LARGE
    assert AudioFileProbe(long, 99.0, start_seconds=20.0).waveform(8_000).shape == (80 * 8_000,)
    packed = contained(np.zeros((8_000 * 100, 1), np.float32), 8_000, "ipod", "aac")
    assert reason_of(lambda: AudioFileProbe(packed, 99.0)) is Reason.MEDIA_TOO_LARGE


def test_f20_a_file_that_does_not_end_stops_at_the_limit() -> None:
    """Two hours of silence in 200 kB whose header tells no length: memory stays that of the limit."""
    silence = np.zeros((48_000 * 600, 1), np.float32)
    endless = with_promised_frames(plain(silence, 48_000, "FLAC"), 0)
    assert len(endless) < 400_000
    probe = AudioFileProbe(endless, 30.0)
    del silence
    tracemalloc.start()
    try:
        assert reason_of(lambda: probe.waveform(16_000)) is Reason.MEDIA_TOO_LARGE
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * 48_000 * 4
