"""A video whose frames come as images of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.image import ImageProbe
from encoder_svc.media.limits import MediaLimits
from encoder_svc.media.video_checks import check_frame_count, check_frame_size, check_length, select_span


class FrameSequenceProbe:
    """Images of one size whose headers were read.

    Args:
        files: the images, in order.
        fps: at which they were taken. 0: not known; then their times are their places, as if it were 1.
        limits: what is allowed.
        start_seconds: as in :class:`~encoder_svc.media.video_file.VideoFileProbe`.
        end_seconds: likewise.

    Raises:
        ServiceError: one of them is no image, or of another size than the first; they are too many or too large; or a
            span is asked for and their rate is not known.
    """

    audio = None

    def __init__(
        self,
        files: Sequence[bytes],
        fps: float,
        limits: MediaLimits,
        start_seconds: float = 0.0,
        end_seconds: float = 0.0,
    ) -> None:
        check_frame_count(len(files), limits)
        if not fps and (start_seconds or end_seconds):
            raise ServiceError(
                Reason.REQUEST_INVALID,
                "start_seconds and end_seconds of frames mean nothing without frames.fps; set it, or send fewer frames",
                field="frames.fps",
            )
        images = [ImageProbe(file, limits.image_pixels) for file in files]
        self.width, self.height = images[0].width, images[0].height
        check_frame_size(self.width, self.height, limits)
        for number, image in enumerate(images):
            if (image.width, image.height) != (self.width, self.height):
                raise ServiceError(
                    Reason.MEDIA_UNSUPPORTED,
                    f"frame {number} is {image.width}×{image.height} and frame 0 {self.width}×{self.height} pixels; "
                    "give all frames one size",
                )
        self.fps = fps
        times = [number / (fps or 1.0) for number in range(len(images))]
        seconds = len(images) / (fps or 1.0)
        if fps:
            check_length(seconds, limits)
        self._span = select_span(times, seconds, start_seconds, end_seconds)
        self._images = images[self._span.start : self._span.stop]

    @cached_property
    def frame_times(self) -> Sequence[float]:
        """When each frame of the span is shown, in seconds from the first of them."""
        return tuple(number / (self.fps or 1.0) for number in range(len(self._images)))

    @property
    def duration(self) -> float:
        """Seconds of the span: to its last frame's end."""
        return len(self._images) / (self.fps or 1.0)

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        """Decodes frames, one at a time: uint8, shape (height, width, 3), RGB, upright.

        Raises:
            ServiceError: an image is truncated or corrupt.
        """
        decoded = -1
        pixels = torch.empty(0)
        for index in indices:
            if index != decoded:
                pixels, decoded = self._images[index].decode(), index
            yield pixels
