"""The sound of videos, against the samples that went into them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.limits import MediaLimits
from encoder_svc.media.video_file import VideoFileProbe
from tests.media.movies import Track, movie
from tests.media.sounds import tones
from tests.models.family_cases import LIMITS

RATE = 24_000
BLOCK = 1024 / RATE
"""Seconds that AAC codes together: a track may be longer by so much."""


def sound(file: bytes, start: float = 0.0, end: float = 0.0, limits: MediaLimits = LIMITS) -> torch.Tensor:
    probe = VideoFileProbe(file, limits, start, end).audio
    assert probe is not None
    return probe.waveform(RATE)


def onset(samples: torch.Tensor) -> float:
    """When something is heard first, in seconds."""
    return int((samples.abs() > 0.05).nonzero()[0]) / RATE


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_track_that_begins_late_is_heard_late(container: str) -> None:
    file = movie(4, Track(tones(2, RATE), RATE, begins=1.5), container=container)
    samples = sound(file)
    assert len(samples) / RATE == pytest.approx(3.5, abs=2 * BLOCK)
    assert onset(samples) == pytest.approx(1.5, abs=2 * BLOCK)
    part = sound(file, 1.0, 3.0)
    assert len(part) == 2 * RATE
    assert onset(part) == pytest.approx(0.5, abs=2 * BLOCK)
    inside = sound(file, 2.0, 3.0)
    assert len(inside) == RATE
    assert torch.equal(inside, samples[2 * RATE : 3 * RATE])


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_f32_a_span_without_sound_is_silent(container: str) -> None:
    ended = movie(4, Track(tones(1.5, RATE), RATE), container=container)
    assert len(sound(ended, 3.0, 4.0)) == len(sound(ended, 3.0)) == 0
    to_come = movie(4, Track(tones(1, RATE), RATE, begins=2.5), container=container)
    assert len(sound(to_come, 0.5, 1.5)) == 0


def test_a_track_may_last_longer_than_its_video() -> None:
    assert len(sound(movie(1, Track(tones(3, RATE), RATE)))) / RATE == pytest.approx(3, abs=2 * BLOCK)


@pytest.mark.parametrize(
    ("rate", "layout", "channels", "codec"),
    [
        (8_000, "mono", 1, "aac"),
        (48_000, "5.1", 6, "aac"),
        (44_100, "stereo", 2, "aac"),
        (48_000, "stereo", 2, "libopus"),
    ],
)
def test_f34_rates_and_layouts(rate: int, layout: str, channels: int, codec: str) -> None:
    waves = tones(2, rate, channels)
    file = movie(2, Track(waves, rate, layout, codec), container="matroska")
    probe = VideoFileProbe(file, LIMITS).audio
    assert probe is not None
    assert (probe.source_sampling_rate, probe.source_channels) == (rate, channels)
    samples = probe.waveform(RATE)
    assert len(samples) / RATE == pytest.approx(2, abs=0.1)
    # Each channel has a tone of its own.
    loudest = np.abs(np.fft.rfft(samples[:RATE].numpy()))[:800].argmax()
    assert min(abs(loudest - (220 + 90 * channel)) for channel in range(channels)) <= 1


def test_two_tracks_give_one() -> None:
    file = movie(2, Track(tones(2, RATE), RATE), Track(tones(2, 48_000, 2), 48_000, "stereo"))
    assert len(sound(file)) / RATE == pytest.approx(2, abs=2 * BLOCK)


def test_f20_sound_that_is_too_long_is_refused() -> None:
    short = MediaLimits(image_pixels=1, video_pixels=9_000_000, video_frames=100, video_seconds=60.0, audio_seconds=1.0)
    for track in (Track(tones(3, RATE), RATE), Track(tones(1, RATE), RATE, begins=2.0)):
        with pytest.raises(ServiceError) as refused:
            sound(movie(3, track), limits=short)
        assert refused.value.reason == Reason.MEDIA_TOO_LARGE
    assert len(sound(movie(3, Track(tones(3, RATE), RATE)), 1.0, 1.5, limits=short)) == RATE // 2
