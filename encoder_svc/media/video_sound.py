"""The sound of a video: from when its span's first frame is shown, whenever the track itself begins."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.audio import resample
from encoder_svc.media.sound_formats import SoundFormat
from encoder_svc.media.sound_tracks import ContainerTrack


class VideoSoundProbe:
    """The best sound track of a video file, whose header was read.

    Silence stands for what is missing before a track that begins late. A track that has ended before the span, or
    begins behind it, has no samples there: such a video is silent, which is no error.

    Args:
        data: the file.
        title: of its format, as people call it.
        reader: of its format, as FFmpeg calls it.
        start: when the span's first frame is shown, in seconds of the file's clock.
        seconds: of the span. None: the sound ends where the track does, even if the video ends before.
        max_seconds: of sound that are allowed.

    Raises:
        ServiceError: the track is damaged, or has none of the kinds that are decoded.
    """

    def __init__(
        self, data: bytes, title: str, reader: str, start: float, seconds: float | None, max_seconds: float
    ) -> None:
        self._track = ContainerTrack(data, SoundFormat(title, lambda _: True, container=reader))
        self._start = start
        self._seconds = seconds
        self._max_seconds = max_seconds
        self.source_sampling_rate: int = self._track.sampling_rate
        self.source_channels: int = self._track.channels

    def waveform(self, sampling_rate: int) -> torch.Tensor:
        """The sound of the span as one channel.

        Args:
            sampling_rate: in hertz.

        Returns:
            float32, shape (samples,), from -1 to 1; the first is heard with the span's first frame.

        Raises:
            ServiceError: the file is truncated or corrupt, or the sound is too long.
        """
        return torch.from_numpy(resample(self._samples, self.source_sampling_rate, sampling_rate))

    @cached_property
    def _samples(self) -> npt.NDArray[np.float32]:
        """The mean of the channels, at the rate of the file."""
        end = None if self._seconds is None else round(self._seconds * self.source_sampling_rate)
        most = round(self._max_seconds * self.source_sampling_rate)
        parts: list[npt.NDArray[np.float32]] = []
        position = kept = 0
        for number, block in enumerate(self._track.blocks()):
            if not number:
                # Known once the first block is decoded; negative where the track begins before the span.
                position = round((self._track.begins - self._start) * self.source_sampling_rate)
                silent = max(0, position)
                if max(silent, kept) > most:
                    raise self._too_long()
                if end is None or silent < end:
                    parts.append(np.zeros(silent, np.float32))
            part = block[max(0, -position) : None if end is None else max(0, end - position)].mean(axis=1)
            position += len(block)
            kept += len(part)
            if position > most and kept:
                raise self._too_long()
            parts.append(part)
            if end is not None and position >= end:
                break
        if not kept:
            return np.empty(0, np.float32)
        samples = np.concatenate(parts)
        if not np.isfinite(samples).all():
            raise ServiceError(Reason.MEDIA_CORRUPT, "the video's sound holds NaN or infinity; save it again")
        return samples

    def _too_long(self) -> ServiceError:
        return ServiceError(
            Reason.MEDIA_TOO_LARGE,
            f"the video's sound is longer than the {self._max_seconds:g} s that the server takes; send a part of it "
            "(start_seconds, end_seconds)",
        )
