"""Animated WebP as video. FFmpeg reads no animations of this format; Pillow does."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from PIL import Image

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.limits import MediaLimits
from encoder_svc.media.truncation import ends_early
from encoder_svc.media.video_checks import check_frame_count, check_frame_size, check_length, select_span

DEFAULT_DURATION = 0.1
"""Seconds of a frame that has none of its own, as browsers show it."""

_DAMAGE = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, struct.error)


class AnimatedWebPProbe:
    """An animation whose frames were counted and timed from the file's chunks. A still picture is one of one frame.

    Args:
        data: the file.
        limits: what is allowed.
        start_seconds: as in :class:`~encoder_svc.media.video_file.VideoFileProbe`.
        end_seconds: likewise.

    Raises:
        ServiceError: the file is damaged, or beyond a limit.
    """

    audio = None

    def __init__(self, data: bytes, limits: MediaLimits, start_seconds: float = 0.0, end_seconds: float = 0.0) -> None:
        self._data = data
        try:
            durations = [duration or DEFAULT_DURATION for duration in _frame_durations(data)] or [DEFAULT_DURATION]
            check_frame_count(len(durations), limits)
            with Image.open(io.BytesIO(data), formats=("WEBP",)) as image:
                self.width, self.height = image.size
        except _DAMAGE as error:
            raise self._damage() from error
        check_frame_size(self.width, self.height, limits)
        seconds = sum(durations)
        check_length(seconds, limits)
        self.fps = len(durations) / seconds
        self._times = [0.0, *accumulate(durations)]
        self._span = select_span(self._times[:-1], seconds, start_seconds, end_seconds)

    @cached_property
    def frame_times(self) -> Sequence[float]:
        """When each frame of the span is shown, in seconds from the first of them."""
        times = self._times[self._span.start : self._span.stop]
        return tuple(time - times[0] for time in times)

    @property
    def duration(self) -> float:
        """Seconds of the span: to its last frame's end."""
        return self._times[self._span.stop] - self._times[self._span.start]

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        """Decodes frames, one at a time: uint8, shape (height, width, 3), RGB.

        Raises:
            ServiceError: the file is truncated or corrupt.
        """
        try:
            with Image.open(io.BytesIO(self._data), formats=("WEBP",)) as image:
                for index in indices:
                    image.seek(self._span.start + index)
                    yield torch.from_numpy(np.array(image.convert("RGB")))
        except _DAMAGE as error:
            raise self._damage() from error

    def _damage(self) -> ServiceError:
        if ends_early("WEBP", self._data):
            return ServiceError(Reason.MEDIA_TRUNCATED, "the WEBP file ends too early; send the whole file")
        return ServiceError(Reason.MEDIA_CORRUPT, "the WEBP file cannot be decoded; save the animation again")


def _frame_durations(data: bytes) -> Iterator[float]:
    """Seconds of each frame: one ANMF chunk each (RFC 9649, section 2.7.1.1)."""
    position = 12
    while position + 24 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, position)
        if kind == b"ANMF":
            yield int.from_bytes(data[position + 20 : position + 23], "little") / 1000
        position += 8 + size + size % 2
