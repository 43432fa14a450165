"""Sound: from the bytes of a file to one channel at the rate that a model takes.

The samples are those of the reference, ``transformers.audio_utils.load_audio`` with its soundfile backend: float32,
the mean of all channels, resampled by soxr's high quality, ``ceil(frames · rate / source rate)`` of them.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import soxr
import torch

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.sound_tracks import open_track

SAMPLING_RATES = range(1_000, 768_001)
"""Hertz. Beyond them a header is damaged, or means to make a little file large."""

LOUDEST = 1e15
"""Of a sample, where 1 is full scale: the power of a window of louder ones is infinite in float32."""


class AudioFileProbe:
    """A sound file, or the sound track of a video file, whose header was read.

    Args:
        data: the file.
        max_seconds: of what is encoded that are allowed.
        start_seconds: where to begin.
        end_seconds: where to end. 0: at the end of the file.

    Raises:
        ServiceError: the bytes are no sound of a known format, a damaged one, one without samples, or one that is too
            long; or the span is not in it.

    Example:
        >>> probe = AudioFileProbe(Path("speech.wav").read_bytes(), max_seconds=3600)
        >>> probe.waveform(16_000).shape
        torch.Size([176000])
    """

    def __init__(self, data: bytes, max_seconds: float, start_seconds: float = 0.0, end_seconds: float = 0.0) -> None:
        self._track = open_track(data)
        self.source_sampling_rate: int = self._track.sampling_rate
        self.source_channels: int = self._track.channels
        self._max_seconds = max_seconds
        if self.source_sampling_rate not in SAMPLING_RATES:
            raise ServiceError(
                Reason.MEDIA_UNSUPPORTED,
                f"the sound has a sampling rate of {self.source_sampling_rate} Hz; the server takes "
                f"{SAMPLING_RATES.start} to {SAMPLING_RATES.stop - 1}",
            )
        self._start = round(start_seconds * self.source_sampling_rate)
        self._end = round(end_seconds * self.source_sampling_rate) if end_seconds else None
        if self._end is not None and self._end <= self._start:
            raise ServiceError(
                Reason.REQUEST_INVALID,
                f"the span from {start_seconds:g} s to {end_seconds:g} s is empty; give a later end_seconds, or 0",
                field="audio.end_seconds",
            )
        told = self._track.frames
        if told == 0:
            raise self._empty()
        if told is not None:
            self._check_length((told if self._end is None else min(told, self._end)) - self._start)

    def waveform(self, sampling_rate: int) -> torch.Tensor:
        """The span as one channel.

        Args:
            sampling_rate: in hertz.

        Returns:
            float32, shape (samples,), from -1 to 1.

        Raises:
            ServiceError: the file is truncated, corrupt, or longer than its header says and than is allowed.
        """
        return torch.from_numpy(resample(self._samples, self.source_sampling_rate, sampling_rate))

    @cached_property
    def _samples(self) -> npt.NDArray[np.float32]:
        """The mean of the channels, at the rate of the file."""
        parts: list[npt.NDArray[np.float32]] = []
        position = kept = 0
        for block in self._track.blocks():
            begin = max(0, self._start - position)
            with np.errstate(invalid="ignore", over="ignore"):  # what comes of it is refused below
                part = block[begin : None if self._end is None else self._end - position].mean(axis=1)
            position += len(block)
            if len(part):
                parts.append(part)
                kept += len(part)
                self._check_length(kept)
            if self._end is not None and position >= self._end:
                break
        if not position:
            raise self._empty()
        if not kept:
            raise ServiceError(
                Reason.REQUEST_INVALID,
                f"the sound ends at {position / self.source_sampling_rate:.2f} s, before start_seconds",
                field="audio.start_seconds",
            )
        samples = np.concatenate(parts)
        # A comparison with NaN is false.
        if not (samples.min() > -LOUDEST and samples.max() < LOUDEST):
            raise ServiceError(
                Reason.MEDIA_CORRUPT,
                "the sound holds NaN, infinity, or samples far beyond full scale; save it with samples from -1 to 1",
            )
        return samples

    def _check_length(self, frames: int) -> None:
        if frames > self._max_seconds * self.source_sampling_rate:
            raise ServiceError(
                Reason.MEDIA_TOO_LARGE,
                f"the sound is longer than the {self._max_seconds:g} s that the server takes; send a shorter one, or "
                "a part of it (start_seconds, end_seconds)",
            )

    def _empty(self) -> ServiceError:
        return ServiceError(Reason.MEDIA_EMPTY, "the sound has no samples; send a file with sound in it")


def resample(samples: npt.NDArray[np.float32], source: int, wanted: int) -> npt.NDArray[np.float32]:
    """One channel at another rate, by soxr's high quality: ``ceil(samples · wanted / source)`` samples.

    Args:
        samples: shape (samples,).
        source: their rate in hertz.
        wanted: the rate of the result in hertz.
    """
    if source == wanted or not len(samples):
        return samples
    length = -(-len(samples) * wanted // source)
    resampled: npt.NDArray[np.float32] = soxr.resample(samples, source, wanted, quality="HQ")
    return np.pad(resampled[:length], (0, max(0, length - len(resampled))))
