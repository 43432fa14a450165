"""What is checked of every video, however it is stored: its size, its length, and the span that is asked for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.limits import MediaLimits

SPAN_TOLERANCE = 1e-6
"""Seconds by which a start or end may miss a frame's time: times of frames are fractions, offsets are decimal."""


def select_span(times: Sequence[float], seconds: float, start_seconds: float, end_seconds: float) -> range:
    """The frames from a start to an end.

    Args:
        times: of all frames, in seconds from the first, ascending.
        seconds: the length of the video.
        start_seconds: the span begins with the frame that is shown then.
        end_seconds: the span ends before the first frame from there on. 0: at the end.

    Raises:
        ServiceError: the video ends before the span begins.
    """
    if start_seconds and start_seconds >= seconds:
        raise ServiceError(
            Reason.REQUEST_INVALID,
            f"start_seconds is {start_seconds:g}, but the video lasts {seconds:.3f} s",
            field="options.start_seconds",
        )
    first = max(0, bisect_right(times, start_seconds + SPAN_TOLERANCE) - 1)
    stop = bisect_left(times, end_seconds - SPAN_TOLERANCE) if end_seconds else len(times)
    return range(first, max(stop, first + 1))


def check_frame_size(width: int, height: int, limits: MediaLimits) -> None:
    """Refuses frames of too many pixels.

    Raises:
        ServiceError: they have, or none at all.
    """
    if not width or not height:
        raise ServiceError(Reason.MEDIA_CORRUPT, "the video's header gives no frame size; save it again")
    if width * height > limits.video_pixels:
        raise ServiceError(
            Reason.MEDIA_TOO_LARGE,
            f"a frame has {width}×{height} = {width * height} pixels and the server takes {limits.video_pixels}; make "
            "the video smaller",
        )


def check_frame_count(frames: int, limits: MediaLimits) -> None:
    """Refuses a video of too many frames, or of none.

    Raises:
        ServiceError: it has.
    """
    if not frames:
        raise ServiceError(Reason.MEDIA_CORRUPT, "the video has no frames; record it again")
    if frames > limits.video_frames:
        raise ServiceError(
            Reason.MEDIA_TOO_LARGE,
            f"the video has more than {limits.video_frames} frames, which is what the server takes; cut it, or lower "
            "its frame rate",
        )


def check_length(seconds: float, limits: MediaLimits) -> None:
    """Refuses a video that lasts too long.

    Raises:
        ServiceError: it does.
    """
    if seconds > limits.video_seconds:
        raise ServiceError(
            Reason.MEDIA_TOO_LARGE,
            f"the video lasts {seconds:.0f} s and the server takes {limits.video_seconds:.0f} s; cut it",
        )
